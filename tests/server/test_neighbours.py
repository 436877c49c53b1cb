"""Shadow checks of several processes count as one server's."""

import os
import shutil
from pathlib import Path

import pytest

from server.neighbours import PREFIX, Connections, Shared, SharedChecks, sweep
from server.promises import BROKEN, Promises, evidence


def joined(checks: SharedChecks, version: str = "1") -> Promises:
    promises = Promises((0.9,), fall_back=True)
    promises.join(checks.begin("tiny", version), lambda tier: checks.others("tiny", tier))
    return promises


def test_the_evidence_of_each_is_that_of_all(tmp_path: Path) -> None:
    processes = [SharedChecks(Shared(tmp_path, number)) for number in (1, 2, 3)]
    promises = [joined(checks) for checks in processes]
    for one in promises:
        for agrees in (True, True, False):
            one.record(0.9, agrees)
    for checks in processes * 2:
        checks.refresh()
    assert [one.evidence(0.9) for one in promises] == [pytest.approx(evidence(9, 3, 1 - 0.9))] * 3


def test_a_promise_that_all_break_together_is_broken_in_each(tmp_path: Path) -> None:
    processes = [SharedChecks(Shared(tmp_path, number)) for number in (1, 2, 3, 4)]
    promises = [joined(checks) for checks in processes]
    for one in promises:
        one.record(0.9, agrees=False)
        assert one.evidence(0.9) < BROKEN
    for checks in processes * 2:
        checks.refresh()
    assert all(one.evidence(0.9) >= BROKEN for one in promises)
    assert all(one.suspended(0.9) for one in promises)


def test_what_others_count_of_another_version_says_nothing(tmp_path: Path) -> None:
    old, new = (SharedChecks(Shared(tmp_path, number)) for number in (1, 2))
    of_old, of_new = joined(old, "1"), joined(new, "2")
    of_old.record(0.9, agrees=False)
    old.refresh()
    new.refresh()
    assert of_new.evidence(0.9) == 1.0


def test_a_version_begins_anew_when_it_is_loaded_again_and_a_successor_goes_on(tmp_path: Path) -> None:
    checks = SharedChecks(Shared(tmp_path, 1))
    joined(checks).record(0.9, agrees=False)
    checks.refresh()
    successor = SharedChecks(Shared(tmp_path, 1))
    first = joined(successor)
    assert first.evidence(0.9) == pytest.approx(evidence(1, 1, 1 - 0.9))
    again = joined(successor)
    assert again.evidence(0.9) == 1.0
    # The version that was replaced still finishes a check: it is no longer what is served.
    first.record(0.9, agrees=False)
    successor.refresh()
    other = SharedChecks(Shared(tmp_path, 2))
    of_other = joined(other)
    other.refresh()
    assert of_other.evidence(0.9) == 1.0


def test_after_a_reload_nothing_counts_of_before_though_the_version_is_called_the_same(tmp_path: Path) -> None:
    """As after ``offramp calibrate``: another calibration, the same version."""
    processes = [SharedChecks(Shared(tmp_path, number)) for number in (1, 2, 3)]
    broken = [joined(checks) for checks in processes]
    for one in broken:
        for _ in range(2):
            one.record(0.9, agrees=False)
    for checks in processes * 2:
        checks.refresh()
    assert all(one.suspended(0.9) for one in broken)
    anew = []
    for checks in processes:
        # One after the other, and meanwhile those who come later serve what they had.
        anew.append(joined(checks))
        for other in processes * 2:
            other.refresh()
        assert anew[-1].evidence(0.9) == 1.0
    for one in anew:
        one.record(0.9, agrees=False)
    for checks in processes * 2:
        checks.refresh()
    assert [one.evidence(0.9) for one in anew] == [pytest.approx(evidence(3, 3, 1 - 0.9))] * 3


def test_who_refused_a_reload_counts_with_the_others_again_after_the_next(tmp_path: Path) -> None:
    first, second = (SharedChecks(Shared(tmp_path, number)) for number in (1, 2))
    joined(first), joined(second)
    for checks in (first, second):
        checks.refresh()
    joined(first)
    first.refresh()
    promises = [joined(checks) for checks in (first, second)]
    promises[0].record(0.9, agrees=False)
    first.refresh()
    second.refresh()
    assert promises[1].evidence(0.9) == pytest.approx(evidence(1, 1, 1 - 0.9))


