"""What every request gets: an id, and an answer in our shape whatever breaks."""

import re
from typing import Any

import pytest

from models.bundle import Bundle
from server.middleware import Observe, request_id_of
from tests.server.conftest import error_of, serving

pytestmark = pytest.mark.anyio


def _id(value: bytes) -> str:
    return request_id_of({"headers": [(b"x-request-id", value)]})


def test_a_callers_id_is_kept() -> None:
    assert _id(b"trace-42:a/b.c_d") == "trace-42:a/b.c_d"


def test_an_id_loses_what_could_break_a_log_or_header() -> None:
    assert _id(b'ab\r\nset-cookie: x\x00"<\xff>') == "abset-cookie:x"


def test_an_id_is_cut_to_128_characters() -> None:
    assert _id(b"a" * 5000) == "a" * 128


@pytest.mark.parametrize("value", [b"", b"\x00\xff  "])
def test_without_a_usable_id_a_new_one_is_made(value: bytes) -> None:
    assert re.fullmatch("[0-9a-f]{32}", _id(value))
    assert _id(value) != _id(value)


async def test_the_id_is_echoed_on_answers_and_on_errors(tiny_bundle: Bundle) -> None:
    async with serving(tiny_bundle) as served:
        headers = {"x-request-id": "mine"}
        for method, path in (("GET", "/models"), ("GET", "/nowhere"), ("POST", "/classify")):
            response = await served.client.request(method, path, headers=headers)
            assert response.headers.get_list("x-request-id") == ["mine"]


async def test_an_unexpected_exception_is_a_500_in_our_shape(
    tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(tiny_bundle) as served:

        async def broken(*args: Any, **kwargs: Any) -> None:
            raise RuntimeError("a surprise")

        monkeypatch.setattr(served.catalog.default.engine, "submit", broken)
        response = await served.classify("a very secret text")
        assert response.status_code == 500
        assert error_of(response)["type"] == "internal"
        assert response.headers["x-request-id"] in caplog.text
        assert "secret" not in caplog.text + response.text


async def test_other_protocols_pass_through(tiny_bundle: Bundle) -> None:
    seen = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["type"])

    async def nothing(*args: Any) -> Any:
        raise AssertionError("nobody should call this")

    async with serving(tiny_bundle) as served:
        observe = Observe(app, served.metrics, served.catalog, access_log=False)
        await observe({"type": "websocket"}, nothing, nothing)
    assert seen == ["websocket"]


async def test_the_access_log_has_the_route_and_no_text(tiny_bundle: Bundle, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with serving(tiny_bundle, access_log=True) as served:
        await served.classify("a very secret text")
        await served.client.get("/secret-path?secret=1")
    assert "POST /classify 200" in caplog.text
    assert "GET unmatched 404" in caplog.text
    assert "secret" not in "".join(
        record.getMessage() for record in caplog.records if record.name.startswith("offramp")
    )
