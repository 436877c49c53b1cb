"""The latency table: what it says at, between, before and beyond what was measured."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.engine.latency import LatencyTable, Measurement


def _linear(texts: int, tokens: int) -> float:
    """A machine whose runs cost 100 µs, 10 µs a text and 1 µs a token."""
    return 1e-6 * (100 + 10 * texts + tokens)


def _table() -> LatencyTable:
    return LatencyTable.from_measurements(
        Measurement(segment, texts, tokens, segment * _linear(texts, tokens))
        for segment in (1, 2)
        for texts in (1, 4, 8)
        for tokens in (8, 64, 256)
    )


@pytest.mark.parametrize("lengths", [[8], [16] * 4, [10, 20, 40], [100, 100], [2, 3, 4, 5, 6, 7, 8]])
def test_between_measured_cells_it_interpolates(lengths: list[int]) -> None:
    table = _table()
    for segment in (1, 2):
        assert table.estimate(segment, lengths) == pytest.approx(segment * _linear(len(lengths), sum(lengths)))


@pytest.mark.parametrize("lengths", [[400], [30] * 16, [1] * 300])
def test_beyond_the_largest_cell_it_goes_on_as_steeply(lengths: list[int]) -> None:
    assert _table().estimate(1, lengths) == pytest.approx(_linear(len(lengths), sum(lengths)))


def test_less_than_the_smallest_cell_takes_as_long_as_it() -> None:
    assert _table().estimate(1, [2]) == pytest.approx(_linear(1, 8))


def test_with_one_measured_cell_time_grows_in_proportion_to_tokens() -> None:
    table = LatencyTable.from_measurements([Measurement(1, 1, 10, 1e-3)])
    assert table.estimate(1, [5]) == pytest.approx(1e-3)
    assert table.estimate(1, [20]) == pytest.approx(2e-3)


def test_a_cell_counts_with_the_median_of_its_measurements() -> None:
    table = LatencyTable.from_measurements(Measurement(1, 1, 10, seconds) for seconds in (1e-3, 2e-3, 9.0))
    assert table.estimate(1, [10]) == pytest.approx(2e-3)


def test_cells_that_cannot_be_measured_are_filled() -> None:
    measured = [(1, 4), (1, 64), (8, 32), (16, 64)]  # eight texts never have four tokens
    table = LatencyTable.from_measurements(
        Measurement(1, texts, tokens, _linear(texts, tokens)) for texts, tokens in measured
    )
    assert table.seconds.shape == (1, 3, 3)
    for lengths in ([16], [4] * 8, [6] * 8, [1] * 8, [3] * 12):
        assert table.estimate(1, lengths) == pytest.approx(_linear(len(lengths), sum(lengths)))


def test_noise_that_made_little_work_look_dear_does_not_spread() -> None:
    table = LatencyTable.from_measurements(
        Measurement(1, texts, tokens, 0.5 if (texts, tokens) == (1, 16) else _linear(texts, tokens))
        for texts in (1, 4)
        for tokens in (8, 16, 32)
    )
    assert table.estimate(1, [16]) == pytest.approx(_linear(1, 32))
    for lengths in ([8], [32], [2] * 4, [4] * 4, [8] * 4):
        assert table.estimate(1, lengths) == pytest.approx(_linear(len(lengths), sum(lengths)))


_cells = st.dictionaries(
    st.tuples(st.integers(1, 20), st.integers(1, 300)), st.floats(1e-6, 1.0), min_size=1, max_size=12
)


@given(cells=_cells, lengths=st.lists(st.integers(1, 200), min_size=1, max_size=30), more=st.integers(1, 200))
def test_more_work_never_takes_less_time_however_noisy_the_measurements(
    cells: dict[tuple[int, int], float], lengths: list[int], more: int
) -> None:
    table = LatencyTable.from_measurements(Measurement(1, *cell, seconds) for cell, seconds in cells.items())
    before = table.estimate(1, lengths)
    assert before > 0
    assert before <= table.estimate(1, [*lengths, more]) * (1 + 1e-9)
    assert before <= table.estimate(1, [lengths[0] + more, *lengths[1:]]) * (1 + 1e-9)


def test_texts_of_different_lengths_cost_the_empty_places_beside_them() -> None:
    table = _table()
    padded = replace(table, padding=0.25)
    mixed = [40, 10, 10]  # 60 tokens, 60 empty places
    for segment in (1, 2):
        assert padded.estimate(segment, mixed) == pytest.approx(segment * _linear(3, 60 + 0.25 * 60))
        assert padded.estimate(segment, [20] * 3) == pytest.approx(table.estimate(segment, [20] * 3))


def test_it_survives_a_trip_through_json() -> None:
    table = replace(_table(), padding=0.25)
    again = LatencyTable.from_document(json.loads(json.dumps(table.document())))
    assert np.array_equal(again.seconds, table.seconds)
    assert again.estimate(2, [10, 20]) == table.estimate(2, [10, 20])
    assert again.padding == table.padding


def test_it_prints_milliseconds_of_the_cells_that_can_be() -> None:
    table = LatencyTable.from_measurements([Measurement(1, 8, 4, 1e-3), Measurement(1, 8, 16, 2e-3)])
    assert table.rows() == [["texts", "tokens", "segment 1"], ["8", "16", "2.00"]]


def test_it_refuses_what_is_no_table() -> None:
    with pytest.raises(ValueError, match="no measurements"):
        LatencyTable.from_measurements([])
    with pytest.raises(ValueError, match="segment 1 was never measured with 2 texts"):
        LatencyTable.from_measurements([Measurement(1, 1, 8, 1.0), Measurement(2, 2, 8, 1.0)])
    with pytest.raises(ValueError, match="must not fall"):
        LatencyTable(np.array([1]), np.array([1, 2]), np.array([[[2.0, 1.0]]]))
    with pytest.raises(ValueError, match="increase"):
        LatencyTable(np.array([1]), np.array([2, 2]), np.array([[[1.0, 1.0]]]))
    with pytest.raises(ValueError, match="finite"):
        LatencyTable(np.array([1]), np.array([1]), np.array([[[np.nan]]]))
    with pytest.raises(ValueError, match="not a latency table"):
        LatencyTable.from_document({"texts": [1]})


def test_nobody_can_change_it() -> None:
    with pytest.raises(ValueError, match="read-only"):
        _table().seconds[0, 0, 0] = 0.0
