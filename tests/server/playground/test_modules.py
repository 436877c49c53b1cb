"""The page's pure functions, in the browser that will run them."""

import json
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from tests.server.process import Process

AGREEMENT = {"quality": 0.99, "criterion": "agreement", "threshold": 0.9768, "speedup": 2.7}
READING = {"confidence": 0.95, "entropy": 0.2, "agreement": 0.98765}


@pytest.fixture(scope="module")
def page(browser: Browser, shipped: Process) -> Page:
    page = browser.new_page()
    page.goto(shipped.url)
    return page


def call(page: Page, module: str, function: str, *arguments: Any) -> Any:
    """What ``function`` of one of the page's modules returns; no-break spaces as spaces, a Map as its entries.

    An argument ``{"map": entries}`` becomes a Map.
    """
    code = """async ([module, name, given]) => {
      const functions = await import(`./playground/${module}.js`);
      const result = functions[name](...given.map((one) => (Array.isArray(one?.map) ? new Map(one.map) : one)));
      return result instanceof Map ? [...result] : result;
    }"""
    result = page.evaluate(code, [module, function, list(arguments)])
    return json.loads(json.dumps(result, ensure_ascii=False).replace("\u00a0", " "))


def test_percentages_never_say_more_than_is_so(page: Page) -> None:
    told = [call(page, "words", "percent", share) for share in (0, 0.5, 0.97679, 0.99999, 1)]
    assert told == ["0.0 %", "50.0 %", "97.6 %", "99.9 %", "100 %"]


def test_qualities_are_counted_in_texts(page: Page) -> None:
    told = [call(page, "words", "outOf", quality) for quality in (0.9, 0.99, 0.995)]
    assert told == ["90 of 100", "99 of 100", "995 of 1,000"]


def test_a_gauge_gives_each_ninth_the_same_room(page: Page) -> None:
    places = [call(page, "words", "onGauge", share) for share in (0.2, 0.5, 0.95, 0.995, 0.9995, 1)]
    assert places == pytest.approx([0, 0, 1 / 3, 2 / 3, 1, 1])


@pytest.mark.parametrize(
    ("tier", "told", "needs"),
    [
        (AGREEMENT, "98.76 %", "97.68 %"),
        (AGREEMENT | {"criterion": "confidence", "threshold": 0.9}, "95.00 %", "90.0 %"),
        (AGREEMENT | {"criterion": "entropy", "threshold": 0.25}, "20.0 %", "at most 25.0 %"),
        (AGREEMENT | {"criterion": "patience", "threshold": 2}, "3", "2"),
    ],
)
def test_whoever_is_sure_enough_stands_beyond_the_mark(page: Page, tier: Any, told: str, needs: str) -> None:
    sure = call(page, "words", "sureness", READING, tier, 3)
    assert (sure["value"], sure["needs"]) == (told, needs)
    assert 0 < sure["mark"] < sure["at"] <= 1


def test_full_depth_needs_nothing(page: Page) -> None:
    sure = call(page, "words", "sureness", READING, None, 0)
    assert (sure["needs"], sure["mark"]) == (None, None)


@pytest.mark.parametrize(
    ("reason", "tier", "words"),
    [
        ("agreement", AGREEMENT, "chance that full depth would say the same at 98.76 %. For 99 of 100 answers"),
        ("confidence", AGREEMENT, "Exit 2 gives its label 95.00 %"),
        ("entropy", AGREEMENT, "Exit 2 was 20.0 % undecided"),
        ("patience", AGREEMENT | {"threshold": 2}, "2 times in a row"),
        ("deadline", AGREEMENT, "without a promise"),
        ("max_exit", AGREEMENT, "deepest that this request allowed"),
        ("final", AGREEMENT, "No earlier exit was sure enough"),
        ("final", None, "You asked for full depth"),
    ],
)
def test_every_reason_has_words(page: Page, reason: str, tier: Any, words: str) -> None:
    assert words in call(page, "words", "why", {"number": 2, "reason": reason, **READING}, tier)


def test_metrics_are_read_with_their_labels(page: Page) -> None:
    text = (
        "# HELP offramp_exits_total Texts\n"
        'offramp_exits_total{exit="1",model="a \\"b\\"\\\\",reason="agreement"} 3.0\n'
        'offramp_exits_total{exit="1",model="m",reason="deadline"} 2.0\n'
        "offramp_inflight_requests 1.0\npython_info 1.0\n"
    )
    samples = call(page, "prometheus", "parse", text)
    assert [sample["value"] for sample in samples] == [3, 2, 1]
    assert samples[0]["labels"] == {"exit": "1", "model": 'a "b"\\', "reason": "agreement"}
    assert call(page, "prometheus", "sums", samples, "offramp_exits_total", "exit") == [["1", 5]]


def test_a_counter_that_fell_has_begun_anew(page: Page) -> None:
    later, earlier = {"map": [["1", 7], ["2", 3]]}, {"map": [["1", 5], ["2", 9]]}
    assert call(page, "prometheus", "increase", later, earlier) == [["1", 2], ["2", 3]]


@pytest.mark.parametrize(
    ("q", "seconds"),
    # Of 10: 4 up to 1 s, 4 more up to 2 s, 2 beyond. As PromQL's histogram_quantile.
    [(0.2, 0.5), (0.4, 1.0), (0.5, 1.25), (0.8, 2.0), (0.99, 2.0)],
)
def test_quantiles_are_those_of_prometheus(page: Page, q: float, seconds: float) -> None:
    buckets = {"map": [["2.0", 8], ["+Inf", 10], ["1.0", 4]]}
    assert call(page, "prometheus", "quantile", buckets, q) == pytest.approx(seconds)


def test_nothing_counted_has_no_quantile(page: Page) -> None:
    assert call(page, "prometheus", "quantile", {"map": []}, 0.5) is None
