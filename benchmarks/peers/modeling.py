"""A BERT encoder with the last exit's head, for ``AutoModelForSequenceClassification`` with ``trust_remote_code``.

Lies in the folder that ``benchmarks/peers/network.py`` writes, so that servers of transformers models serve the same
network that Offramp serves. It imports nothing of Offramp, and runs with transformers 4 and 5.
"""

import torch
from torch import nn
from transformers import BertModel, BertPreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput


class ExitForSequenceClassification(BertPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.pooling = config.pooling
        self.bert = BertModel(config, add_pooling_layer=False)
        if self.pooling == "attention":
            size = config.hidden_size // config.num_attention_heads
            self.pool_query = nn.Parameter(torch.zeros(config.num_attention_heads, size))
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None, token_type_ids=None, **_unused):
        """``[B, S]`` each → logits ``[B, K]``."""
        hidden = self.bert(input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids).last_hidden_state
        pooled = self.pool(hidden, attention_mask.bool())
        return SequenceClassifierOutput(logits=self.classifier(torch.tanh(self.dense(pooled))))

    def pool(self, hidden, real):
        """``hidden [B, S, H]``, ``real [B, S]`` → ``[B, H]``; see ``models/network.py``."""
        if self.pooling == "cls":
            return hidden[:, 0]
        weights = real.unsqueeze(-1).to(hidden.dtype)
        if self.pooling == "mean":
            return (hidden * weights).sum(1) / weights.sum(1)
        per_head = hidden.reshape(*hidden.shape[:-1], *self.pool_query.shape)
        scores = (per_head * self.pool_query).sum(-1) / self.pool_query.shape[1] ** 0.5
        weights = scores.masked_fill(~real.unsqueeze(-1), -torch.inf).softmax(dim=1)
        return (weights.unsqueeze(-1) * per_head).sum(1).flatten(1)
