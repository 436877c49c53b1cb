"""Takes the screenshots of the README anew: ``python -m tests.server.playground.screenshots``."""

import io
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

from models.bundle import SHIPPED_BUNDLE, Bundle
from tests.server.playground.conftest import ARGUMENTS, QUIET, chromium
from tests.server.process import process

IMAGES = Path(__file__).resolve().parents[3] / "docs" / "images"
TRIES = 40


def main() -> None:
    path = chromium()
    IMAGES.mkdir(exist_ok=True)
    with process(Bundle.load(SHIPPED_BUNDLE), **QUIET) as server, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        light = opened(browser, server.url, "light", width=1280, height=1060)
        save(light, "page.png")
        phone = opened(browser, server.url, "dark", width=390, height=1210)
        phone.locator("#answer").evaluate("answer => answer.scrollIntoView()")
        save(phone, "page-phone.png")
        browser.close()


def opened(browser: Browser, address: str, scheme: str, *, width: int, height: int) -> Page:
    page = browser.new_page(color_scheme=scheme, viewport={"width": width, "height": height}, reduced_motion="reduce")
    page.goto(address)
    page.locator("#answer").wait_for()
    # A picture of a quiet machine: times of a busy one would say nothing of the server. So the quickest of several.
    times = [answer_time(page) for _ in range(TRIES)]
    for _ in range(10 * TRIES):
        if answer_time(page) <= 1.2 * min(times):
            break
    page.mouse.move(0, 0)
    page.get_by_role("button", name="Classify").blur()
    return page


def answer_time(page: Page) -> float:
    """Asks again, and returns the milliseconds that the server took, once the page shows them."""
    with page.expect_response("**/classify") as answered:
        page.get_by_role("button", name="Classify").click()
    page.locator("body:not([aria-busy])").wait_for()
    return sum(float(part.rpartition("=")[2]) for part in answered.value.headers["server-timing"].split(","))


def save(page: Page, name: str) -> None:
    image = Image.open(io.BytesIO(page.screenshot()))
    image.convert("RGB").quantize(128, dither=Image.Dither.NONE).save(IMAGES / name, optimize=True)


if __name__ == "__main__":
    main()
