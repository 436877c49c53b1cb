"""The simulator against what can be worked out by hand, and against laws that any queue obeys."""

import json
from typing import Any

import numpy as np
import pytest

from benchmarks.simulate import main
from server.engine.latency import LatencyTable, Measurement
from server.engine.order import ORDERS, Order, deepest, gittins, oldest
from server.engine.scheduler import Scheduler
from server.engine.simulator import Arrivals, Profile, Service, Simulated, batching_like, simulate


def _table(*seconds: float) -> LatencyTable:
    """Each segment takes its ``seconds`` a text."""
    return LatencyTable.from_measurements(
        Measurement(segment, texts, texts, one * texts)
        for segment, one in enumerate(seconds, start=1)
        for texts in (1, 64)
    )


def _profile(*exits: int) -> Profile:
    return Profile(np.ones(len(exits), dtype=np.int64), np.array(exits))


def _run(
    table: LatencyTable,
    profile: Profile,
    arrivals: Arrivals,
    *,
    texts: int,
    order: Order = oldest,
    batch: int = 1,
    service: Service | None = None,
    **more: Any,
) -> Simulated:
    service = service or Service(workers=1)
    scheduler: Scheduler[Any] = Scheduler(
        table.segments,
        max_batch_tokens=batch,
        max_batch_texts=batch,
        order=order,
        latency=table,
        workers=service.workers,
        max_wait_seconds=1e9,
        **more,
    )
    return simulate(scheduler, table, profile, arrivals, service, texts=texts)


@pytest.mark.parametrize(
    ("order", "workers", "expected"),
    [
        # 0–1 first in segment 1, 1–3 first in 2, 3–4 second in 1, 4–6 second in 2, the third alone from 10 on.
        (oldest, 1, [3.0, 5.5, 3.0]),
        (deepest, 1, [3.0, 5.5, 3.0]),
        (oldest, 2, [3.0, 3.0, 3.0]),
    ],
)
def test_three_texts_go_as_worked_out_by_hand(order: Order, workers: int, expected: list[float]) -> None:
    arrivals = Arrivals(times=[0.0, 0.5, 10.0])
    found = _run(_table(1.0, 2.0), _profile(2), arrivals, texts=3, order=order, service=Service(workers))
    assert found.seconds.tolist() == expected
    assert found.passed.tolist() == [2, 2, 2]
    assert (found.runs.tolist(), found.ran.tolist(), found.busy, found.elapsed) == ([3, 3], [3, 3], 9.0, 13.0)


def test_texts_that_wait_go_together() -> None:
    found = _run(_table(1.0), _profile(1), Arrivals(times=[0.0, 0.1, 0.2]), texts=3, batch=8)
    assert found.seconds.tolist() == pytest.approx([1.0, 2.9, 2.8])
    assert (found.runs.tolist(), found.ran.tolist()) == ([2], [3])


@pytest.mark.parametrize("cpus", [0, -1, float("nan")])
def test_no_cpus_are_an_error(cpus: float) -> None:
    with pytest.raises(ValueError, match="cpus must be more than 0"):
        Service(workers=1, cpus=cpus)


@pytest.mark.parametrize(
    ("cpus", "expected"),
    [
        (None, [1.5, 2.0, 1.5]),
        (5, [1.5, 2.0, 1.5]),
        # The first is out at 0.5 and shares with the second in the event loop until 1.5, and with its run until 2.5.
        (1, [2.5, 3.0, 1.5]),
    ],
)
def test_the_event_loop_takes_texts_one_by_one_and_shares_the_cpus(cpus: float | None, expected: list[float]) -> None:
    service = Service(workers=4, front_seconds=0.5, cpus=cpus)
    found = _run(_table(1.0), _profile(1), Arrivals(times=[0.0, 0.0, 5.0]), texts=3, service=service)
    assert found.seconds.tolist() == pytest.approx(expected)


def test_a_client_sends_its_next_text_when_it_has_its_answer() -> None:
    found = _run(_table(2.0), _profile(1), Arrivals(clients=3), texts=9)
    assert found.seconds.tolist() == [2.0, 4.0, 6.0, 6.0, 6.0, 6.0, 6.0, 6.0, 6.0]
    assert found.throughput == pytest.approx(0.5)


@pytest.mark.parametrize("load", [0.5, 0.8])
def test_one_worker_with_constant_times_waits_as_pollaczek_and_khinchine_say(load: float) -> None:
    found = _run(_table(1.0), _profile(1), Arrivals(rate=load), texts=60_000)
    assert found.seconds.mean() == pytest.approx(1.0 + load / (2 * (1 - load)), rel=0.06)
    assert found.busy / found.elapsed == pytest.approx(load, rel=0.02)


