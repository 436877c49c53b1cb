"""A headless Chromium, and servers for it to visit."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from models.bundle import SHIPPED_BUNDLE, Bundle
from tests.server.process import Process, process

# As root, as in containers, it starts only without its sandbox; the rest keeps it from calling home.
ARGUMENTS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()
QUIET = {"runs": 1, "threads": 1, "lone_threads": 1, "measure_seconds": 0}
KEY = "a-key-for-the-page"

Visit = Callable[..., Page]


def chromium() -> str:
    """The path of Chromium; skips where there is none, but fails in CI, which installs it."""
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None and not os.environ.get("CI"):
        pytest.skip("Chromium is not installed (Debian: apt-get install chromium)")
    assert found, "Chromium is missing: .ci/run installs it"
    return found


# Of a module, not of the session: while it is open no other event loop can run in this thread.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = chromium()
    expect.set_options(timeout=60_000)
    with sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield opened
        opened.close()


@pytest.fixture
def visit(browser: Browser) -> Iterator[Visit]:
    """Opens a page in a profile of its own; the test fails if the page complained on the console or asked another host.

    Keywords are Playwright's for a context; ``wait=False`` does not wait for the first answer.
    """
    contexts = []
    complaints: list[str] = []
    hosts: set[str] = set()

    def open_page(address: str, *, wait: bool = True, expect: str = "", **options: Any) -> Page:
        context = browser.new_context(**({"reduced_motion": "reduce"} | options))
        context.set_default_timeout(60_000)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on(
            "console",
            lambda message: (
                complaints.append(message.text)
                if message.type in ("error", "warning") and not (expect and expect in message.text)
                else None
            ),
        )
        page.on("request", lambda request: hosts.add(request.url.partition("://")[2].partition("/")[0]))
        page.goto(address)
        if wait:
            page.locator("#answer").wait_for()
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []
    assert len(hosts) <= 1


@pytest.fixture(scope="module")
def shipped() -> Iterator[Process]:
    """A server of the bundle that ships."""
    with process(Bundle.load(SHIPPED_BUNDLE), **QUIET) as running:
        yield running


@pytest.fixture(scope="module")
def locked(tiny_bundle: Bundle, pair_bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """A server of a model of texts and one of pairs that asks for a key, and has its metrics on another port."""
    keys = Path(tmp_path_factory.mktemp("keys")) / "keys.txt"
    keys.write_text(f"{KEY}\n")
    bundles = os.pathsep.join((str(tiny_bundle.path), str(pair_bundle.path)))
    with process(tiny_bundle, bundles=bundles, api_key_file=keys, metrics_port=0, **QUIET) as running:
        yield running
