"""The page's files, as HTTP gives them; what the page does is in tests/server/playground."""

import re
from collections.abc import AsyncIterator
from html.parser import HTMLParser

import pytest

from models.bundle import Bundle
from server.api.page import FOLDER
from tests.server.conftest import Served, error_of, serving

pytestmark = pytest.mark.anyio

FILES = sorted(path.name for path in FOLDER.iterdir())
TYPES = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "txt": "text/plain; charset=utf-8",
    "woff2": "font/woff2",
}


@pytest.fixture(scope="module")
async def served(tiny_bundle: Bundle) -> AsyncIterator[Served]:
    async with serving(tiny_bundle) as running:
        yield running


@pytest.mark.parametrize("name", FILES)
async def test_every_file_is_served_with_its_type_and_headers(served: Served, name: str) -> None:
    response = await served.client.get(f"/playground/{name}")
    assert response.status_code == 200
    assert response.content == (FOLDER / name).read_bytes()
    assert response.headers["content-type"] == TYPES[name.rpartition(".")[2]]
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "no-referrer"


async def test_the_browser_is_told_to_run_these_files_and_no_others(served: Served) -> None:
    policy = (await served.client.get("/")).headers["content-security-policy"]
    directives = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    assert directives["default-src"] == "'none'"
    assert directives["script-src"] == directives["style-src"] == directives["connect-src"] == "'self'"
    assert directives["frame-ancestors"] == directives["base-uri"] == directives["form-action"] == "'none'"
    assert directives["require-trusted-types-for"] == "'script'"
    assert "unsafe" not in policy


async def test_a_file_that_the_browser_has_is_not_sent_again(served: Served) -> None:
    first = await served.client.get("/")
    tag = first.headers["etag"]
    assert first.headers["cache-control"] == "no-cache"
    for known in (tag, f'"another", W/{tag}'):
        again = await served.client.get("/", headers={"if-none-match": known})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
        assert again.headers["content-security-policy"] == first.headers["content-security-policy"]
    assert (await served.client.get("/", headers={"if-none-match": '"another"'})).status_code == 200
    assert (await served.client.get("/playground/app.js", headers={"if-none-match": tag})).status_code == 200


@pytest.mark.parametrize("name", ["nothing.js", "..%2Fapi%2Fpage.py", "%2e%2e/config.py", ""])
async def test_nothing_else_is_served(served: Served, name: str) -> None:
    response = await served.client.get(f"/playground/{name}")
    assert response.status_code == 404
    assert error_of(response)["type"] == "not_found"


def test_the_page_names_only_files_that_are_there_by_relative_addresses() -> None:
    found: list[tuple[str, str]] = []

    class Links(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            found.extend((tag, value) for name, value in attrs if name in ("src", "href") and value)

    Links().feed((FOLDER / "index.html").read_text(encoding="utf-8"))
    loaded = {address for tag, address in found if tag != "a"}
    assert {address.removeprefix("playground/") for address in loaded} <= set(FILES)
    assert {f"playground/{name}" for name in FILES if name.endswith((".js", ".css"))} <= loaded
    assert [address for _, address in found if address.startswith(("/", "http", "//"))] == []


def test_the_files_load_nothing_from_elsewhere_and_make_no_markup_from_strings() -> None:
    for name in FILES:
        if name.endswith((".css", ".js", ".html")):
            text = (FOLDER / name).read_text(encoding="utf-8")
            addresses = set(re.findall(r"https?://[^\s\"')]+", text))
            assert addresses <= {"http://www.w3.org/2000/svg"}, name
            assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text), name


async def test_the_page_says_nothing_of_the_models_without_a_key(tiny_bundle: Bundle) -> None:
    async with serving(tiny_bundle, api_key=("secret-of-the-house",)) as locked:
        response = await locked.client.get("/")
        assert response.status_code == 200
        assert "tiny" not in response.text
