"""Raw bytes at the socket: whatever comes, the answer is one of the contract, the next request is served, and nothing
grows."""

import asyncio
import json
import os
import random
import re
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from benchmarks.peers.process import status_number
from models.bundle import Bundle
from server.protocol import MAX_HEAD_BYTES
from tests.server.process import Process, classify, metric, process, raw_request, until

pytestmark = pytest.mark.anyio

SECONDS = 1.0
"""The server's request_timeout_seconds: a slow request costs the test no more."""
MIB = 1024 * 1024
CONTRACT = {200, 400, 404, 405, 408, 413, 422, 429, 431, 503, 504}
HEAD = "POST /classify HTTP/1.1\r\nHost: x\r\n"


def post(body: bytes, *headers: str, path: str = "/classify") -> bytes:
    given = "".join(f"{header}\r\n" for header in (f"Content-Length: {len(body)}", "Connection: close", *headers))
    return f"POST {path} HTTP/1.1\r\nHost: x\r\n{given}\r\n".encode() + body


def chunked(rest: bytes) -> bytes:
    return f"{HEAD}Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n".encode() + rest


def head(*headers: str) -> bytes:
    return (HEAD + "".join(f"{header}\r\n" for header in headers) + "\r\n").encode("latin-1")


def _head_of(size: int) -> bytes:
    before, after = b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX: ", b"\r\n\r\n"
    return before + b"a" * (size - len(before) - len(after)) + after


