"""The image as a container: only where IMAGE names one that has been built, see docs/operations.md, "Containers"."""

import asyncio
import json
import os
import shlex
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from benchmarks.peers.process import free_port
from tests.server.process import ask, until
from tests.server.test_process import HEAVY

IMAGE = os.environ.get("IMAGE", "")
ENGINE = shlex.split(os.environ.get("CONTAINER_ENGINE", "docker"))
RUN_FLAGS = shlex.split(os.environ.get("CONTAINER_RUN_FLAGS", ""))
KEY = "a-key-of-the-tests"
WITH_KEY = {"authorization": f"Bearer {KEY}"}
MOST_BYTES_ADDED = 300_000_000

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(not IMAGE, reason="takes minutes: build the image, then IMAGE=offramp:cpu pytest ..."),
]


def _engine(*arguments: str, check: bool = True) -> "subprocess.CompletedProcess[str]":
    done = subprocess.run([*ENGINE, *arguments], check=False, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 or not check, f"{arguments}: {done.stderr}"
    return done


class Container:
    """A running container on the host's network; ``address`` is where its server listens, or will."""

    def __init__(self, **settings: Any) -> None:
        self.address = "127.0.0.1", free_port()
        given = {"port": self.address[1], "api_key": KEY} | settings
        variables = [f"--env=OFFRAMP_{name.upper()}={value}" for name, value in given.items()]
        # All that docker-compose.yml takes away from it.
        taken = ["--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges"]
        self._name = _engine("run", "--detach", "--network=host", *taken, *RUN_FLAGS, *variables, IMAGE).stdout.strip()

    def inside(self, *command: str) -> "subprocess.CompletedProcess[str]":
        return _engine("exec", self._name, *command, check=False)

    def says(self, code: str) -> str:
        """What ``code`` prints when the image's Python runs it in the container."""
        done = self.inside("python", "-c", code)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def healthy(self) -> bool:
        """The command of the image's HEALTHCHECK, run as the engine would."""
        (image,) = json.loads(_engine("image", "inspect", IMAGE).stdout)
        health = image.get("Healthcheck") or image["Config"]["Healthcheck"]
        assert health["Test"][0] == "CMD"
        return self.inside(*health["Test"][1:]).returncode == 0

    def wait_until_healthy(self) -> None:
        for _ in range(300):
            if self.healthy():
                return
            time.sleep(0.2)
        raise AssertionError(_engine("logs", self._name).stderr)

    def terminate(self) -> None:
        _engine("kill", "--signal=TERM", self._name)

    def status(self) -> int:
        """Its exit status, once it has ended."""
        return int(_engine("wait", self._name).stdout)

    def remove(self) -> None:
        _engine("rm", "--force", self._name)


@contextmanager
def container(**settings: Any) -> Iterator[Container]:
    started = Container(**settings)
    try:
        started.wait_until_healthy()
        yield started
    finally:
        started.remove()


@pytest.fixture(scope="module")
def running() -> Iterator[Container]:
    with container() as started:
        yield started


def test_it_adds_less_than_300_mb_to_its_base() -> None:
    base = os.environ.get("BASE_IMAGE", "python:3.11-slim-bookworm")
    sizes = [json.loads(_engine("image", "inspect", name).stdout)[0]["Size"] for name in (IMAGE, base)]
    assert 0 < sizes[0] - sizes[1] < MOST_BYTES_ADDED, sizes


async def test_it_answers_whoever_has_the_key(running: Container) -> None:
    assert (await ask(running, "POST", "/classify", {"inputs": "a film"})).status == 401
    reply = await ask(running, "POST", "/classify", {"inputs": "a gripping film that never lets go"}, WITH_KEY)
    assert reply.status == 200
    assert reply.json()["results"][0]["label"] == "positive"


def test_it_is_nobody_in_particular_and_cannot_write_anything(running: Container) -> None:
    assert running.says("import os; print(os.getuid(), os.getgid())") == "10001 10001"
    status = dict(line.split(":\t") for line in running.says("print(open('/proc/1/status').read())").splitlines())
    assert (int(status["CapEff"], 16), status["NoNewPrivs"], status["Uid"].split()[0]) == (0, "1", "10001")
    for folder in ("/", "/venv", "/etc"):
        done = running.inside("python", "-c", f"open('{folder}/written', 'w')")
        assert "Read-only file system" in done.stderr, folder


def test_it_holds_what_serving_needs_and_neither_torch_nor_tests_nor_pip(running: Container) -> None:
    names = running.says("from importlib.metadata import distributions as d; print({x.metadata['Name'] for x in d()})")
    assert "'onnxruntime'" in names
    for unwanted in ("torch", "transformers", "onnx", "pytest"):
        assert f"'{unwanted}'" not in names
    assert running.inside("/venv/bin/python", "-m", "pip", "--version").returncode != 0
    assert running.says("import numpy, pathlib; print(*pathlib.Path(numpy.__file__).parent.rglob('tests'))") == ""


async def test_sigterm_under_load_loses_no_accepted_request_and_exits_0() -> None:
    with container(drain_seconds=300) as started:
        asked = [asyncio.ensure_future(ask(started, "POST", "/classify", HEAVY, WITH_KEY)) for _ in range(20)]
        await until(started, "inflight_requests", lambda count: count == 20)
        await asyncio.to_thread(started.terminate)
        replies = await asyncio.gather(*asked)
        assert [reply.status for reply in replies] == [200] * 20
        assert await asyncio.to_thread(started.status) == 0


def test_it_is_no_longer_healthy_while_it_drains() -> None:
    with container(shutdown_delay_seconds=30) as started:
        started.terminate()
        for _ in range(50):
            if not started.healthy():
                return
            time.sleep(0.1)
        raise AssertionError("still healthy after SIGTERM")
