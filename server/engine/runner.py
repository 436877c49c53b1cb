"""Runs segments: one ONNX Runtime session for each graph of a bundle.

A micro-batch is packed: its texts lie side by side in one row of tokens, and ``attention_mask`` numbers them from 1
(docs/decisions/0001). State crosses from segment to segment as NumPy arrays on the host, one slice of tokens for each
text, so that survivors of different micro-batches are regrouped by joining their slices.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.architecture import Architecture
from models.bundle import READ, Bundle, Precision, segment_io, state_names
from models.costs import attention_share
from server.engine.latency import LatencyTable
from server.engine.request import State, Work
from server.engine.sessions import can_pass, check_session, open_on, open_session
from server.engine.warmup import MEASURING_ROUNDS, WarmUp, run_clock

# A product in attention takes about so many times as long as one of the large matrices, gathers and softmax included:
# an empty place cost 0.28 tokens where its share of the products is 0.053 (docs/decisions/0007).
ATTENTION_SLOWNESS = 5.0
_NOT = np.array(False)


@dataclass(frozen=True, slots=True)
class SegmentOutput:
    """What a segment says of B texts: ``logits [B, K]``, and the state that the next segment takes.

    ``state`` holds ``[T, H]`` for each name, all texts' tokens side by side (nothing after the last segment); text i
    has those from ``bounds[i]`` to ``bounds[i + 1]``. Where nobody was to read the exit, ``logits`` may have no rows.
    """

    logits: NDArray[np.float32]
    state: State
    bounds: Sequence[int]

    @property
    def widths(self) -> Sequence[int]:
        return [array.shape[-1] for array in self.state]

    def carry(self, rows: Sequence[int]) -> list[State]:
        """The state of each of ``rows``, the texts that go on.

        A slice keeps the arrays of all texts alive for as long as its text waits. So slices are handed out only where
        at least half of the tokens go on; else copies, and whoever waits never holds more than twice what it needs.
        """
        places = [slice(self.bounds[row], self.bounds[row + 1]) for row in rows]
        tokens = sum(place.stop - place.start for place in places)
        if 2 * tokens < self.bounds[-1]:
            return [tuple(array[place].copy() for array in self.state) for place in places]
        return [tuple(array[place] for array in self.state) for place in places]


class Runner:
    """The sessions of one bundle and precision. ``run`` may be called from several threads at once.

    Under load every worker runs one thread. A text that has the machine to itself may run on more: those are a second
    set of sessions (:meth:`widen`), since ONNX Runtime fixes the threads of a session when it opens.
    """

    def __init__(self, bundle: Bundle, *, precision: Precision, device: str, threads: int) -> None:
        """Opens a session for every segment on ``device`` (``auto``, ``cpu``, ``cuda`` or ``cuda:<n>``), ``threads``
        CPU threads each, and checks them against the manifest.

        Raises :class:`StartError` where a graph does not fit the manifest or ``cuda`` does not work.
        """
        self._architecture: Architecture = bundle.manifest.architecture
        self._labels = len(bundle.manifest.labels)
        segments = range(1, len(self._architecture.exits) + 1)
        self._paths = [bundle.graph(segment, precision) for segment in segments]
        self._outputs = [list(segment_io(self._architecture, segment)[1]) for segment in segments]
        self._states = [state_names(self._architecture, segment) for segment in segments][:-1]
        self.device, self._sessions = open_on(device, lambda there: self._open_all(there, threads))
        self.threads = threads
        self.lone_threads: tuple[int, ...] = (threads,) * len(self._paths)
        self._lone_sessions = self._sessions
        self._passable = {segment for segment, session in enumerate(self._sessions, start=1) if can_pass(session)}
        self._warm_up = WarmUp(bundle, precision)

    def widen(self, threads: int | Sequence[int]) -> None:
        """From here on lone runs use ``threads`` CPU threads, of all segments or of each; costs the memory of other
        sessions."""
        self.lone_threads = (threads,) * len(self._paths) if isinstance(threads, int) else tuple(threads)
        self._lone_sessions = [
            session if number == self.threads else self._open(self.device, segment, number)
            for segment, (session, number) in enumerate(zip(self._sessions, self.lone_threads, strict=True), start=1)
        ]

    def _open_all(self, device: str, threads: int) -> list[Any]:
        return [self._open(device, segment, threads) for segment in range(1, len(self._paths) + 1)]

    def _open(self, device: str, segment: int, threads: int) -> Any:
        path = self._paths[segment - 1]
        session = open_session(path, device, threads)
        check_session(session, path, segment_io(self._architecture, segment), self._labels)
        return session

    def run(self, segment: int, items: Sequence[Work], *, lone: bool = False, read: bool = True) -> SegmentOutput:
        """Runs ``segment`` (1 = first) on ``items``, packed into one row; ``lone`` runs may use more threads. Without
        ``read`` there are no logits, if the graph can leave them out."""
        lengths = [len(item.ids) for item in items]
        bounds = [0, *itertools.accumulate(lengths)]
        feeds: dict[str, NDArray[Any]] = {}
        if segment == 1:
            feeds["input_ids"] = _packed([item.ids for item in items])
            offset = self._architecture.position_offset
            feeds["position_ids"] = _packed([np.arange(offset, offset + length) for length in lengths])
            if self._architecture.uses_token_type_ids:
                feeds["token_type_ids"] = _packed([item.type_ids for item in items])
        else:
            for place, name in enumerate(self._states[segment - 2]):
                feeds[name] = _packed([item.state[place] for item in items])
        feeds["attention_mask"] = np.repeat(np.arange(1, len(items) + 1), lengths)[None]
        if not read and segment in self._passable:
            feeds[READ] = _NOT
        sessions = self._lone_sessions if lone else self._sessions
        logits, *state = sessions[segment - 1].run(self._outputs[segment - 1], feeds)
        return SegmentOutput(logits, tuple(array[0] for array in state), bounds)

    def warm_up(self, max_batch_tokens: int, max_batch_texts: int) -> None:
        """:meth:`WarmUp.check`."""
        self._warm_up.check(self, max_batch_tokens, max_batch_texts)

    def measure(
        self, max_batch_tokens: int, max_batch_texts: int, seconds: float, *, rounds: int = MEASURING_ROUNDS
    ) -> LatencyTable:
        """:meth:`WarmUp.measure`."""
        clock = run_clock(self.threads, self.device)
        table = self._warm_up.measure(self, max_batch_tokens, max_batch_texts, seconds, rounds, clock)
        return replace(table, padding=padding_in_packs(self._architecture))

    def fit_lone_threads(self, most: int) -> dict[int, list[float]]:
        """Measures a text of middle length on 1, 2, 4 ... threads, up to ``most``, and keeps for lone runs of each
        segment the number that suits it: a peek into the first layer is over before a second thread is awake.

        More threads must earn a tenth of the time each time they double: what they take, no other process has, and
        where others keep the CPUs busy they earn nothing. Returns the seconds measured of each segment by number of
        threads.
        """
        lengths = [min(32, self._architecture.max_length)]

        def best(threads: int) -> list[float]:
            clock = run_clock(threads, self.device)
            self._warm_up.time(self, lengths, lone=True)
            runs = [self._warm_up.time(self, lengths, lone=True, clock=clock) for _ in range(3)]
            return [min(one.seconds for one in taken) for taken in zip(*runs, strict=True)]

        self.widen(self.threads)
        measured, threads = {self.threads: best(self.threads)}, 2 * self.threads
        kept, chosen = list(self._lone_sessions), list(self.lone_threads)
        earning = set(range(len(kept)))
        while threads <= most and earning:
            self.widen(threads)
            measured[threads] = best(threads)
            earning = {at for at in earning if measured[threads][at] <= 0.9 * measured[threads // 2][at]}
            for at in earning:
                kept[at], chosen[at] = self._lone_sessions[at], threads
            threads *= 2
        self._lone_sessions, self.lone_threads = kept, tuple(chosen)
        return measured


def padding_in_packs(architecture: Architecture) -> float:
    """What an empty place beside a longer text costs where only attention has empty places, in tokens.

    Reckoned, not measured: what tells it from nothing is a small difference of long times, and a value that is too
    large forbids company that pays.
    """
    return min(1.0, ATTENTION_SLOWNESS * attention_share(architecture, architecture.max_length))


def _packed(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """``parts [S_i, ...]`` side by side in one row, ``[1, sum of S_i, ...]``; a single part is not copied."""
    return (parts[0] if len(parts) == 1 else np.concatenate(parts))[None]
