"""What the documents show is run here: the examples, and the request whose answer README.md prints."""

import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import offramp
from models.bundle import Bundle

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "docs" / "examples"
README = (ROOT / "README.md").read_text(encoding="utf-8")


@contextmanager
def serving(*arguments: str) -> Iterator[str]:
    """A real server process on a free port; gives its address, and expects a clean end."""
    command = [sys.executable, "-m", "offramp", "serve", "--port", "0", *arguments]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        seen = []
        for line in process.stderr:
            seen.append(line)
            if found := re.search(r"listening on (http://\S+)", line):
                break
        else:
            pytest.fail("the server did not start: " + "".join(seen))
        try:
            yield found[1]
        finally:
            process.terminate()
            process.stderr.read()
    assert process.returncode == 0


@pytest.fixture(scope="module")
def url(tiny_bundle: Bundle) -> Iterator[str]:
    with serving(str(tiny_bundle.path)) as address:
        yield address


def run_example(name: str, **environment: str) -> str:
    command = [sys.executable, str(EXAMPLES / name)] if name.endswith(".py") else [str(EXAMPLES / name)]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def post(address: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        f"{address}/classify", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:
        return dict(json.load(response))


def test_every_example_is_listed_and_tested() -> None:
    names = {file.name for file in EXAMPLES.iterdir() if file.suffix in (".py", ".sh")}
    listed = set(re.findall(r"\]\(([\w.]+)\)", (EXAMPLES / "README.md").read_text(encoding="utf-8")))
    tested = set(re.findall(r'run_example\("([\w.]+)"', Path(__file__).read_text(encoding="utf-8")))
    assert names == listed == tested


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_one_request_with_curl(url: str) -> None:
    answer = json.loads(run_example("classify.sh", OFFRAMP_URL=url))
    assert answer["results"][0]["exit"]["tier"] == 0.99


def test_several_texts_at_several_depths(url: str) -> None:
    lines = run_example("classify.py", OFFRAMP_URL=url).splitlines()
    assert len(lines) == 16
    assert all(" at exit 4, final, " in line for line in lines[1:4])
    assert all(re.search(r" at exit [12], (patience|max_exit), ", line) for line in lines[13:])


def test_a_file_of_texts_without_a_server(tiny_bundle: Bundle, tmp_path: Path) -> None:
    command = tmp_path / "offramp"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{ROOT / "offramp.py"}" "$@"\n', encoding="utf-8")
    command.chmod(0o755)
    printed = run_example("batch.sh", OFFRAMP=str(command), OFFRAMP_BUNDLE=str(tiny_bundle.path))
    assert [json.loads(line)["label"] in tiny_bundle.manifest.labels for line in printed.splitlines()] == [True, True]


def test_readme_shows_the_request_of_the_example() -> None:
    script = (EXAMPLES / "classify.sh").read_text(encoding="utf-8")
    bodies = [re.search(r"-d '(.*?)'", text, re.DOTALL) for text in (README, script)]
    assert bodies[0] is not None
    assert bodies[1] is not None
    assert json.loads(bodies[0][1]) == json.loads(bodies[1][1])


@pytest.mark.skipif(not offramp.shipped_bundle().is_dir(), reason="no shipped bundle in this checkout")
def test_readme_shows_the_answer_of_the_shipped_bundle() -> None:
    request = re.search(r"-d '(.*?)'\n```\n```json\n(.*?)\n```", README, re.DOTALL)
    assert request is not None
    shown = json.loads(request[2])
    with serving() as address:
        given = post(address, json.loads(request[1]))
    assert shown["model"] == given["model"]
    assert [result["label"] for result in shown["results"]] == [result["label"] for result in given["results"]]
    assert shown["results"][0]["exit"]["number"] == given["results"][0]["exit"]["number"]
    # Kernels of other processors round otherwise; int8 shows it in the second digit at most.
    assert shown["results"][0]["score"] == pytest.approx(given["results"][0]["score"], abs=0.02)
