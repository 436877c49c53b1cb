"""The page in a real browser, against a real server of the bundle that ships."""

import re
import subprocess
from typing import Any

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, Route, expect

from tests.server.playground.conftest import KEY, Visit
from tests.server.process import Process

TEXT = "Less a film than a very long trailer for a better one."
# Browsers note a refused request on the console by themselves.
REFUSED = "Failed to load resource"
SERIOUS = ("serious", "critical")


def ask(server: Process, **fields: Any) -> dict[str, Any]:
    answer = httpx.post(f"{server.url}/classify", json={"inputs": TEXT, "explain": True} | fields, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()["results"][0]


def tiers(server: Process) -> list[float]:
    (model,) = httpx.get(f"{server.url}/models", timeout=60).json()["models"]
    return sorted(tier["quality"] for tier in model["tiers"])


def classify(page: Page, text: str = TEXT) -> None:
    """Fills in ``text``, presses the button and waits for what comes of it."""
    page.get_by_label("Your text").fill(text)
    with page.expect_response(lambda response: response.url.endswith("/classify")):
        page.get_by_role("button", name="Classify").click()


def slide(page: Page, key: str) -> None:
    """Presses ``key`` on the slider and waits for the answer."""
    with page.expect_response(lambda response: response.url.endswith("/classify")):
        page.get_by_label("How sure is enough?").press(key)


def states(page: Page) -> list[str]:
    return page.locator("#road > li").evaluate_all("items => items.map((item) => item.dataset.state)")


def way_to(exit: int, exits: int = 5) -> list[str]:
    return ["passed"] * (exit - 1) + ["taken"] + ["ahead"] * (exits - exit)


def serious(page: Page) -> list[str]:
    """What axe-core finds on the page that keeps people out."""
    found = Axe().run(page).response["violations"]
    return [
        f"{rule['id']}: {node['html'][:200]}" for rule in found if rule["impact"] in SERIOUS for node in rule["nodes"]
    ]


def overflow(page: Page) -> int:
    return page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")


def test_the_page_opens_with_an_answer(visit: Visit, shipped: Process) -> None:
    page = visit(shipped.url)
    expect(page).to_have_title("Offramp")
    expect(page.get_by_label("Model")).to_have_value("sst2-minilm-l6")
    expect(page.locator("#quality-help")).to_contain_text("At least 99 of 100 answers")
    assert states(page).count("taken") == 1


def test_a_text_is_classified_and_the_way_it_took_is_shown(visit: Visit, shipped: Process) -> None:
    page = visit(shipped.url)
    classify(page)
    told = ask(shipped, quality=0.99)
    left = told["exit"]
    expect(page.locator("#sign .label")).to_have_text(told["label"])
    expect(page.locator("#sign .tab")).to_have_text(f"Exit {left['number']}")
    expect(page.locator("#sign")).to_contain_text(f"{left['of'] - left['layer']} of {left['of']}")
    chance = int(left["agreement"] * 1e4) / 100
    expect(page.locator("#sign .why")).to_contain_text(f"would say the same at {chance} %")
    assert states(page) == way_to(left["number"])
    expect(page.get_by_role("status")).to_contain_text(f"{told['label']}, ")


def test_each_exit_passed_shows_its_bars_its_threshold_and_its_time(visit: Visit, shipped: Process) -> None:
    page = visit(shipped.url)
    classify(page)
    exits = ask(shipped, quality=0.99)["exits"]
    assert len(exits) > 2
    cards = page.locator("#road > li")
    for card, told in zip(cards.all(), exits, strict=False):
        for bar, score in zip(card.locator(".labels > li").all(), told["scores"], strict=True):
            expect(bar).to_contain_text(score["label"])
            share = float(bar.locator(".bar").evaluate("bar => bar.style.getPropertyValue('--share')"))
            assert share == pytest.approx(score["score"], abs=1e-4)
        expect(card.locator(".needs")).to_have_text("needs 97.67 %")
        expect(card.locator(".mark")).to_be_visible()
        assert re.fullmatch(r"[\d.]+ layers\s*[\d.]+\sms", card.locator(".facts").inner_text())
    expect(cards.nth(len(exits))).to_contain_text("not needed")


def test_the_slider_stops_at_the_certified_tiers_and_full_depth(visit: Visit, shipped: Process) -> None:
    page = visit(shipped.url)
    slider = page.get_by_label("How sure is enough?")
    slide(page, "Home")
    spoken = [slider.get_attribute("aria-valuetext")]
    for _ in tiers(shipped):
        slide(page, "ArrowRight")
        spoken.append(slider.get_attribute("aria-valuetext"))
    assert spoken == [f"{tier * 100:g} percent" for tier in tiers(shipped)] + ["full depth"]


def test_moving_the_slider_changes_the_exit(visit: Visit, shipped: Process) -> None:
    page = visit(shipped.url)
    classify(page)
    taken = page.locator("#road > li[data-state=taken] h3")
    slide(page, "Home")
    expect(taken).to_have_text("Exit 1")
    expect(page.locator("#quality-help")).to_contain_text("At least 90 of 100 answers")
    slide(page, "End")
    expect(taken).to_have_text("Exit 5")
    expect(page.locator("#sign .why")).to_contain_text("You asked for full depth")
    expect(page.locator("#quality-help")).to_contain_text("Full depth")
    assert page.locator(".mark").count() == 0


def test_a_slow_answer_never_covers_a_newer_one(visit: Visit, shipped: Process) -> None:
    page = visit(shipped.url)
    held: list[Route] = []
    page.route(
        "**/classify",
        lambda route: held.append(route) if '"quality":0.9,' in route.request.post_data else route.continue_(),
    )
    with page.expect_request("**/classify"):
        page.get_by_label("How sure is enough?").press("Home")
    slide(page, "End")
    expect(page.locator("#sign .tab")).to_have_text("Exit 5")
    assert len(held) == 1
    held[0].continue_()
    page.wait_for_timeout(300)
    expect(page.locator("#sign .tab")).to_have_text("Exit 5")


def test_the_same_text_at_every_quality_stands_side_by_side(visit: Visit, shipped: Process) -> None:
    page = visit(shipped.url)
    classify(page)
    page.get_by_role("button", name="Compare").click()
    table = page.get_by_role("table", name="The same text at every quality")
    rows = table.get_by_role("row")
    expect(rows).to_have_count(len(tiers(shipped)) + 2)
    for row, quality in zip(rows.all()[1:], [*tiers(shipped), 1.0], strict=True):
        told = ask(shipped, quality=quality)
        name = "full depth" if quality == 1 else f"{quality * 100:g} %"
        expect(row.get_by_role("rowheader")).to_have_text(name)
        expect(row).to_contain_text(told["label"])
        expect(row).to_contain_text(f"exit {told['exit']['number']},")
    page.get_by_label("Your text").fill("Another text.")
    expect(table).to_have_count(0)


def test_a_refusal_is_shown_in_the_words_of_the_api(visit: Visit, shipped: Process) -> None:
    page = visit(shipped.url, expect=REFUSED)
    classify(page, "   ")
    problem = page.get_by_role("alert")
    expect(problem).to_contain_text("422 invalid")
    expect(problem).to_contain_text("inputs: the text is empty or blank")
    expect(page.locator("#answer")).to_be_hidden()
    classify(page)
    expect(problem).to_be_hidden()
    expect(page.locator("#answer")).to_be_visible()


def test_an_overloaded_server_says_when_to_come_back(visit: Visit, shipped: Process) -> None:
    page = visit(shipped.url, expect=REFUSED)
    error = {"error": {"type": "overloaded", "message": "1024 texts wait already", "param": None}}
    page.route("**/classify", lambda route: route.fulfill(status=429, json=error, headers={"Retry-After": "3"}))
    classify(page)
    expect(page.get_by_role("alert")).to_have_text(re.compile("429 overloaded.*1024 texts wait.*Try again in 3 s"))


def test_a_server_that_is_gone_is_said_to_be_gone(visit: Visit, shipped: Process) -> None:
    page = visit(shipped.url, expect=REFUSED)
    page.route("**/classify", lambda route: route.abort())
    page.get_by_role("button", name="Classify").click()
    expect(page.get_by_role("alert")).to_contain_text("the server cannot be reached")


def test_an_example_is_one_click_away(visit: Visit, shipped: Process) -> None:
    page = visit(shipped.url)
    example = page.get_by_role("group", name="Examples").get_by_role("button").nth(1)
    with page.expect_response("**/classify") as answered:
        example.click()
    assert answered.value.request.post_data_json["inputs"] == example.inner_text()
    expect(page.get_by_label("Your text")).to_have_value(example.inner_text())


def test_everything_works_by_keyboard_alone(visit: Visit, shipped: Process) -> None:
    page = visit(shipped.url)
    focused = page.locator(":focus")
    page.keyboard.press("Tab")
    expect(focused).to_have_text("Skip to the text")
    page.keyboard.press("Enter")
    expect(focused).to_have_attribute("id", "text")
    page.keyboard.press("ControlOrMeta+a")
    page.keyboard.type(TEXT)
    with page.expect_response("**/classify") as answered:
        page.keyboard.press("Control+Enter")
    assert answered.value.request.post_data_json["inputs"] == TEXT
    visited = []
    for _ in range(30):
        page.keyboard.press("Tab")
        visited.append(
            focused.evaluate("element => element.id || element.name || element.className || element.tagName")
        )
        assert focused.evaluate("element => getComputedStyle(element).outlineStyle") != "none", visited
        if visited[-1] == "quality":
            with page.expect_response("**/classify"):
                page.keyboard.press("Home")
            expect(page.locator("#sign .tab")).to_have_text("Exit 1")
        if visited[-1] == "compare":
            page.keyboard.press("Enter")
            expect(page.get_by_role("table")).to_be_visible()
        if visited[-1] == "span":
            break
    assert [name for name in ("model", "quality", "submit", "SUMMARY", "compare", "span") if name not in visited] == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_axe_finds_nothing_serious(visit: Visit, shipped: Process, scheme: str, width: int) -> None:
    page = visit(shipped.url, color_scheme=scheme, viewport={"width": width, "height": 844}, expect=REFUSED)
    page.get_by_role("button", name="Compare").click()
    page.get_by_role("table").wait_for()
    page.get_by_text("This request as curl").click()
    page.locator("#live").scroll_into_view_if_needed()
    page.get_by_text("Half of requests within").wait_for()
    assert serious(page) == []
    slide(page, "End")
    assert serious(page) == []
    classify(page, " ")
    page.get_by_role("alert").wait_for()
    assert serious(page) == []


def test_axe_is_able_to_find_something(visit: Visit, shipped: Process) -> None:
    page = visit(shipped.url)
    page.evaluate("document.querySelector('label[for=text]').remove()")
    assert [found for found in serious(page) if found.startswith("label")]


def test_dark_is_dark_and_light_is_light(visit: Visit, shipped: Process) -> None:
    def lightness(scheme: str) -> float:
        page = visit(shipped.url, color_scheme=scheme)
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(map(int, re.findall(r"\d+", colour)[:3])) / 3

    assert lightness("dark") < 50
    assert lightness("light") > 200


@pytest.mark.parametrize("width", [320, 360, 390, 768, 1024, 1280])
def test_no_width_scrolls_sideways(visit: Visit, shipped: Process, width: int) -> None:
    page = visit(shipped.url, viewport={"width": width, "height": 740})
    page.get_by_role("button", name="Compare").click()
    page.get_by_role("table").wait_for()
    page.get_by_text("This request as curl").click()
    assert overflow(page) <= 0
    classify(page, "incomprehensibilities" * 40)
    expect(page.locator("#curl")).to_contain_text("incomprehensibilities")
    assert overflow(page) <= 0


@pytest.mark.parametrize(("width", "along"), [(1280, True), (390, False)])
def test_the_exits_stand_side_by_side_where_there_is_room(
    visit: Visit, shipped: Process, width: int, along: bool
) -> None:
    page = visit(shipped.url, viewport={"width": width, "height": 844})
    first, second = (page.locator("#road > li").nth(index).bounding_box() for index in (0, 1))
    assert first
    assert second
    assert (first["y"] == second["y"]) is along
    assert (first["x"] == second["x"]) is not along


def test_nothing_moves_for_people_who_want_less_motion(visit: Visit, shipped: Process) -> None:
    def motion(wish: str) -> str:
        page = visit(shipped.url, reduced_motion=wish)
        return page.locator("#road > li .route").first.evaluate("route => getComputedStyle(route).animationName")

    assert motion("reduce") == "none"
    assert motion("no-preference") != "none"


def test_markup_in_a_text_stays_text(visit: Visit, shipped: Process) -> None:
    page = visit(shipped.url)
    classify(page, "<img src=x onerror=alert(1)><b id=bold>fun</b>")
    expect(page.locator("#curl")).to_contain_text("<b id=bold>fun</b>")
    assert page.locator("#bold, main img").count() == 0


def test_the_request_as_curl_gives_the_same_answer(visit: Visit, shipped: Process) -> None:
    page = visit(shipped.url, permissions=["clipboard-read", "clipboard-write"])
    classify(page, "It's \"not\" a film; it's $HOME `and` \\ more.")
    page.get_by_text("This request as curl").click()
    page.get_by_role("button", name="Copy").click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    command = page.evaluate("navigator.clipboard.readText()")
    assert command == page.locator("#curl").inner_text()
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert f'"label":"{page.locator("#sign .label").inner_text()}"' in done.stdout


def test_the_server_is_watched_only_while_somebody_looks(visit: Visit, shipped: Process) -> None:
    page = visit(shipped.url, viewport={"width": 1280, "height": 600})
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url) if request.url.endswith("/metrics") else None)
    page.clock.install()
    page.clock.run_for(60_000)
    assert asked == []
    with page.expect_response("**/metrics"):
        page.locator("#live").scroll_into_view_if_needed()
    page.get_by_text("Half of requests within").wait_for()
    with page.expect_response("**/metrics"):
        page.clock.run_for(5000)
    page.evaluate("scrollTo(0, 0)")
    # The browser tells of it a frame later; what was due by then may still be asked.
    page.evaluate("new Promise((resolve) => requestIdleCallback(resolve))")
    page.clock.run_for(5000)
    seen = len(asked)
    page.clock.run_for(60_000)
    assert len(asked) == seen