@pytest.mark.parametrize("order", list(ORDERS.values()))
@pytest.mark.parametrize("workers", [1, 3])
def test_every_text_passes_each_segment_once_until_its_exit_and_no_further(order: Order, workers: int) -> None:
    profile = _profile(1, 1, 2, 4)
    found = _run(
        _table(0.1, 0.2, 0.2, 0.5),
        profile,
        Arrivals(rate=0.7 * workers / 0.45),
        texts=4000,
        order=order,
        batch=4,
        service=Service(workers),
    )
    assert np.isfinite(found.seconds).all()
    assert found.seconds.min() >= 0.1 - 1e-9
    left = np.bincount(found.passed, minlength=5)
    assert left[[0, 3]].tolist() == [0, 0]
    assert found.ran.tolist() == [4000, 4000 - left[1], left[4], left[4]]
    assert found.busy == pytest.approx(float(found.ran @ [0.1, 0.2, 0.2, 0.5]))
    assert found.busy <= workers * found.elapsed


def test_gittins_answers_sooner_on_average_where_most_leave_at_a_cheap_exit() -> None:
    taken = {
        order: _run(_table(0.1, 5.0), _profile(1, 1, 1, 2), Arrivals(rate=0.6), texts=4000, order=order).seconds.mean()
        for order in (oldest, gittins)
    }
    assert taken[gittins] < 0.8 * taken[oldest]


def test_who_is_let_in_under_overload_gets_an_answer_by_its_deadline() -> None:
    service = Service(workers=2, max_queue=1000, deadline_seconds=0.05)
    arrivals = Arrivals(rate=3 * 2 / 0.0145)  # 3 times the capacity; a text takes 14.5 ms on average
    found = _run(_table(0.002, 0.01, 0.04), _profile(1, 2, 2, 3), arrivals, texts=6000, service=service)
    answered = np.isfinite(found.seconds)
    assert found.seconds[answered].max() <= 0.05 + 1e-9
    assert (found.passed > 0).sum() == answered.sum()
    in_vain = len(found.seconds) - found.refused - answered.sum()
    assert in_vain < 0.02 * answered.sum()
    assert found.busy / found.elapsed > 2 * 0.95


def test_no_more_texts_are_let_in_than_fit() -> None:
    service = Service(workers=1, max_queue=3)
    found = _run(_table(1.0), _profile(1), Arrivals(times=[0.0] * 5 + [1.5]), texts=6, service=service)
    assert found.refused == 2
    assert found.seconds[[0, 1, 2, 5]].tolist() == [1.0, 2.0, 3.0, 2.5]
    assert np.isnan(found.seconds[3:5]).all()


def test_a_device_that_batches_ten_times_as_well_serves_nearly_ten_times_as_many() -> None:
    table = batching_like(_table(0.02), 10.0, tokens=25, largest=256)
    alone = table.estimate(1, [25])
    assert alone == pytest.approx(0.5)
    assert 256 / table.estimate(1, [25] * 256) * alone == pytest.approx(10, rel=0.05)


def test_it_refuses_what_makes_no_sense() -> None:
    with pytest.raises(ValueError, match="one of rate"):
        Arrivals(rate=1.0, clients=2)
    with pytest.raises(ValueError, match="closed loop"):
        _run(_table(1.0), _profile(1), Arrivals(clients=2), texts=3, service=Service(1, deadline_seconds=1.0))
    with pytest.raises(ValueError, match="2 exits, the latency table 1"):
        _run(_table(1.0), _profile(2), Arrivals(clients=2), texts=3)
    with pytest.raises(ValueError, match="1 times for 3 texts"):
        _run(_table(1.0), _profile(1), Arrivals(times=[0.0]), texts=3)
    with pytest.raises(ValueError, match=r"there are those for 0\.9"):
        Profile.from_document({"tokens": [1], "exits": {"0.9": [1]}}, "0.5")
    with pytest.raises(ValueError, match="not a profile"):
        Profile.from_document({"exits": {"0.9": [1]}}, "0.9")


def test_the_command_compares_orders_on_the_committed_measurements(capsys: pytest.CaptureFixture[str]) -> None:
    main("run --texts 400 --seeds 1 --loads 0.6 --orders oldest,gittins --json".split())
    document = json.loads(capsys.readouterr().out)
    assert [row["order"] for row in document["rows"]] == ["oldest", "gittins"]
    for row in document["rows"]:
        assert 0 < row["p50"] <= row["p90"] <= row["p99"]
        assert row["answers_per_second"] < document["capacity"]
    main("run --texts 400 --seeds 1 --clients 1 --orders deepest".split())
    assert "| 1 | deepest |" in capsys.readouterr().out


def test_the_command_says_in_one_line_what_is_wrong(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--orders", "newest"])
    assert "no order newest; there are oldest, deepest, gittins, fullest" in capsys.readouterr().err
    with pytest.raises(SystemExit, match=r"no exits for quality 0\.5"):
        main(["run", "--quality", "0.5"])
    broken = tmp_path / "table.json"
    broken.write_text("{}")
    with pytest.raises(SystemExit, match="not a latency table"):
        main(["run", "--latency", str(broken)])
