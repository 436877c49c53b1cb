"""Log lines as JSON, and metrics on a port of their own."""

import json
import logging
import re
import sys

import pytest

from models.bundle import Bundle
from server.logs import FIELDS, JsonLines
from tests.server.process import Process, ask, classify, process

pytestmark = pytest.mark.anyio


def test_a_line_is_one_json_object_with_its_fields_and_exception() -> None:
    try:
        raise RuntimeError("broken\nin two")
    except RuntimeError:
        record = logging.LogRecord("offramp", logging.ERROR, "x.py", 1, "it %s", ("broke\nhere",), sys.exc_info())
    setattr(record, FIELDS, {"request_id": "mine"})
    line = JsonLines().format(record)
    assert "\n" not in line
    document = json.loads(line)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", document["time"])
    assert (document["level"], document["logger"], document["request_id"]) == ("error", "offramp", "mine")
    assert document["message"] == "it broke\nhere"
    assert "RuntimeError" in document["exception"]


async def test_every_line_of_a_server_is_json_and_requests_carry_their_id_and_no_text(tiny_bundle: Bundle) -> None:
    with process(tiny_bundle, log_format="json", access_log=True, log_level="debug") as server:
        body = {"inputs": "xyzzy film"}
        assert (await ask(server, "POST", "/classify", body, headers={"x-request-id": "mine"})).status == 200
        assert (await ask(server, "POST", "/v2/models/xyzzy/infer", {"inputs": ["xyzzy"]})).status == 404
        server.terminate()
        assert server.status() == 0
    lines = [json.loads(line) for line in server.log.splitlines()]
    answered = next(line for line in lines if line.get("request_id") == "mine")
    assert {name: answered[name] for name in ("method", "route", "status", "model")} == {
        "method": "POST",
        "route": "/classify",
        "status": 200,
        "model": "tiny",
    }
    assert answered["duration_ms"] > 0
    assert "xyzzy" not in server.log


async def test_metrics_can_move_to_a_port_of_their_own(tiny_bundle: Bundle) -> None:
    with process(tiny_bundle, metrics_port=0, api_key="a-key") as server:
        found = re.search(r"metrics on http://(.*):(\d+)/metrics", server.log)
        assert found, server.log
        monitor = Process.__new__(Process)
        monitor.address = found[1], int(found[2])
        page = await ask(monitor, "GET", "/metrics")
        assert page.status == 200
        assert b"offramp_ready 1.0" in page.body
        assert (await ask(monitor, "GET", "/nowhere")).json()["error"]["type"] == "not_found"
        assert (await classify(monitor, "a film")).status == 404
        key = {"authorization": "Bearer a-key"}
        assert (await ask(server, "GET", "/metrics", headers=key)).status == 404
        server.terminate()
        assert server.status() == 0
        assert "Traceback" not in server.log