def filled(before: str, unit: str, after: str) -> bytes:
    """A body just within the server's 2 MiB, of as many units as fit."""
    return (before + unit * ((2 * MIB - len(before) - len(after)) // len(unit)) + after).encode()


GOOD = json.dumps({"inputs": "a film"}).encode()
KEPT = raw_request("POST", "/classify", GOOD, {"connection": "keep-alive"})
LIVE = b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n"
UPGRADE = b"Connection: upgrade\r\nUpgrade: h2c\r\n"

# What is sent, and the statuses of the answers to it, in order.
NO_HTTP: dict[str, tuple[bytes, tuple[int, ...]]] = {
    "a TLS greeting": (bytes.fromhex("1603010200010001fc0303") + bytes(range(256)), (400,)),
    "the preface of HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", (400,)),
    "zeros": (bytes(1000), (400,)),
    "HTTP/3.0": (b"GET /livez HTTP/3.0\r\n\r\n", (400,)),
    "UTF-16": ("GET /livez HTTP/1.1\r\n\r\n".encode("utf-16"), (400,)),
    "an unknown method": (b"BREW /classify HTTP/1.1\r\nHost: x\r\n\r\n", (400,)),
    "a method in small letters": (b"get /livez HTTP/1.1\r\nHost: x\r\n\r\n", (400,)),
    "a path in Latin-1": (b"GET /caf\xe9 HTTP/1.1\r\nHost: x\r\n\r\n", (400,)),
    "a target that is no URL": (b"GET http://[::1/livez HTTP/1.1\r\nHost: x\r\n\r\n", (400,)),
    "a tunnel": (b"CONNECT example.com:443 HTTP/1.1\r\nHost: x\r\n\r\n", (400,)),
    "a header without a colon": (head("Nothing"), (400,)),
    "a zero in a header": (head("X: a\0b"), (400,)),
    "a folded header": (head("X: a\r\n b"), (400,)),
    "a negative length": (head("Content-Length: -1"), (400,)),
    "a length in words": (head("Content-Length: many"), (400,)),
    "a length beyond 64 bits": (head("Content-Length: 99999999999999999999"), (400,)),
    "two lengths": (head("Content-Length: 5", "Content-Length: 6"), (400,)),
    "a length and chunks": (head("Content-Length: 5", "Transfer-Encoding: chunked"), (400,)),
    "an unknown coding": (head("Transfer-Encoding: gzip"), (400,)),
    "a chunk without a size": (chunked(b"zz\r\na\r\n0\r\n\r\n"), (400,)),
    "a chunk of negative size": (chunked(b"-5\r\nhello\r\n0\r\n\r\n"), (400,)),
    "a chunk beyond 64 bits": (chunked(b"f" * 17 + b"\r\n"), (400,)),
    "a chunk longer than its size": (chunked(b"1\r\n" + GOOD + b"\r\n0\r\n\r\n"), (400,)),
    "a head of as many bytes as are taken": (_head_of(65_536), (200,)),
    "a head of one byte more": (_head_of(65_537), (431,)),
    "a head of a few more": (_head_of(70_000), (431,)),
    "a head of twice as many": (_head_of(131_000), (431,)),
    "a long header": (head("X: " + "a" * 600_000), (431,)),
    "many headers": (head(*["X: a"] * 100_000), (431,)),
    "a long path": (b"GET /" + b"a" * 300_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n", (431,)),
    "a chunk with a long extension": (chunked(b"5;" + b"a" * 300_000 + b"\r\nhello\r\n0\r\n\r\n"), (431,)),
    "long trailers": (chunked(b"0\r\n" + b"X: a\r\n" * 100_000 + b"\r\n"), (431,)),
    "a long trailer": (chunked(b"0\r\nX: " + b"a" * 600_000 + b"\r\n\r\n"), (431,)),
}
REQUESTS: dict[str, tuple[bytes, tuple[int, ...]]] = {
    "an absolute target": (b"GET http://example.com/livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", (200,)),
    "an unknown path of odd bytes": (b"GET /%ff%00%2e%2e/ HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", (404,)),
    "a wrong method": (b"PATCH /classify HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", (405,)),
    "no target": (b"OPTIONS * HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", (404,)),
    "HTTP/0.9": (b"GET /livez\r\n\r\n", (200,)),
    "HTTP/1.0": (b"GET /livez HTTP/1.0\r\n\r\n", (200,)),
    "chunks and trailers": (
        chunked(b"5\r\n" + GOOD[:5] + b"\r\nf;a=b\r\n" + GOOD[5:] + b"\r\n0\r\nX-Request-ID: a\r\n\r\n"),
        (200,),
    ),
    "a chunk for each byte": (chunked(b"".join(b"1\r\n%c\r\n" % byte for byte in GOOD) + b"0\r\n\r\n"), (200,)),
    "no body": (post(b""), (400,)),
    "a length that is too short": (KEPT.replace(b"content-length: 20", b"content-length: 10"), (400, 400)),
    "a length that is too long": (post(GOOD).replace(b"Length: 20", b"Length: 30"), (408,)),
    "half a head": (KEPT[:40], (408,)),
    "half a body": (KEPT[:-5], (408,)),
    "half a chunk": (chunked(b"5\r\nhel"), (408,)),
    "many requests at once": (LIVE * 50 + post(GOOD), (200,) * 51),
    "a last request and a megabyte more": (post(GOOD) + b"a" * MIB, (200,)),
    "a request and no HTTP": (KEPT + b"\0\0\0\0\r\n\r\n", (200, 400)),
    "two requests and a long header": (KEPT + LIVE + head("X: " + "a" * 600_000), (200, 200, 431)),
    "two requests and half a head": (KEPT + LIVE + KEPT[:40], (200, 200, 408)),
    "an upgrade behind a request": (LIVE + LIVE[:-2] + UPGRADE + b"\r\n" + post(GOOD), (200, 200, 200)),
    "an upgrade behind a request, with a body of requests": (
        LIVE + post(LIVE * 10_000, "Connection: upgrade", "Upgrade: h2c"),
        (200, 400),
    ),
    # The last that is read there.
    "an upgrade behind a body": (KEPT + LIVE[:-2] + UPGRADE + b"\r\n" + LIVE, (200, 200)),
    "an upgrade behind a body, with a body of requests": (
        KEPT + post(LIVE * 10_000, "Connection: upgrade", "Upgrade: h2c"),
        (200, 400),
    ),
    "two requests and a broken body": (KEPT + LIVE + chunked(b"zz\r\n"), (200, 200, 400)),
    "a declared length beyond the limit": (head(f"Content-Length: {5 * MIB}", "Connection: close"), (413,)),
    "a body beyond the limit": (post(b"a" * 5 * MIB), (413,)),
    "chunks beyond the limit": (chunked((b"%x\r\n" % MIB + b"a" * MIB + b"\r\n") * 5 + b"0\r\n\r\n"), (413,)),
    "a body beyond the limit that asks first": (post(b"a" * 3 * MIB, "Expect: 100-continue"), (413,)),
    "a body at an unknown path": (post(b"a" * 3 * MIB, path="/nowhere"), (404,)),
    "a body that nobody reads, and another request": (
        raw_request("GET", "/livez", b"a" * MIB, {"connection": "keep-alive"}) + post(GOOD),
        (200,),
    ),
    "a body in UTF-16": (post(GOOD.decode().encode("utf-16")), (400,)),
    "a body in Latin-1": (post('{"inputs": "café"}'.encode("latin-1")), (400,)),
    "a byte-order mark": (post(b"\xef\xbb\xbf" + GOOD), (400,)),
    "half of a character": (post(rb'{"inputs": "\ud800"}'), (422,)),
    "half of a character in UTF-8": (post(b'{"inputs": "\xed\xa0\x80"}'), (400,)),
    "a zero in a text": (post(rb'{"inputs": "a \u0000 film"}'), (200,)),
    "a zero in a body": (post(b'{"inputs": "a \0 film"}'), (400,)),
    "a body of zeros": (post(bytes(MIB)), (400,)),
    "a body of blanks": (post(filled("{", " ", "}")), (422,)),
    "100,000 brackets": (post(b'{"inputs": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"), (413,)),
    "20,000 objects, each in another": (post(b'{"inputs": ' + b'{"text": ' * 20_000 + b"1" + b"}" * 20_001), (400,)),
    "100,000 texts": (post(json.dumps({"inputs": ["a"] * 100_000}).encode()), (413,)),
    "1000 texts": (post(json.dumps({"inputs": ["a"] * 1000}).encode()), (413,)),
    "700,000 lists": (post(filled('{"inputs": [', "[],", "[]]}")), (413,)),
    "700,000 lists in place of the object": (post(filled("[", "[],", "[]]")), (413,)),
    "700,000 lists without an end": (post(filled('{"inputs": [', "[],", "")), (413,)),
    "a text of commas and brackets": (post(filled('{"inputs": "', "[,", '"}')), (413,)),
    "one field many times": (post(filled('{"inputs": "a"', ', "a": 1', "}")), (413,)),
    "many fields": (post(json.dumps({f"k{n}": n for n in range(20_000)}).encode()), (422,)),
    "a field twice": (post(b'{"inputs": "a film", "inputs": "a dull film"}'), (200,)),
    "a number of a million digits": (post(b'{"inputs": "a", "quality": ' + b"9" * MIB + b"}"), (400,)),
    "a fraction of a million digits": (post(b'{"inputs": "a", "quality": 0.' + b"9" * MIB + b"}"), (200,)),
    "a number beyond all": (post(b'{"inputs": "a", "quality": 1e999}'), (422,)),
    "no number": (post(b'{"inputs": "a", "quality": NaN}'), (422,)),
    "a name of a million letters": (post(b'{"inputs": "a", "' + b"k" * MIB + b'": 1}'), (422,)),
    "a JSON of many lists before a tensor": (
        post(
            filled('{"inputs": [', "[],", "[]]}"),
            "Inference-Header-Content-Length: 2000000",
            path="/v2/models/tiny/infer",
        ),
        (413,),
    ),
}

SENT = NO_HTTP | REQUESTS


def cuts(sent: bytes) -> list[int]:
    """Where a first part may end, for the server to read it alone: nowhere, at once, amidst, about the size of the
    largest head that is taken, and just short of all that one read takes."""
    return [0, 1, len(sent) // 2, *(first for first in (40_000, MAX_HEAD_BYTES, 250_000) if first < len(sent))]


@pytest.fixture(scope="module")
def server(tiny_bundle: Bundle) -> Iterator[Process]:
    with process(tiny_bundle, request_timeout_seconds=SECONDS) as running:
        yield running
        running.terminate()
        assert running.status() == 0
        assert "Traceback" not in running.log


@dataclass(frozen=True)
class Answer:
    status: int
    head: bytes
    body: bytes


def answers(raw: bytes) -> list[Answer]:
    """All that ``raw`` holds, which must be whole answers and nothing else."""
    found = []
    while raw:
        head, end, rest = raw.partition(b"\r\n\r\n")
        status = re.match(rb"HTTP/1\.1 (\d{3}) [A-Z]", head)
        assert end, raw[:200]
        assert status, raw[:200]
        if status[1] == b"100":
            raw = rest
            continue
        declared = re.search(rb"(?im)^content-length: (\d+)\r?$", head)
        assert declared, head
        length = int(declared[1])
        assert len(rest) >= length, "the answer was cut short"
        found.append(Answer(int(status[1]), head, rest[:length]))
        raw = rest[length:]
    return found


def check(answer: Answer) -> None:
    """``answer`` is one that the contract knows."""
    assert answer.status in CONTRACT, answer
    if answer.status == 200:
        return
    document = json.loads(answer.body)
    if isinstance(document["error"], str):
        assert set(document) <= {"error", "error_type"}
    else:
        assert set(document) == {"error"}
        assert set(document["error"]) == {"type", "message", "param"}


async def exchange(server: Process, *parts: bytes, pause: float = 0.0, quiet: float = 30.0) -> list[Answer]:
    """Sends ``parts`` and reads until the server ends the connection or says nothing for ``quiet`` seconds."""
    reader, writer = await asyncio.open_connection(*server.address)
    received = b""
    reading = asyncio.ensure_future(reader.read(MIB))
    try:
        for part in parts:
            # Reading at the same time, as a client does that notices a refusal.
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(pause)
        while chunk := await asyncio.wait_for(reading, quiet):
            received += chunk
            reading = asyncio.ensure_future(reader.read(MIB))
    except TimeoutError:
        pass
    finally:
        reading.cancel()
        writer.close()
    return answers(received)


@pytest.mark.parametrize(("name", "first"), [(name, first) for name in SENT for first in cuts(SENT[name][0])])
async def test_whatever_comes_however_it_arrives_gets_its_answers_and_the_next_request_is_served(
    server: Process, name: str, first: int
) -> None:
    sent, statuses = SENT[name]
    parts = [sent[:first], sent[first:]] if first else [sent]
    got = await exchange(server, *parts, pause=0.1 if first else 0.0)
    for answer in got:
        check(answer)
    assert tuple(answer.status for answer in got) == statuses
    assert b"connection: close" in got[-1].head.lower()
    assert (await classify(server, "a film")).status == 200


async def test_an_answer_comes_in_one_piece(server: Process) -> None:
    reader, writer = await asyncio.open_connection(*server.address)
    for _ in range(20):
        writer.write(KEPT)
        assert [answer.status for answer in answers(await reader.read(MIB))] == [200]
    writer.close()


async def test_the_answer_to_head_is_a_head_and_the_next_request_is_answered(server: Process) -> None:
    reader, writer = await asyncio.open_connection(*server.address)
    for path in ("/", "/livez", "/v2/models/tiny/ready"):
        writer.write(f"HEAD {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 OK")
    writer.write(LIVE)
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 OK")
    writer.close()


def mutated(chance: random.Random, request: bytes) -> bytes:
    """``request`` with one to four accidents."""
    data = bytearray(request)
    for _ in range(chance.randint(1, 4)):
        place = chance.randrange(len(data) + 1)
        until = min(len(data), place + chance.randint(1, 30))
        match chance.randrange(8):
            case 0:
                data[place:until] = b""
            case 1:
                data[place:place] = chance.randbytes(chance.randint(1, 20))
            case 2:
                data[place:place] = data[place:until]
            case 3:
                data[place:] = b""
            case 4:
                data[place:until] = chance.choice((b"\0", b"\r\n", b"\r\n\r\n", b"[", b'"', b"\xff\xfe", b"9" * 40))
            case 5:
                data[place:place] = request
            case _:
                # Of equal length: what frames the request stays true, and its JSON is what breaks.
                data[-place:] = data[-place:].replace(
                    *chance.choice(((b"a", b"9"), (b'"', b"'"), (b"film", b"\\n\\r")))
                )
    return bytes(data)


DOORS = (
    post(GOOD),
    post(b'{"inputs": [["a"], ["b c"]], "parameters": {"top_k": 1}}', path="/predict"),
    post(b'{"input": "a film", "quality": 0.97}'),
    post(
        b'{"inputs": [{"name": "text", "shape": [1], "datatype": "BYTES", "data": ["a"]}]}',
        path="/v2/models/tiny/infer",
    ),
    chunked(b"14\r\n" + GOOD + b"\r\n0\r\n\r\n"),
    b"GET /models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
)


async def test_requests_with_accidents_get_answers_of_the_contract(server: Process) -> None:
    chance = random.Random(5)
    cases = [mutated(chance, chance.choice(DOORS)) for _ in range(400)]
    turns = asyncio.Semaphore(40)

    async def one(sent: bytes) -> list[Answer]:
        async with turns:
            # In pieces, so that the end of a piece falls anywhere.
            cut = len(sent) // 2
            return await exchange(server, sent[:cut], sent[cut:])

    got = await asyncio.gather(*(one(sent) for sent in cases))
    for sent, found in zip(cases, got, strict=True):
        # Who sends nothing gets nothing.
        assert found or not sent.strip(b"\r\n"), sent
        for answer in found:
            check(answer)
    assert {answer.status for found in got for answer in found} >= {200, 400, 404, 408, 422}
    assert (await classify(server, "a film")).status == 200


@pytest.mark.parametrize("reset", [False, True])
async def test_clients_that_go_at_any_stage_leave_nothing_behind(server: Process, reset: bool) -> None:
    heavy = post(json.dumps({"inputs": ["good film " * 30] * 64, "quality": 1.0}).encode())
    for stage in (0, 10, heavy.index(b"\r\n\r\n") + 4, len(heavy) // 2, len(heavy)):
        for wait in (0.0, 0.01, 0.1):
            client = socket.create_connection(server.address)
            client.sendall(heavy[:stage])
            await asyncio.sleep(wait)
            if reset:
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.close()
    assert (await classify(server, "a film")).status == 200
    await until(server, "inflight_requests", lambda count: count == 0)
    assert await metric(server, 'queue_depth{model="tiny",segment="1"}') == 0


@pytest.mark.parametrize(
    "start", [b"GET /no", head("Content-Length: 1000"), head("Content-Length: 1000").replace(b"classify", b"nowhere")]
)
async def test_a_client_that_trickles_is_sent_away(server: Process, start: bytes) -> None:
    """Byte by byte, whether the head, the body, or a body whose request has been answered."""
    reader, writer = await asyncio.open_connection(*server.address)
    writer.write(start)

    async def trickle() -> None:
        while True:
            writer.write(b"a")
            await writer.drain()
            await asyncio.sleep(0.05)

    trickling = asyncio.ensure_future(trickle())
    (only,) = answers(await reader.read())
    assert only.status == (404 if b"/nowhere" in start else 408)
    # The server reads on for a while, and closes; what comes then is refused by its kernel.
    with pytest.raises(ConnectionError):
        await trickling


async def test_nothing_grows(server: Process) -> None:
    async def round_of_everything() -> None:
        turns = asyncio.Semaphore(8)

        async def one(sent: bytes) -> None:
            async with turns:
                await exchange(server, sent)

        await asyncio.gather(*(one(sent) for sent, _ in SENT.values()))
        assert (await classify(server, "a film")).status == 200

    def used() -> tuple[int, int, int]:
        """File descriptors, threads, resident memory in MB."""
        folder = f"/proc/{server.pid}/fd"
        return (
            len(os.listdir(folder)),
            status_number(server.pid, "Threads"),
            status_number(server.pid, "VmRSS") // 1024,
        )

    async def settled(files: int) -> tuple[int, int, int]:
        for _ in range(200):
            if used()[0] <= files:
                break
            await asyncio.sleep(0.05)
        return used()

    idle = used()[0]
    await round_of_everything()
    before = await settled(idle)
    for _ in range(2):
        await round_of_everything()
    after = await settled(before[0])
    assert after[0] <= before[0]
    assert after[1] <= before[1]
    # Megabytes go through; what the allocator keeps of them is its affair.
    assert after[2] <= before[2] + 64