def test_what_is_classified_is_counted_where_it_left(visit: Visit, shipped: Process) -> None:
    page = visit(shipped.url)
    page.locator("#live").scroll_into_view_if_needed()
    for _ in range(3):
        ask(shipped, quality=1.0)
    metrics = httpx.get(f"{shipped.url}/metrics", timeout=60).text
    by_exit = re.findall(r'^offramp_exits_total{exit="(\d)".* (\S+)$', metrics, re.MULTILINE)
    texts = sum(float(count) for _, count in by_exit)
    last = sum(float(count) for exit, count in by_exit if exit == "5")
    assert last >= 3
    note = page.locator("#live-note")
    expect(note).to_contain_text(f"{texts:.0f} texts classified by sst2-minilm-l6 since the server started")
    shown = page.locator(".chart").filter(has_text="Where texts left").get_by_role("listitem").last
    expect(shown).to_have_text(re.compile(rf"Exit 5\s*{int(1000 * last / texts) / 10}\s%"))
    page.get_by_label("last minute").check()
    expect(note).to_contain_text("that this page has watched")


def test_a_key_is_asked_for_kept_in_the_tab_and_forgotten(visit: Visit, locked: Process) -> None:
    page = visit(locked.url, wait=False, expect=REFUSED)
    field = page.get_by_label("This server asks for a key")
    expect(field).to_be_focused()
    expect(page.get_by_role("alert")).to_contain_text("401 unauthorized")
    assert serious(page) == []
    field.fill("another key")
    field.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("401 unauthorized")
    field.fill(KEY)
    field.press("Enter")
    expect(page.locator("#answer")).to_be_visible()
    expect(field).to_be_hidden()
    expect(page.get_by_role("alert")).to_be_hidden()
    assert KEY not in page.content()
    expect(page.locator("#curl")).to_contain_text('-H "Authorization: Bearer $OFFRAMP_KEY"')
    assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]
    page.reload()
    expect(page.locator("#answer")).to_be_visible()
    page.get_by_role("button", name="Forget the key").click()
    expect(field).to_be_focused()