def test_a_successor_joins_those_who_were_reloaded_before_it_came(tmp_path: Path) -> None:
    stays, dies = (SharedChecks(Shared(tmp_path, number)) for number in (1, 2))
    joined(stays)
    joined(dies).record(0.9, agrees=False)
    dies.refresh()
    anew = joined(stays)
    stays.refresh()
    successor = SharedChecks(Shared(tmp_path, 2))
    of_successor = joined(successor)
    assert of_successor.evidence(0.9) == 1.0
    anew.record(0.9, agrees=False)
    stays.refresh()
    successor.refresh()
    assert of_successor.evidence(0.9) == pytest.approx(evidence(1, 1, 1 - 0.9))


def test_a_file_that_says_nothing_sensible_is_passed_over(tmp_path: Path) -> None:
    checks = SharedChecks(Shared(tmp_path, 1))
    promises = joined(checks)
    promises.record(0.9, agrees=False)
    for number, content in enumerate((b"", b"\xff", b"[1]", b'{"tiny": 1}', b'{"tiny": ["1", 0, [["x", [1, 2]]]]}'), 2):
        (tmp_path / f"checks_{number}.json").write_bytes(content)
        assert joined(SharedChecks(Shared(tmp_path, number))).evidence(0.9) == 1.0
    checks.refresh()
    assert promises.evidence(0.9) == pytest.approx(evidence(1, 1, 1 - 0.9))


def test_checks_that_cannot_be_written_are_written_once_they_can(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    checks, others = (SharedChecks(Shared(folder, number)) for number in (1, 2))
    of_others = joined(others)
    joined(checks).record(0.9, agrees=False)
    shutil.rmtree(folder)
    checks.refresh()
    checks.refresh()
    assert caplog.text.count("shadow checks are not counted with those of other processes") == 1
    folder.mkdir()
    checks.refresh()
    others.refresh()
    assert of_others.evidence(0.9) == pytest.approx(evidence(1, 1, 1 - 0.9))


def test_what_processes_map_has_its_room_from_the_start(tmp_path: Path) -> None:
    folder = tmp_path / "taken away"
    shared = Shared(folder, 1)
    shared.reserve(models=1)
    for file in (one := list(folder.iterdir())):
        assert 512 * file.stat().st_blocks >= file.stat().st_size >= 64 * 1024
    assert len(one) == 5
    # Where its predecessor's counters go on.
    counters = folder / "counter_1.db"
    counters.write_bytes(b"counted")
    (folder / "gauge_livesum_1.db").unlink()
    shared.reserve(models=1)
    assert counters.read_bytes() == b"counted"
    assert len(list(folder.iterdir())) == 5
    shared.leave()
    assert not folder.exists()
    shared.leave()


def test_only_folders_that_nobody_uses_are_swept_away(tmp_path: Path) -> None:
    used, left, young, foreign = (tmp_path / f"{PREFIX}{name}" for name in ("used", "left", "young", "foreign"))
    for folder in (used, left, young, foreign):
        folder.mkdir()
        (folder / "counter_1.db").touch()
    kept = Connections(used, 2)
    for folder in (left, young):
        connections = Connections(folder, 2)
        connections._file.close()
    for folder in (used, left, foreign):
        os.utime(folder, (0, 0))
    sweep(tmp_path)
    assert {folder.name for folder in tmp_path.iterdir()} == {
        f"{PREFIX}{name}" for name in ("used", "young", "foreign")
    }
    kept.set(1, 3)


def test_the_last_one_takes_the_folder_away(tmp_path: Path) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    first, last = Shared(folder, 1), Shared(folder, 2)
    for shared in (first, last):
        SharedChecks(shared).refresh()
        (folder / f"counter_{shared.number}.db").touch()
    (folder / "connections").touch()
    first.leave()
    assert {file.name for file in folder.iterdir()} == {"checks_2.json", "counter_2.db", "connections"}
    last.leave()
    assert not folder.exists()
    # Both saw that they were the last.
    first.leave()
