"""What a careful person writes without Offramp: FastAPI, one fused ONNX graph at full depth, one session on all cores.

    GRAPH=model.onnx SETTINGS=settings.json uvicorn fastapi_app:app --app-dir benchmarks/peers

Synchronous endpoint, so FastAPI runs it on its thread pool; tokenizers and ONNX Runtime let go of Python's lock. The
session's settings are ONNX Runtime's own but for the number of threads, which it would take from the host.
"""

import json
import os
from pathlib import Path

import numpy as np
import onnxruntime
from fastapi import FastAPI
from pydantic import BaseModel
from tokenizers import Tokenizer


class Request(BaseModel):
    text: str


class Response(BaseModel):
    label: str
    score: float


def create_app(graph: str, settings: dict) -> FastAPI:
    tokenizer = Tokenizer.from_file(settings["tokenizer"])
    tokenizer.enable_truncation(settings["max_length"])
    tokenizer.no_padding()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = len(os.sched_getaffinity(0))
    session = onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
    labels, offset = settings["labels"], settings["position_offset"]
    app = FastAPI()

    @app.post("/classify")
    def classify(request: Request) -> Response:
        encoding = tokenizer.encode(request.text)
        ids = np.array([encoding.ids], dtype=np.int64)
        feeds = {
            "input_ids": ids,
            "attention_mask": np.ones_like(ids),
            "position_ids": np.arange(offset, offset + ids.shape[1], dtype=np.int64)[None],
        }
        if settings["uses_token_type_ids"]:
            feeds["token_type_ids"] = np.array([encoding.type_ids], dtype=np.int64)
        logits = session.run(["logits"], feeds)[0][0]
        scores = np.exp(logits - logits.max())
        best = int(scores.argmax())
        return Response(label=labels[best], score=float(scores[best] / scores.sum()))

    return app


if "GRAPH" in os.environ:
    app = create_app(os.environ["GRAPH"], json.loads(Path(os.environ["SETTINGS"]).read_text(encoding="utf-8")))
