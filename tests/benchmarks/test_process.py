"""What is read of a server's process tree, on real processes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.peers.process import StartFailed, free_port, serving, stat_fields, status_number

# Listens, and has a child that burns CPU; the child outlives its parent's SIGTERM.
SERVER = """
import os, signal, socket, sys, time
listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
if os.fork() == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while time.process_time() < 0.3:
        pass
    time.sleep(600)
signal.pause()
"""


def test_cpu_and_memory_are_those_of_the_whole_tree_and_nothing_outlives_it(tmp_path: Path) -> None:
    port = free_port()
    command = [sys.executable, "-c", SERVER, str(port)]
    with serving(command, port=port, log=tmp_path / "log", environment={}, cwd=tmp_path) as server:
        parent, child = server.pids()
        while server.cpu_seconds() < 0.3:
            time.sleep(0.05)
        assert int(stat_fields(child)[1]) == parent
        assert server.threads() == 2
        assert server.peak_rss_mb() >= server.rss_mb() > status_number(parent, "VmRSS") / 1024
    assert not server.running
    for _ in range(200):
        # Init, which inherits it, has to collect it first.
        if (stat_fields(child) or ["Z"])[0] == "Z":
            return
        time.sleep(0.05)
    raise AssertionError("the child lives on")


def test_a_server_that_ends_at_once_is_told_with_its_own_words(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit('no such model')"]
    with (
        pytest.raises(StartFailed, match="no such model"),
        serving(command, port=free_port(), log=tmp_path / "log", environment={}, cwd=tmp_path),
    ):
        pass


def test_a_name_with_brackets_and_spaces_is_no_field(tmp_path: Path) -> None:
    odd = tmp_path / "a) R (b"
    odd.symlink_to("/bin/sleep")
    process = subprocess.Popen([odd, "60"])
    try:
        while status_number(process.pid, "VmRSS") == 0:
            time.sleep(0.01)
        assert int(stat_fields(process.pid)[1]) == os.getpid()
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def test_a_process_that_has_gone_counts_nothing() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert stat_fields(process.pid) == []
    assert status_number(process.pid, "VmRSS") == 0
