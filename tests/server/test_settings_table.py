"""The table of settings in the operations document is the settings class's own."""

from pathlib import Path

from server.config import Settings
from server.settings_table import settings_table

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "operations.md"


def test_the_document_has_the_table_as_it_is_generated() -> None:
    assert settings_table() in DOCUMENT.read_text(encoding="utf-8"), "run python -m server.settings_table"


def test_every_setting_is_a_row_with_its_variable_and_default() -> None:
    rows = settings_table().splitlines()[2:]
    assert len(rows) == len(Settings.model_fields)
    assert any("`--port`" in row and "`OFFRAMP_PORT`" in row and "`8000`" in row for row in rows)
    assert all(row.count(" | ") == 4 for row in rows)
