"""How long a run takes: seconds of one segment on a micro-batch, measured at warm-up and interpolated from then on.

Pure data: whoever measures hands the measurements in; scheduling, deadlines, admission and the simulator ask.
"""

import statistics
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

_Row = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Measurement:
    """One timed run: ``segment`` (1 = first) on ``texts`` texts of ``tokens`` tokens in all took ``seconds``."""

    segment: int
    texts: int
    tokens: int
    seconds: float


@dataclass(frozen=True, eq=False)
class LatencyTable:
    """``seconds [E, B, T]`` of a run of each segment on ``texts [B]`` texts that have ``tokens [T]`` tokens in all.

    The texts are of equal length. Others take longer, for they stand in rows as long as the longest, in attention
    (docs/decisions/0003) or throughout: each empty place there counts as ``padding`` tokens.
    Both axes increase strictly, and seconds never fall along them: more work is never predicted to take less time,
    whatever the noise of a measurement. Raises :class:`ValueError` where that does not hold.
    """

    texts: NDArray[np.int64]
    tokens: NDArray[np.int64]
    seconds: NDArray[np.float64]
    padding: float = 0.0
    # The same numbers as Python's own: looking one up takes a microsecond, an array's element many times that.
    _texts: tuple[int, ...] = field(init=False, repr=False)
    _tokens: tuple[int, ...] = field(init=False, repr=False)
    _seconds: tuple[tuple[_Row, ...], ...] = field(init=False, repr=False)
    # What a text and a token more than measured add, for each segment.
    _slopes: tuple[_Row, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        shape = self.seconds.shape
        if len(shape) != 3 or 0 in shape or shape[1:] != (len(self.texts), len(self.tokens)):
            raise ValueError(f"seconds of shape {list(shape)} for {len(self.texts)} × {len(self.tokens)} cells")
        for name, axis in (("texts", self.texts), ("tokens", self.tokens)):
            if axis[0] < 1 or (np.diff(axis) <= 0).any():
                raise ValueError(f"{name} must increase from at least 1, not {axis.tolist()}")
        if not 0.0 <= self.padding <= 1.0:
            raise ValueError(f"padding must lie between 0 and 1, not {self.padding}")
        if not (np.isfinite(self.seconds).all() and (self.seconds > 0).all()):
            raise ValueError("seconds must be finite and greater than 0")
        if (np.diff(self.seconds, axis=1) < 0).any() or (np.diff(self.seconds, axis=2) < 0).any():
            raise ValueError("seconds must not fall with more texts or tokens; from_measurements sees to that")
        for name in ("texts", "tokens", "seconds"):
            own = np.array(getattr(self, name))
            own.flags.writeable = False
            object.__setattr__(self, name, own)
        object.__setattr__(self, "_texts", tuple(self.texts.tolist()))
        object.__setattr__(self, "_tokens", tuple(self.tokens.tolist()))
        object.__setattr__(self, "_seconds", tuple(tuple(map(tuple, plane)) for plane in self.seconds.tolist()))
        object.__setattr__(self, "_slopes", tuple(map(tuple, self._last_slopes().tolist())))

    def _last_slopes(self) -> NDArray[np.float64]:
        """``[E, 2]``: seconds a text and seconds a token over the last interval of either axis. Constants, for rows
        that are not equally steep would cross somewhere, and more texts be cheaper there."""
        per_text = np.zeros(len(self.seconds))
        if len(self.texts) > 1:
            per_text = (self.seconds[:, -1] - self.seconds[:, -2]).mean(axis=1) / (self.texts[-1] - self.texts[-2])
        if len(self.tokens) > 1:
            last = self.seconds[:, :, -1] - self.seconds[:, :, -2]
            per_token = last.mean(axis=1) / (self.tokens[-1] - self.tokens[-2])
        else:
            per_token = self.seconds[:, :, 0].mean(axis=1) / self.tokens[0]
        return np.stack([per_text, per_token], axis=1)

    @classmethod
    def from_measurements(cls, measurements: Iterable[Measurement]) -> "LatencyTable":
        """The table on the grid of all measured texts × tokens.

        A cell measured more than once counts with its median. A cell that was not measured is interpolated along the
        tokens of its row; outside what was measured there (many texts can't have few tokens) it runs parallel to the
        row of fewer texts. Where more work was measured cheaper than less, less is brought down to it: neighbours on a
        busy machine only ever add time.

        Raises :class:`ValueError` where a number of texts was never measured for one of the segments.
        """
        cells: dict[tuple[int, int, int], list[float]] = {}
        for one in measurements:
            cells.setdefault((one.segment, one.texts, one.tokens), []).append(one.seconds)
        if not cells:
            raise ValueError("no measurements")
        texts, tokens = sorted({key[1] for key in cells}), sorted({key[2] for key in cells})
        ceiling = np.full((max(key[0] for key in cells), len(texts), len(tokens)), np.inf)
        for (segment, count, number), taken in cells.items():
            ceiling[segment - 1, texts.index(count), tokens.index(number)] = statistics.median(taken)
        measured = np.isfinite(ceiling)
        for axis in (1, 2):
            ceiling = np.flip(np.minimum.accumulate(np.flip(ceiling, axis), axis=axis), axis)
        seconds = np.empty_like(ceiling)
        for segment, row in np.ndindex(*ceiling.shape[:2]):
            known = np.flatnonzero(measured[segment, row])
            if not len(known):
                raise ValueError(f"segment {segment + 1} was never measured with {texts[row]} texts")
            points, values = [tokens[at] for at in known], ceiling[segment, row, known].tolist()
            along = np.array([_along(points, values, number) for number in tokens])
            if row:
                # Outside what was measured with as many texts: parallel to what fewer texts took.
                fewer = seconds[segment, row - 1]
                nearest = np.clip(np.arange(len(tokens)), known[0], known[-1])
                along = along[nearest] + fewer - fewer[nearest]
            seconds[segment, row] = np.minimum(along, ceiling[segment, row])
        seconds = np.maximum.accumulate(np.maximum.accumulate(seconds, axis=2), axis=1)
        return cls(np.asarray(texts, dtype=np.int64), np.asarray(tokens, dtype=np.int64), seconds)

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> "LatencyTable":
        """The table that :meth:`document` wrote. Raises :class:`ValueError` where it is none."""
        try:
            return cls(
                np.array(document["texts"], dtype=np.int64),
                np.array(document["tokens"], dtype=np.int64),
                np.array(document["seconds"], dtype=np.float64),
                float(document.get("padding", 0.0)),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a latency table: {error}") from None

    def document(self) -> dict[str, Any]:
        """As plain lists, for JSON."""
        axes = {"texts": self.texts.tolist(), "tokens": self.tokens.tolist()}
        return {**axes, "padding": self.padding, "seconds": self.seconds.tolist()}

    @property
    def segments(self) -> int:
        """How many segments the table knows."""
        return len(self._seconds)

    def estimate(self, segment: int, lengths: Sequence[int]) -> float:
        """Seconds of one run of ``segment`` (1 = first) on texts of these ``lengths``, in tokens."""
        texts, tokens = len(lengths), sum(lengths)
        if self.padding and texts > 1:
            return self.seconds_of(segment, texts, tokens + self.padding * (texts * max(lengths) - tokens))
        return self.seconds_of(segment, texts, tokens)

    def seconds_of(self, segment: int, texts: float, tokens: float) -> float:
        """Seconds of one run of ``segment`` (1 = first) on ``texts`` texts of equal length, ``tokens`` tokens in all.

        Bilinear between measured cells. Less than the smallest takes as long as it does; beyond the largest each text
        and each token adds what one of the last interval's adds on average (in proportion to the tokens where only one
        number of tokens was measured).
        """
        plane, (per_text, per_token) = self._seconds[segment - 1], self._slopes[segment - 1]
        most_texts, most_tokens = self._texts[-1], self._tokens[-1]
        beyond = 0.0
        if texts > most_texts:
            beyond, texts = per_text * (texts - most_texts), most_texts
        if tokens > most_tokens:
            beyond, tokens = beyond + per_token * (tokens - most_tokens), most_tokens
        right = bisect_left(self._texts, texts)
        above = _along(self._tokens, plane[right], tokens)
        if right == 0 or self._texts[right] == texts:
            return above + beyond
        low, high = self._texts[right - 1], self._texts[right]
        below = _along(self._tokens, plane[right - 1], tokens)
        return below + (above - below) * (texts - low) / (high - low) + beyond

    def rows(self) -> list[list[str]]:
        """For printing: a head, then for each cell its texts, its tokens and every segment's milliseconds."""
        head = ["texts", "tokens", *(f"segment {segment}" for segment in range(1, self.segments + 1))]
        return [head] + [
            [str(texts), str(tokens), *(f"{1000 * plane[row][column]:.2f}" for plane in self._seconds)]
            for row, texts in enumerate(self._texts)
            for column, tokens in enumerate(self._tokens)
            if tokens >= texts
        ]


def _along(points: Sequence[int], values: Sequence[float], at: float) -> float:
    """``values`` at increasing ``points``, linear between them; constant before the first, and after the last as steep
    as the last two (proportional to ``at`` where there is one point), never falling."""
    if at <= points[0]:
        return values[0]
    if len(points) == 1:
        return values[0] * at / points[0]
    right = min(bisect_right(points, at), len(points) - 1)
    low, high = points[right - 1], points[right]
    slope = (values[right] - values[right - 1]) / (high - low)
    return values[right - 1] + (max(0.0, slope) if at > high else slope) * (at - low)
