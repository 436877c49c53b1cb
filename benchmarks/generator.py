"""What the load generator (``server/load.py``) costs itself: CPU for each request, and how late it sends.

    PYTHONPATH=. python benchmarks/generator.py

Against a server, in a process of its own, that answers everything at once with the same two bytes. For comparison wrk,
where it is installed. On the machine of the other benchmarks, whose server has what this leaves of the cores.
"""

import argparse
import asyncio
import resource
import shutil
import subprocess
import sys
import time
from typing import Any

from benchmarks.peers.process import free_port, listens
from server.load import Exchange, Target, closed_loop, open_loop, poisson, summarise

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"


class Answering(asyncio.Protocol):
    """Takes whatever comes in one piece for a request."""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._transport.write(ANSWER)


async def answer(port: int, seconds: float) -> None:
    server = await asyncio.get_running_loop().create_server(Answering, "127.0.0.1", port)
    async with server:
        await asyncio.sleep(seconds)


def show(name: str, exchanges: list[Exchange], cpu: float) -> None:
    summary = summarise(exchanges)
    print(
        f"{name:24} {len(exchanges) / summary.seconds:8.0f} req/s  {1e6 * cpu / len(exchanges):6.1f} us CPU a request  "
        f"p50 {summary.p50:.3f} ms  p99 {summary.p99:.3f} ms  sent late (p99) {summary.late_p99:.3f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=3.0, help="of each load")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        import uvloop

        uvloop.run(answer(options.serve, 20 * options.seconds + 60))
        return
    port = free_port()
    command = [sys.executable, __file__, "--serve", str(port), "--seconds", str(options.seconds)]
    server = subprocess.Popen(command)
    try:
        while not listens(port):
            time.sleep(0.05)
        target = Target.parse(f"http://127.0.0.1:{port}")
        requests = [target.post("/classify", b'{"inputs": "' + b"a film " * 18 + b'"}')]
        for clients in (1, 16):
            cpu = time.process_time()
            found = closed_loop(target, requests, clients=clients, seconds=options.seconds)
            show(f"closed, {clients} clients", found, time.process_time() - cpu)
        for rate in (100, 500, 2000):
            due = poisson(rate, options.seconds, seed=0)
            cpu = time.process_time()
            found = open_loop(target, requests, due)
            show(f"open, {rate} a second", found, time.process_time() - cpu)
        if shutil.which("wrk"):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            command = ["wrk", "-t1", "-c16", f"-d{max(1, round(options.seconds))}", f"http://127.0.0.1:{port}/"]
            words = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
            count = int(words[words.index("requests") - 1])
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            spent = f"{count / options.seconds:8.0f} req/s  {1e6 * cpu / count:6.1f} us CPU a request"
            print(f"{'wrk, 16 connections':24} {spent}")
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
