"""A server under test: its process tree, when it is ready, and what it uses, from /proc (Linux)."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

TICKS = os.sysconf("SC_CLK_TCK")


class StartFailed(Exception):
    """A server did not come up; the message ends with its log."""


class ServerProcess:
    """A server in a process group of its own."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def pids(self) -> list[int]:
        """The process and all its living descendants."""
        parents: dict[int, list[int]] = {}
        for entry in os.listdir("/proc"):
            if entry.isdigit() and (fields := stat_fields(int(entry))):
                parents.setdefault(int(fields[1]), []).append(int(entry))
        found = [self._process.pid]
        for pid in found:
            found += parents.get(pid, [])
        return found

    def cpu_seconds(self) -> float:
        """User and system time of the tree so far, ended children that were waited for included."""
        return sum(sum(map(int, fields[11:15])) for pid in self.pids() if (fields := stat_fields(pid))) / TICKS

    def rss_mb(self, what: str = "VmRSS") -> float:
        """Resident memory of the tree in MB, pages that its processes share counted for each of them."""
        return sum(status_number(pid, what) for pid in self.pids()) / 1024

    def peak_rss_mb(self) -> float:
        """The sum of the processes' own peaks since they began."""
        return self.rss_mb("VmHWM")

    def threads(self) -> int:
        return sum(status_number(pid, "Threads") for pid in self.pids())

    def stop(self) -> int:
        """Ends the group, gently first; returns the server's exit status."""
        # The second signal also ends workers that outlive their server (LitServe's do, now and then).
        for sig in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, sig)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(15)
        return self._process.wait()


@contextmanager
def serving(
    command: Sequence[str], *, port: int, log: Path, environment: Mapping[str, str], cwd: Path, patience: float = 180.0
) -> Iterator[ServerProcess]:
    """Runs ``command`` for as long as the block lasts, from when ``port`` takes connections.

    Raises :class:`StartFailed` where the server ends, or does not listen within ``patience`` seconds.
    """
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command,
            stdout=stream,
            stderr=subprocess.STDOUT,
            cwd=cwd,
            env={**os.environ, **environment},
            start_new_session=True,
        )
    server = ServerProcess(process)
    try:
        until = time.monotonic() + patience
        while not listens(port):
            if not server.running or time.monotonic() > until:
                tail = "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:])
                raise StartFailed(f"{' '.join(command)} is not up\n{tail}")
            time.sleep(0.1)
        yield server
    finally:
        server.stop()


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def stat_fields(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on (proc(5)'s field 3 is the first); empty for a process gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    # The command's name stands in brackets and may hold anything.
    return text.rpartition(")")[2].split()


def status_number(pid: int, name: str) -> int:
    """A number out of /proc/PID/status; 0 for a process gone."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in text.splitlines() if line.startswith(f"{name}:")), 0)
