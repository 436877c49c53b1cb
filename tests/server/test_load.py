"""The load generator, against servers whose behaviour is known byte by byte."""

import itertools
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from server.load import Exchange, LoadError, Target, closed_loop, open_loop, poisson, summarise

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\no\r\n1\r\nk\r\n0\r\n\r\n"
REFUSED = b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 0\r\n\r\n"
LAST = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nok"

Answer = Callable[[int, bytes], bytes | None]
"""From the number of a request on its connection and what was received: the answer, or None to hang up."""


class Wire:
    """A server: what it received, and how many connections it took."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.target = Target.parse(f"http://127.0.0.1:{self._listener.getsockname()[1]}")
        self.received: list[bytes] = []
        self.connections = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            threading.Thread(target=self._talk, args=(connection,), daemon=True).start()

    def _talk(self, connection: socket.socket) -> None:
        with connection:
            number = 0
            while head := connection.recv(65536):
                self.received.append(head)
                answer = self._answer(number, head)
                if answer is None:
                    return
                connection.sendall(answer)
                if b"connection: close" in answer:
                    return
                number += 1

    def close(self) -> None:
        # shutdown, too: a close alone does not wake a thread that accepts.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


@contextmanager
def wire(answer: Answer) -> Iterator[Wire]:
    server = Wire(answer)
    try:
        yield server
    finally:
        server.close()


def posts(target: Target, count: int) -> list[bytes]:
    return [target.post("/classify", b'{"inputs": "text %d"}' % number) for number in range(count)]


def test_a_closed_loop_sends_each_request_in_turn_and_reads_each_answer() -> None:
    with wire(lambda number, head: OK) as server:
        found = closed_loop(server.target, posts(server.target, 3), clients=1, most=7)
    assert [one.request for one in found] == [0, 1, 2, 0, 1, 2, 0]
    assert {(one.status, one.body) for one in found} == {(200, b"ok")}
    assert server.received[4].endswith(b'{"inputs": "text 1"}')


def test_connections_are_kept_and_never_more_than_there_are_clients() -> None:
    with wire(lambda number, head: OK) as server:
        found = closed_loop(server.target, posts(server.target, 5), clients=3, most=60)
    assert len(found) == 60
    assert server.connections == 3


def test_a_request_that_finds_every_connection_busy_counts_its_waiting() -> None:
    def slow(number: int, head: bytes) -> bytes:
        time.sleep(0.05)
        return OK

    with wire(slow) as server:
        found = open_loop(server.target, posts(server.target, 1), [0.0] * 4, most_connections=1)
    # One after the other on one connection, but all four were due at once.
    assert [one.due for one in found] == [0.0] * 4
    assert found[3].sent >= 0.15
    assert found[3].seconds >= 0.2


def test_an_open_loop_does_not_wait_for_answers() -> None:
    together = threading.Barrier(4)

    def all_at_once(number: int, head: bytes) -> bytes:
        together.wait(20)
        return OK

    with wire(all_at_once) as server:
        found = open_loop(server.target, posts(server.target, 4), [0.0, 0.01, 0.02, 0.03])
    assert [one.status for one in found] == [200] * 4


def test_nothing_is_sent_before_it_is_due() -> None:
    due = [0.0, 0.03, 0.031, 0.1]
    with wire(lambda number, head: OK) as server:
        found = open_loop(server.target, posts(server.target, 4), due)
    assert sorted(one.due for one in found) == due
    assert all(one.due <= one.sent <= one.done for one in found)


def test_chunked_answers_and_answers_that_end_the_connection_are_read_alike() -> None:
    with wire(lambda number, head: CHUNKED if number == 0 else LAST) as server:
        found = closed_loop(server.target, posts(server.target, 1), clients=1, most=4)
    assert [(one.status, one.body) for one in found] == [(200, b"ok")] * 4
    assert server.connections == 2


def test_a_kept_connection_that_the_server_closed_costs_no_request() -> None:
    with wire(lambda number, head: OK if number == 0 else None) as server:
        found = closed_loop(server.target, posts(server.target, 1), clients=1, most=3)
    assert [one.status for one in found] == [200] * 3


def test_a_server_that_hangs_up_on_a_fresh_connection_has_lost_the_request() -> None:
    with wire(lambda number, head: None) as server:
        found = closed_loop(server.target, posts(server.target, 1), clients=1, most=2)
    assert [one.status for one in found] == [0, 0]


def test_what_is_no_http_has_lost_the_request() -> None:
    with wire(lambda number, head: b"220 mail.example.org ESMTP\r\n") as server:
        found = closed_loop(server.target, posts(server.target, 1), clients=1, most=1)
    assert [one.status for one in found] == [0]


def test_where_nobody_listens_every_request_is_lost_and_nothing_hangs() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        target = Target.parse(f"http://127.0.0.1:{closed.getsockname()[1]}")
    found = open_loop(target, posts(target, 2), [0.0, 0.0])
    assert [one.status for one in found] == [0, 0]


def test_a_server_that_never_answers_is_given_up() -> None:
    silence = threading.Event()

    def silent(number: int, head: bytes) -> None:
        silence.wait(20)

    with wire(silent) as server:
        found = open_loop(server.target, posts(server.target, 3), [0.0, 0.0, 0.0], most_connections=2, patience=0.2)
        silence.set()
    # One of them was still waiting for a connection.
    assert [one.status for one in found] == [0, 0, 0]


def test_a_large_body_arrives_whole() -> None:
    body = b'"' + b"a" * 5_000_000 + b'"'
    arrived = 0

    def counting(number: int, head: bytes) -> bytes:
        nonlocal arrived
        arrived += len(head)
        return OK if arrived >= len(body) else b""

    with wire(counting) as server:
        request = server.target.post("/classify", body)
        found = closed_loop(server.target, [request], clients=1, most=1)
    assert [one.status for one in found] == [200]
    assert arrived == len(request)


def test_poisson_times_are_random_in_number_and_distance_but_the_same_for_a_seed() -> None:
    times = poisson(100, 50, seed=1)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    deviation = (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5
    assert times == sorted(times) == poisson(100, 50, seed=1)
    assert times != poisson(100, 50, seed=2)
    # 5,000 expected, with a standard deviation of 71; exponential gaps deviate by as much as their mean.
    assert abs(len(times) - 5000) < 300
    assert abs(deviation / mean - 1) < 0.1


def test_a_summary_counts_latencies_from_when_requests_were_due_and_of_200s_only() -> None:
    found = [
        Exchange(0, due=0.0, sent=0.0, done=0.010, status=200, body=b""),
        Exchange(1, due=0.1, sent=0.3, done=0.320, status=200, body=b""),
        Exchange(2, due=0.2, sent=0.2, done=0.201, status=429, body=b""),
        Exchange(3, due=0.9, sent=0.9, done=1.500, status=200, body=b""),
    ]
    summary = summarise(found, seconds=1.0)
    assert summary.statuses == {200: 3, 429: 1}
    assert (summary.requests, summary.ok) == (4, 3)
    assert summary.p50 == pytest.approx(220)
    assert summary.longest == pytest.approx(600)
    # The last one came after the second that was asked about.
    assert summary.throughput == 2.0
    assert summary.late_p99 == pytest.approx(194, abs=1)


@pytest.mark.parametrize("url", ["localhost:8000", "https://localhost", "http://", "http://localhost:99999", "ftp://x"])
def test_what_is_no_http_url_is_named(url: str) -> None:
    with pytest.raises(LoadError, match=re.escape(url)):
        Target.parse(url)


def test_the_path_of_a_url_stands_before_the_route() -> None:
    target = Target.parse("http://127.0.0.1:81/models/a/")
    request = target.post("/classify", b"{}", {"authorization": "Bearer x"})
    assert target.address == ("127.0.0.1", 81)
    head = request.split(b"\r\n")
    assert head[0] == b"POST /models/a/classify HTTP/1.1"
    assert {b"host: 127.0.0.1:81", b"authorization: Bearer x", b"content-length: 2"} <= set(head)
