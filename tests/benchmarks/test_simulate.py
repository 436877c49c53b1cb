"""The commands that feed the simulator, on a tiny bundle: what they write, it can run."""

from pathlib import Path

import pytest

from benchmarks import simulate
from models.bundle import Bundle


def test_a_bundle_is_measured_profiled_and_simulated(
    tiny_bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, profile, texts = tmp_path / "table.json", tmp_path / "profile.json", tmp_path / "texts.csv"
    names = tiny_bundle.manifest.labels
    rows = (f"a film {at} times over,{names[at % 2]}" for at in range(30))
    texts.write_text("\n".join(["text,label", *rows]), encoding="utf-8")
    sizes = ["--max-batch-tokens", "64", "--max-batch-texts", "4"]
    bundle = str(tiny_bundle.path)
    simulate.main(["latency", bundle, "--output", str(table), "--seconds", "0.2", *sizes])
    simulate.main(["profile", bundle, "--file", str(texts), "--output", str(profile)])
    capsys.readouterr()
    quality = f"{tiny_bundle.calibration.precisions['fp32'].certified[0].quality:g}"
    files = ["--latency", str(table), "--profile", str(profile), "--quality", quality]
    simulate.main(["run", *files, "--texts", "200", "--seeds", "1", "--loads", "0.5", "--orders", "oldest", *sizes])
    shown = capsys.readouterr().out
    assert "2 workers" in shown
    assert "| 0.5 | oldest |" in shown
