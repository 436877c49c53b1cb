"""The transformers folder behind LitServe, batched as its documentation shows. Runs in LitServe's own environment.

python litserve_app.py FOLDER PORT
"""

import sys

import litserve
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer


class Classifier(litserve.LitAPI):
    def __init__(self, folder, **options):
        super().__init__(**options)
        self.folder = folder

    def setup(self, device):
        self.tokenizer = AutoTokenizer.from_pretrained(self.folder)
        model = AutoModelForSequenceClassification.from_pretrained(self.folder, trust_remote_code=True)
        self.model = model.to(device).eval()
        self.device = device

    def decode_request(self, request):
        return request["text"]

    @torch.inference_mode()
    def predict(self, texts):
        inputs = self.tokenizer(texts, padding=True, truncation=True, return_tensors="pt").to(self.device)
        scores = self.model(**inputs).logits.softmax(-1)
        return [(int(row.argmax()), float(row.max())) for row in scores]

    def unbatch(self, output):
        return output

    def encode_response(self, output):
        best, score = output
        return {"label": self.model.config.id2label[best], "score": score}


if __name__ == "__main__":
    # 1 ms: longer ones slow a lone client down by as much, and 16 clients fill batches without.
    api = Classifier(sys.argv[1], max_batch_size=16, batch_timeout=0.001)
    litserve.LitServer(api, accelerator="cpu").run(host="127.0.0.1", port=int(sys.argv[2]), generate_client_file=False)
