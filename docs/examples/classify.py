"""Several texts at several depths, with nothing but the standard library.

Prints for each wish the label of every text, the exit that it left at and what that cost in layers.
"""

import json
import os
import urllib.error
import urllib.request
from typing import Any

URL = os.environ.get("OFFRAMP_URL", "http://localhost:8000")
TEXTS = [
    "a gripping film that never lets go",
    "two hours that i will never get back",
    "it is not without charm , but the charm wears thin well before the end",
]
WISHES: list[dict[str, Any]] = [
    {"quality": 1.0},
    {"speed": 2.0},
    {"criterion": "confidence", "threshold": 0.9},
    {"criterion": "patience", "threshold": 1, "max_exit": 2},
]


def classify(body: dict[str, Any]) -> dict[str, Any]:
    """Posts ``body`` and returns the answer; an error's own message says which field was wrong."""
    request = urllib.request.Request(f"{URL}/classify", json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return dict(json.load(response))
    except urllib.error.HTTPError as error:
        raise SystemExit(json.load(error)["error"]["message"]) from None


for wish in WISHES:
    print(wish)
    for text, result in zip(TEXTS, classify({"inputs": TEXTS, **wish})["results"], strict=True):
        left = result["exit"]
        print(f"  {result['label']} ({result['score']:.2f}) at exit {left['number']}, {left['reason']},", end=" ")
        print(f"for the cost of {left['cost']:.2f} of {left['of']} layers: {text}")
