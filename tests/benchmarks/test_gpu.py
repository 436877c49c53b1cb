"""What is to run once on a GPU, rehearsed on the CPU; and a folder that survives being carried in parts."""

import json
import random
from pathlib import Path

import pytest

from benchmarks.gpu import measure
from benchmarks.gpu.measure import REHEARSAL, TIERS, Report, architecture_of, policies_for, roofline
from benchmarks.gpu.parts import join, split


def test_every_stage_runs_and_every_contender_is_in_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["measure", "--rehearse", "--output", str(tmp_path / "results.json")])
    measure.main()
    found = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    assert found["facts"]["same labels as fp32"] == 1.0
    assert found["facts"]["largest difference from fp32 on the CPU"] < 1e-2
    rows = {(row["what"], row["tier"], row["length"]) for row in found["rows"]}
    alike = {(what, "full depth", n) for what in ("one ORT session", "torch eager", "torch.compile") for n in (8, 16)}
    assert rows == alike | {("offramp", tier, length) for tier in TIERS for length in (8, 16)}
    for row in found["rows"]:
        assert row["texts/s"] > 0
        assert 0 < row["p50 ms"] <= row["p99 ms"]
        assert row["throughput / monolith"] > 0
    assert "| offramp | 0.99 | 16 |" in capsys.readouterr().out


def test_time_that_is_up_leaves_stages_out_and_keeps_what_is_known(tmp_path: Path) -> None:
    report = Report()
    measure.measure(report, REHEARSAL, tmp_path, lambda: 0.0)
    assert report.rows == []
    assert report.facts["same labels as fp32"] == 1.0


def test_texts_leave_where_the_tier_says() -> None:
    policies = policies_for(TIERS["0.99"], 20_000)
    for exit, share in TIERS["0.99"].items():
        assert sum(policy.max_exit == exit for policy in policies) / 20_000 == pytest.approx(share, abs=0.02)
    assert all(sum(shares.values()) == pytest.approx(1.0) for shares in TIERS.values())


def test_a_text_that_leaves_early_needs_less() -> None:
    architecture = architecture_of(REHEARSAL, range(1, 13))
    flops, moved = roofline(architecture, 16, TIERS["full depth"], batch=4)
    early_flops, early_moved = roofline(architecture, 16, {1: 1.0}, batch=4)
    assert early_flops < flops / 8
    assert early_moved == pytest.approx(moved / 12)


def test_a_folder_comes_back_whole_from_its_parts(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "deep").mkdir(parents=True)
    content = random.Random(0).randbytes(100_000)
    (folder / "deep" / "library.so").write_bytes(content)
    (folder / "note.txt").write_text("read me", encoding="utf-8")
    parts = split(folder, tmp_path / "parts", 30_000)
    assert len(parts) == 4
    assert max(part.stat().st_size for part in parts) == 30_000
    join(tmp_path / "parts", tmp_path / "back")
    assert (tmp_path / "back" / "deep" / "library.so").read_bytes() == content
    assert (tmp_path / "back" / "note.txt").read_text(encoding="utf-8") == "read me"


def test_a_part_that_is_missing_or_cut_short_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "library.so").write_bytes(random.Random(0).randbytes(10_000))
    first, second, *_ = split(folder, tmp_path / "parts", 4_000)
    second.write_bytes(second.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"part-001: not as it was written \(3999 bytes\)"):
        join(tmp_path / "parts", tmp_path / "back")
    first.unlink()
    with pytest.raises(ValueError, match="part-000: missing"):
        join(tmp_path / "parts", tmp_path / "back")
    assert not (tmp_path / "back").exists()
