"""Keys: who may ask, and that nobody else learns one."""

import logging
from pathlib import Path
from typing import Any

import pytest

from models.bundle import Bundle
from server.api import keys
from server.config import Settings, StartError, load_settings
from tests.server.conftest import Served, error_of, serving
from tests.server.process import ask, process

pytestmark = pytest.mark.anyio

KEY = "correct-horse-battery-staple"
OTHER = "another-key"


async def status(served: Served, key: str | None, path: str = "/models") -> int:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return (await served.client.get(path, headers=headers)).status_code


async def test_without_keys_everybody_may_ask(tiny_bundle: Bundle) -> None:
    async with serving(tiny_bundle) as served:
        assert await status(served, None) == 200


async def test_each_of_several_keys_opens_and_nothing_else_does(tiny_bundle: Bundle, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"# of the search team\n\n  {OTHER}  \n")
    async with serving(tiny_bundle, api_key=(KEY,), api_key_file=file) as served:
        assert [await status(served, key) for key in (KEY, OTHER)] == [200, 200]
        for wrong in (None, "", KEY[:-1], KEY + "x", KEY.upper(), "#", "schlüssel", f"{KEY}, {OTHER}"):
            headers = [] if wrong is None else [(b"authorization", b"Bearer " + wrong.encode())]
            response = await served.client.get("/models", headers=headers)
            assert (response.status_code, error_of(response)["type"]) == (401, "unauthorized"), wrong
            assert response.headers["www-authenticate"] == "Bearer"
        basic = await served.client.get("/models", auth=("user", KEY))
        assert basic.status_code == 401


async def test_probes_and_metrics_are_open_and_everything_else_is_not(tiny_bundle: Bundle) -> None:
    async with serving(tiny_bundle, api_key=(KEY,)) as served:
        operations = [(path, method) for path, on in served.app.openapi()["paths"].items() for method in on]
        operations += [("/", "get"), ("/docs", "get"), ("/openapi.json", "get")]
        assert len(operations) > 15
        opened = set()
        for path, method in operations:
            response = await served.client.request(method, path.format(model="tiny", version="1"))
            assert response.status_code in (200, 401), path
            opened |= {(method, path)} if response.status_code == 200 else set()
        # And the page, which asks its reader for the key; what is posted to the same address needs one.
        assert opened == {("get", path) for path in ("/livez", "/readyz", "/metrics", "/")}
        assert ("/", "post") in operations
        assert await status(served, None, "/playground/app.js") == 200
        # Not even whether there is such a route.
        assert await status(served, None, "/nowhere") == 401
        assert await status(served, None, "/livez/") == 401


async def test_refusals_have_an_id_and_the_shape_of_their_door(tiny_bundle: Bundle) -> None:
    async with serving(tiny_bundle, api_key=(KEY,)) as served:
        ours = await served.client.post("/classify", json={"inputs": "film"}, headers={"x-request-id": "mine"})
        assert ours.headers["x-request-id"] == "mine"
        assert (await served.client.post("/predict", json={"inputs": "film"})).json()["error_type"] == "Validation"
        assert isinstance((await served.client.get("/v2")).json()["error"], str)


async def test_no_key_is_compared_by_a_comparison_that_tells_how_much_was_right(
    tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[Any] = []

    def compare(given: bytes, digest: bytes) -> bool:
        compared.append((len(given), len(digest)))
        return given == digest

    monkeypatch.setattr(keys.hmac, "compare_digest", compare)
    async with serving(tiny_bundle, api_key=(KEY, OTHER)) as served:
        for key in (KEY, OTHER, "x"):
            await status(served, key)
    # Every key, whether an earlier one has matched or not, and digests of one length.
    assert compared == [(32, 32)] * 6


async def test_a_key_is_never_shown_or_logged(tiny_bundle: Bundle, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(OTHER)
    with process(tiny_bundle, api_key=KEY, api_key_file=file, log_level="debug", access_log=True) as server:
        reply = await ask(server, "GET", "/info", headers={"authorization": f"Bearer {KEY}"})
        assert reply.status == 200
        assert KEY.encode() not in reply.body
        assert (await ask(server, "GET", "/info", headers={"authorization": "Bearer wrong-key"})).status == 401
        server.terminate()
        assert server.status() == 0
        assert "GET /info 200" in server.log
        for key in (KEY, OTHER, "wrong-key"):
            assert key not in server.log
    assert KEY not in repr(load_settings(api_key=(KEY,)))


@pytest.mark.parametrize("value", ["two words", "schlüssel", "tab\tkey"])
def test_a_key_that_no_header_can_carry_stops_the_start_without_being_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, value: str
) -> None:
    monkeypatch.setenv("OFFRAMP_API_KEY", value)
    with pytest.raises(StartError, match="a key is one or more printable ASCII") as caught:
        load_settings()
    assert value not in str(caught.value)
    monkeypatch.delenv("OFFRAMP_API_KEY")
    file = tmp_path / "keys"
    file.write_text(f"\n{value}\n", encoding="utf-8")
    with pytest.raises(StartError, match="keys, line 2: a key is") as caught:
        keys.load_keys(load_settings(api_key_file=file))
    assert value not in str(caught.value)


@pytest.mark.parametrize(("content", "message"), [("# none\n", "no key in it"), (None, "No such file")])
def test_a_file_without_keys_stops_the_start(tmp_path: Path, content: str | None, message: str) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_text(content)
    with pytest.raises(StartError, match=message):
        keys.load_keys(load_settings(api_key_file=file))


def test_keys_in_the_environment_are_separated_by_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFRAMP_API_KEY", f"{KEY}, {OTHER}")
    assert len(keys.load_keys(load_settings())) == 2


async def test_pages_of_other_origins_may_call_only_where_the_setting_lists_them(tiny_bundle: Bundle) -> None:
    asked = {"origin": "https://app.example", "access-control-request-method": "POST"}
    headers = "authorization, content-type, x-offramp, inference-header-content-length"
    wanted = {"access-control-request-headers": headers}
    async with serving(tiny_bundle) as served:
        response = await served.client.get("/models", headers={"origin": "https://app.example"})
        assert "access-control-allow-origin" not in response.headers
        assert (await served.client.options("/classify", headers=asked)).status_code == 405
    async with serving(tiny_bundle, cors_allow_origin=("https://app.example",), api_key=(KEY,)) as served:
        allowed = await served.client.options("/classify", headers=asked | wanted)
        assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, "https://app.example")
        other = await served.client.options("/classify", headers=asked | wanted | {"origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers
        response = await served.client.get(
            "/models", headers={"origin": "https://app.example", "authorization": f"Bearer {KEY}"}
        )
        exposed = response.headers["access-control-expose-headers"].split(", ")
        assert {"X-Request-ID", "X-Offramp-Exits", "Inference-Header-Content-Length"} <= set(exposed)


def test_settings_can_be_logged_as_a_whole(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("offramp").warning("%s", load_settings(api_key=(KEY,)))
    assert "api_key" in caplog.text
    assert KEY not in caplog.text
    assert KEY not in Settings(api_key=(KEY,)).model_dump_json()
