"""A server as a real process, and a plain client of it."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.bundle import Bundle

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import sys
from server.main import run
from server.config import StartError, load_settings
try:
    settings = load_settings()
except StartError as error:
    sys.exit(f"offramp: {error}")
sys.exit(run(settings))
"""


def start(*bundles: Path, **settings: Any) -> "subprocess.Popen[str]":
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OFFRAMP_")}
    # One process, unless a test is about several: what it looks into is that one's.
    given = {"bundles": ":".join(map(str, bundles)), "port": 0, "workers": 1} | settings
    if (temporary := given.pop("tmpdir", None)) is not None:
        environment["TMPDIR"] = str(temporary)
    environment |= {f"OFFRAMP_{name.upper()}": str(value) for name, value in given.items()}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
    )


class Process:
    """A running server: its address, its log so far, and its end."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self._lines: list[str] = []
        self._listening = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self._listening.wait(180), self.log
        found = re.search(r'listening on http://([^\s"]+)', self.log)
        assert found, self.log
        host, _, port = found[1].rpartition(":")
        self.address = host, int(port)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def url(self) -> str:
        return "http://{}:{}".format(*self.address)

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._lines.append(line)
            if "listening on" in line:
                self._listening.set()
        self._listening.set()

    @property
    def log(self) -> str:
        return "".join(self._lines)

    def wait_for(self, words: str) -> None:
        """Returns once the log has ``words``; fails after 60 s."""
        for _ in range(6000):
            if words in self.log:
                return
            time.sleep(0.01)
        raise AssertionError(self.log)

    def terminate(self) -> None:
        self.signal(signal.SIGTERM)

    def signal(self, sig: signal.Signals) -> None:
        self._process.send_signal(sig)

    @property
    def workers(self) -> list[int]:
        """Process ids of the workers that live, where there are several."""
        pid = self._process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
        return [int(child) for child in children if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()]

    def status(self) -> int:
        """The exit status, once it has ended."""
        status = self._process.wait(180)
        self._reader.join(10)
        return status


def lives(pid: int) -> bool:
    """Whether there is such a process, and it has not ended (an orphan may wait for long to be collected)."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


@contextmanager
def process(bundle: Bundle, **settings: Any) -> Iterator[Process]:
    started = start(bundle.path, **settings)
    try:
        yield Process(started)
    finally:
        if started.poll() is None:
            started.kill()
        started.wait(10)


def ended(started: "subprocess.Popen[str]") -> tuple[int, str]:
    """The exit status and the log of a server that is to end by itself."""
    try:
        _, log = started.communicate(timeout=180)
    finally:
        started.kill()
    return started.returncode, log


@dataclass(frozen=True)
class Reply:
    status: int
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


def raw_request(method: str, path: str, body: bytes, headers: Mapping[str, str] | None = None) -> bytes:
    lines = {"host": "test", "connection": "close", "content-length": str(len(body)), **(headers or {})}
    head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + body


async def ask(
    server: Process, method: str, path: str, document: Any = None, headers: Mapping[str, str] | None = None
) -> Reply:
    """One request over a connection of its own. A plain socket: a client library costs more than the tiny model."""
    body = document if isinstance(document, bytes) else b"" if document is None else json.dumps(document).encode()
    reader, writer = await asyncio.open_connection(*server.address)
    try:
        writer.write(raw_request(method, path, body, headers))
        raw = await reader.read()
    finally:
        writer.close()
    head, _, content = raw.partition(b"\r\n\r\n")
    declared = re.search(rb"content-length: (\d+)", head)
    assert declared, raw[:200]
    assert len(content) == int(declared[1]), "the answer was cut short"
    return Reply(int(head.split()[1]), content)


async def classify(server: Process, inputs: Any, **fields: Any) -> Reply:
    return await ask(server, "POST", "/classify", {"inputs": inputs, **fields})


async def metric(server: Process, series: str) -> float:
    page = (await ask(server, "GET", "/metrics")).body.decode()
    found = re.search(rf"^offramp_{re.escape(series)} (\S+)$", page, re.MULTILINE)
    return float(found[1]) if found else 0.0


async def until(server: Process, series: str, condition: Callable[[float], bool]) -> None:
    for _ in range(1000):
        if condition(await metric(server, series)):
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"{series} is still {await metric(server, series)}")
