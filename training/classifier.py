"""A finished sequence classifier of transformers as a multi-exit network whose last exit is that classifier.

BERT's pooler and classifier, and RoBERTa's head, are what our exit head is over ``cls``: dense, tanh, classifier.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from models.architecture import ExitSpec
from models.network import Backbone, MultiExitNetwork, build_network, load_backbone

# How transformers names the two linear maps of each kind of head; "" stands for our dense and classifier.
_HEADS = (
    ("bert.pooler.dense", "classifier"),  # BertForSequenceClassification
    ("classifier.dense", "classifier.out_proj"),  # RobertaForSequenceClassification and its kin
)


@dataclass(frozen=True, slots=True)
class Classifier:
    """A classifier's ``backbone``, its ``head`` by our names, and its ``labels`` in class order."""

    backbone: Backbone
    head: dict[str, Tensor]
    labels: tuple[str, ...]

    def network(self, exits: Sequence[ExitSpec], max_length: int) -> MultiExitNetwork:
        """The classifier with further exits, without dropout: it must answer as it always does, and so teach.

        Raises ValueError where the last of ``exits`` does not read [CLS] after the whole encoder.
        """
        last = exits[-1]
        if (last.head, last.after_layer) != ("cls", self.backbone.num_layers):
            raise ValueError(f"the last exit must read cls after layer {self.backbone.num_layers}, as the classifier")
        network = build_network(
            self.backbone,
            num_labels=len(self.labels),
            exits=exits,
            max_length=max_length,
            dropout=0.0,
            attention_dropout=0.0,
        )
        network.exits[str(last.number)].load_state_dict(self.head)
        return network

    def alone(self, max_length: int) -> MultiExitNetwork:
        """The classifier as it is, with one exit, ready to answer."""
        only = ExitSpec(number=1, after_layer=self.backbone.num_layers, head="cls")
        return self.network([only], max_length).eval()


def load_classifier(name: str) -> Classifier:
    """Loads a fine-tuned sequence classifier by hub name or folder.

    Raises ValueError for what :func:`models.network.load_backbone` refuses, for a model without a trained classifier,
    with another kind of head, or whose answer is not one of several classes; logits are compared with transformers'.
    """
    from transformers import AutoModelForSequenceClassification
    from transformers.utils import logging

    # It would report at length that the encoder alone has no classifier; what matters is checked below.
    logging.set_verbosity_error()
    backbone = load_backbone(name)
    model, loading = AutoModelForSequenceClassification.from_pretrained(
        str(Path(name).expanduser()), dtype=torch.float32, output_loading_info=True
    )
    # transformers fills what a checkpoint lacks with noise, and only warns.
    if loading["missing_keys"]:
        raise ValueError(f"{name!r} is no fine-tuned classifier: its checkpoint has no {min(loading['missing_keys'])}")
    config = model.config
    if config.num_labels < 2 or config.problem_type in ("regression", "multi_label_classification"):
        kind = config.problem_type or "regression"
        raise ValueError(f"{name!r} must answer with one of at least two classes; this one does {kind}")
    state = model.state_dict()
    for dense, classifier in _HEADS:
        if f"{dense}.weight" in state and f"{classifier}.weight" in state:
            names = {"dense": dense, "classifier": classifier}
            break
    else:
        raise ValueError(f"{name!r}: the head of {type(model).__name__} is not that of BERT or RoBERTa")
    head = {
        f"{ours}.{part}": state[f"{theirs}.{part}"] for ours, theirs in names.items() for part in ("weight", "bias")
    }
    found = Classifier(backbone, head, tuple(str(config.id2label[i]) for i in range(config.num_labels)))
    _check_against(model, found, name)
    return found


def _check_against(model: nn.Module, classifier: Classifier, name: str) -> None:
    """Raises ValueError where transformers gives other logits from the same weights (another activation, say)."""
    network = classifier.alone(512)
    padding = int(str(classifier.backbone.config.get("pad_token_id") or 0))
    ids = torch.tensor([[i for i in range(network.architecture.vocab_size) if i != padding][:8]])
    mask = torch.ones_like(ids)
    with torch.inference_mode():
        theirs, ours = model.eval()(input_ids=ids, attention_mask=mask).logits, network(ids, mask)[1].logits
    difference = float((theirs - ours).abs().max())
    # Not "> limit": NaN must fail as well.
    if not difference < 1e-4:
        raise ValueError(
            f"{name!r}: from the same weights, transformers computes logits that differ by up to {difference:.2g}; "
            f"{type(model).__name__} is not supported"
        )