def test_a_model_of_pairs_has_a_second_field(visit: Visit, locked: Process) -> None:
    page = visit(locked.url, wait=False, expect=REFUSED)
    page.get_by_label("This server asks for a key").fill(KEY)
    page.keyboard.press("Enter")
    page.locator("#answer").wait_for()
    expect(page.get_by_label("Second text")).to_be_hidden()
    with page.expect_response("**/classify"):
        page.get_by_label("Model").select_option("tiny-pairs")
    page.get_by_label("First text").fill("a man plays a flute")
    page.get_by_label("Second text").fill("someone plays music")
    with page.expect_response("**/classify") as answered:
        page.get_by_role("button", name="Classify").click()
    assert answered.value.request.post_data_json["inputs"] == {
        "text": "a man plays a flute",
        "text_pair": "someone plays music",
    }
    expect(page.locator("#sign .label")).to_have_text(re.compile("entailment|neutral|contradiction"))
    assert states(page).count("taken") == 1


def test_metrics_on_another_port_are_said_to_be_there(visit: Visit, locked: Process) -> None:
    page = visit(locked.url, wait=False, expect=REFUSED)
    page.get_by_label("This server asks for a key").fill(KEY)
    page.keyboard.press("Enter")
    page.locator("#live").scroll_into_view_if_needed()
    expect(page.locator("#live-note")).to_contain_text("publishes its metrics on a port of its own")


def test_the_page_works_behind_a_path_prefix(visit: Visit, shipped: Process, browser: Any) -> None:
    """What a reverse proxy does that takes the prefix off, done in the browser."""
    context = browser.new_context()

    def behind(route: Route) -> None:
        path = route.request.url.partition("/models/films")[2]
        assert path.startswith("/"), route.request.url
        route.fulfill(response=route.fetch(url=shipped.url + path))

    context.route("http://proxy.example/**", behind)
    page = context.new_page()
    page.goto("http://proxy.example/models/films/")
    page.locator("#answer").wait_for()
    expect(page.locator("#curl")).to_contain_text("http://proxy.example/models/films/classify")
    context.close()
