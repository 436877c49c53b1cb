"""Runs segments: one ONNX Runtime session for each graph of a bundle.

A micro-batch is packed: its texts lie side by side in one row of tokens, and ``attention_mask`` numbers them from 1
(docs/decisions/0001). State crosses from segment to segment as NumPy arrays on the host, one slice of tokens for each
text, so that survivors of different micro-batches are regrouped by joining their slices.
"""

import importlib
import itertools
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from models.architecture import Architecture
from models.bundle import READ, Bundle, Precision, segment_io, state_names
from server.config import StartError
from server.engine.latency import LatencyTable, Measurement
from server.engine.request import State

logger = logging.getLogger("offramp.engine")

_NOT = np.array(False)

# More than these change a median little, and a fast model need not be measured until its time is up.
MEASURING_ROUNDS = 5


class Work(Protocol):
    """What a runner needs of one text: ``ids [S]`` and ``type_ids [S]`` before segment 1, its state after."""

    @property
    def ids(self) -> NDArray[np.int64]: ...
    @property
    def type_ids(self) -> NDArray[np.int64]: ...
    @property
    def state(self) -> State: ...


@dataclass(frozen=True, slots=True)
class SegmentOutput:
    """What a segment says of B texts: ``logits [B, K]``, and the state that the next segment takes.

    ``state`` holds ``[T, H]`` for each name, all texts' tokens side by side (nothing after the last segment); text i
    has those from ``bounds[i]`` to ``bounds[i + 1]``. Where nobody was to read the exit, ``logits`` may have no rows.
    """

    logits: NDArray[np.float32]
    state: State
    bounds: Sequence[int]

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


class SegmentRunner(Protocol):
    """What the engine asks of a runner; called from several threads at once."""

    def run(self, segment: int, items: Sequence[Work], *, lone: bool = False, read: bool = True) -> SegmentOutput:
        """Runs ``segment`` (1 = first) on ``items``; ``lone`` says that nothing else runs or waits to be run, ``read``
        that somebody looks at the logits."""


def load_onnxruntime() -> Any:
    """The ``onnxruntime`` module. Raises :class:`StartError` where it is missing or broken."""
    # From 1.32 on, importing it writes a device id into the home folder and reports to its vendor. A server doesn't.
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    try:
        module = importlib.import_module("onnxruntime")
    except ImportError as error:
        raise StartError(
            f"onnxruntime is not usable ({error}); install exactly one of offramp[cpu] and offramp[gpu]"
        ) from None
    if not hasattr(module, "InferenceSession"):
        # What is left when onnxruntime and onnxruntime-gpu overwrote each other and one was removed again.
        raise StartError(
            "onnxruntime is damaged (no InferenceSession); install exactly one of offramp[cpu], offramp[gpu]"
        )
    return module


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
        self._ort = load_onnxruntime()
        self._architecture: Architecture = bundle.manifest.architecture
        self._labels = len(bundle.manifest.labels)
        self._largest_id = bundle.encoder.largest_id
        self._largest_type = bundle.encoder.largest_type_id(pair=bundle.manifest.takes_pairs)
        segments = range(1, len(self._architecture.exits) + 1)
        self._paths = [bundle.graph(segment, precision) for segment in segments]
        self._outputs = [list(segment_io(self._architecture, segment)[1]) for segment in segments]
        self._states = [state_names(self._architecture, segment) for segment in segments][:-1]
        self.device = device
        if device == "auto":
            self.device = "cuda" if "CUDAExecutionProvider" in self._ort.get_available_providers() else "cpu"
        if self.device != "cpu" and hasattr(self._ort, "preload_dlls"):
            # CUDA and cuDNN from NVIDIA's own packages, where they are not on the loader's path; says what it misses.
            self._ort.preload_dlls()
        try:
            self._sessions = self._open_all(threads)
        except _NoCuda as error:
            if device != "auto":
                raise StartError(f"device {device} was asked for, but CUDA does not work here: {error}") from None
            logger.warning("device auto: CUDA does not work here, taking the CPU: %s", error)
            self.device = "cpu"
            self._sessions = self._open_all(threads)
        self.threads = threads
        self.lone_threads: tuple[int, ...] = (threads,) * len(self._paths)
        self._lone_sessions = self._sessions
        self._passable = {
            segment
            for segment, session in enumerate(self._sessions, start=1)
            if any(node.name == READ for node in session.get_overridable_initializers())
        }

    def widen(self, threads: int | Sequence[int]) -> None:
        """From here on lone runs use ``threads`` CPU threads, of all segments or of each; costs the memory of other
        sessions."""
        self.lone_threads = (threads,) * len(self._paths) if isinstance(threads, int) else tuple(threads)
        self._lone_sessions = [
            session if number == self.threads else self._open(segment, number)
            for segment, (session, number) in enumerate(zip(self._sessions, self.lone_threads, strict=True), start=1)
        ]

    def _open_all(self, threads: int) -> list[Any]:
        return [self._open(segment, threads) for segment in range(1, len(self._paths) + 1)]

    def _open(self, segment: int, threads: int) -> Any:
        ort, path = self._ort, self._paths[segment - 1]
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        # Sessions in series spin against each other: segments took 7 times the monolith's time (design.md section 5).
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.add_session_config_entry("session.inter_op.allow_spinning", "0")
        # Memory patterns are per shape, and shapes are as many as packs. An arena never gives back what it once took:
        # with packs of random lengths it grew by 360 MB, and saved no time (docs/decisions/0008).
        options.enable_mem_pattern = False
        options.enable_cpu_mem_arena = False
        options.log_severity_level = 3
        providers: list[Any] = ["CPUExecutionProvider"]
        if self.device != "cpu":
            if "CUDAExecutionProvider" not in ort.get_available_providers():
                raise _NoCuda(f"this onnxruntime {ort.__version__} has no CUDAExecutionProvider; install offramp[gpu]")
            number = int(self.device.partition(":")[2] or 0)
            providers = [("CUDAExecutionProvider", {"device_id": number}), "CPUExecutionProvider"]
        try:
            session = ort.InferenceSession(str(path), options, providers=providers)
        except Exception as error:  # noqa: BLE001 - onnxruntime raises many types of its own
            if self.device != "cpu":
                raise _NoCuda(_one_line(error)) from None
            raise StartError(f"{path}: not a graph that onnxruntime can run ({_one_line(error)})") from None
        # A session falls back to the CPU without a word; its own list of providers tells.
        if self.device != "cpu" and session.get_providers()[0] != "CUDAExecutionProvider":
            raise _NoCuda("the session fell back to the CPU; check the NVIDIA driver, CUDA and cuDNN")
        self._check(session, path, segment)
        return session

    def _check(self, session: Any, path: object, segment: int) -> None:
        inputs, outputs = segment_io(self._architecture, segment)
        found_inputs = {node.name for node in session.get_inputs()}
        found_outputs = {node.name: node.shape for node in session.get_outputs()}
        if found_inputs != set(inputs):
            raise StartError(f"{path}: takes {sorted(found_inputs)}, but the manifest means {sorted(inputs)}")
        if set(found_outputs) != set(outputs):
            raise StartError(f"{path}: returns {sorted(found_outputs)}, but the manifest means {sorted(outputs)}")
        width = found_outputs["logits"][-1] if found_outputs["logits"] else None
        if isinstance(width, int) and width != self._labels:
            raise StartError(f"{path}: logits of width {width} for {self._labels} labels")

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
        """Runs every segment on a few sizes, the largest first, so that no request pays for first-time allocations.

        No batch is larger than requests will make one. The texts are as long as any can be and hold the largest ids
        that the tokenizer gives, so what passes here looks up nothing beyond a graph's tables later. Raises
        :class:`StartError`, naming the graph, where one does not run, logits or state come out with the wrong shape, or
        logits are not finite.
        """
        limit = self._architecture.max_length
        longest = min(limit, max_batch_tokens)
        if limit > longest:
            # Only segment 1 looks positions up; to take such a text through all of them would hold up the start.
            self._try(1, [self._blank(limit)])
        most = min(max_batch_texts, max(1, max_batch_tokens // longest))
        for texts, length in ((most, longest), (1, min(3, longest))):
            self._time([length] * texts)

    def measure(
        self, max_batch_tokens: int, max_batch_texts: int, seconds: float, *, rounds: int = MEASURING_ROUNDS
    ) -> LatencyTable:
        """How long runs of several sizes take, measured for about ``seconds`` and at most ``rounds`` times each, the
        smallest first: larger ones can be told from them where the time is up. One is a pack of unequal lengths, which
        says what an empty place in attention costs."""
        end = time.perf_counter() + seconds
        longest = min(self._architecture.max_length, max_batch_tokens)
        unequal = _unequal(max_batch_tokens, max_batch_texts, longest)
        sizes = sorted([*_sizes(max_batch_tokens, max_batch_texts, longest), unequal], key=sum)
        measured: list[Measurement] = []
        of_unequal: list[list[float]] = []
        per_token = 0.0
        for lengths in sizes * rounds:
            if measured and time.perf_counter() + per_token * sum(lengths) > end:
                break
            taken = self._time(lengths)
            per_token = sum(one.seconds for one in taken) / sum(lengths)
            if lengths is unequal:
                of_unequal.append([one.seconds for one in taken])
            else:
                measured += taken
        table = LatencyTable.from_measurements(measured)
        # Least, not median: one burst of noise would forbid company that pays.
        return table.with_padding(unequal, np.min(of_unequal, axis=0).tolist()) if of_unequal else table

    def fit_lone_threads(self, most: int) -> dict[int, list[float]]:
        """Measures a text of middle length on 1, 2, 4 ... threads, up to ``most``, and keeps for lone runs of each
        segment the number that suits it: a peek into the first layer is over before a second thread is awake.

        More threads must earn a tenth of the time each time they double: what they take, no other process has. Returns
        the seconds measured of each segment by number of threads.
        """
        lengths = [min(32, self._architecture.max_length)]

        def best() -> list[float]:
            self._time(lengths, lone=True)
            rounds = [[one.seconds for one in self._time(lengths, lone=True)] for _ in range(3)]
            return [min(taken) for taken in zip(*rounds, strict=True)]

        self.widen(self.threads)
        measured, threads = {self.threads: best()}, 2 * self.threads
        kept, chosen = list(self._lone_sessions), list(self.lone_threads)
        earning = set(range(len(kept)))
        while threads <= most and earning:
            self.widen(threads)
            measured[threads] = best()
            earning = {at for at in earning if measured[threads][at] <= 0.9 * measured[threads // 2][at]}
            for at in earning:
                kept[at], chosen[at] = self._lone_sessions[at], threads
            threads *= 2
        self._lone_sessions, self.lone_threads = kept, tuple(chosen)
        return measured

    def _time(self, lengths: Sequence[int], *, lone: bool = False) -> list[Measurement]:
        """Takes texts of these ``lengths`` through all segments, checks what comes out, and says how long each took."""
        items = [self._blank(length) for length in lengths]
        measured = []
        for segment in range(1, len(self._paths) + 1):
            started = time.perf_counter()
            output = self._try(segment, items, lone=lone)
            measured.append(Measurement(segment, len(lengths), sum(lengths), time.perf_counter() - started))
            states = output.carry(range(len(items)))
            items = [self._blank(length, state) for length, state in zip(lengths, states, strict=True)]
        return measured

    def _blank(self, length: int, state: State = ()) -> "_Blank":
        ids, type_ids = np.zeros(length, dtype=np.int64), np.zeros(length, dtype=np.int64)
        ids[0], type_ids[0] = self._largest_id, self._largest_type
        return _Blank(ids, type_ids, state)

    def _try(self, segment: int, items: Sequence[Work], *, lone: bool = False) -> SegmentOutput:
        path = self._paths[segment - 1]
        try:
            output = self.run(segment, items, lone=lone)
        except Exception as error:  # noqa: BLE001 - onnxruntime raises many types of its own
            raise StartError(f"{path}: does not run ({_one_line(error)})") from None
        self._check_output(output, len(items), path)
        return output

    def _check_output(self, output: SegmentOutput, rows: int, path: object) -> None:
        if output.logits.shape != (rows, self._labels):
            raise StartError(
                f"{path}: logits of shape {list(output.logits.shape)} for {rows} texts and {self._labels} labels"
            )
        if not np.isfinite(output.logits).all():
            raise StartError(f"{path}: logits of a warm-up text are not finite")
        width = self._architecture.hidden_size
        if any(array.shape[-1] != width for array in output.state):
            raise StartError(f"{path}: state is not as wide as the manifest's hidden_size {width}")


class _NoCuda(Exception):
    """CUDA is missing or does not work; the message says in what way."""


@dataclass(frozen=True, slots=True)
class _Blank:
    """A text for the warm-up: tokens 0 behind the largest id that there is."""

    ids: NDArray[np.int64]
    type_ids: NDArray[np.int64]
    state: State


def _sizes(max_batch_tokens: int, max_batch_texts: int, longest: int) -> list[list[int]]:
    """Lengths of the texts of each micro-batch to measure: 1, 8 and 32 texts; 8, 32, 128 ... tokens."""
    sizes = []
    for texts in sorted({1, min(8, max_batch_texts), min(32, max_batch_texts)}):
        tokens = 8
        while tokens <= max_batch_tokens:
            if 3 <= tokens // texts <= longest:
                sizes.append([tokens // texts] * texts)
            tokens *= 4
    return sizes or [[longest]]


def _unequal(max_batch_tokens: int, max_batch_texts: int, longest: int) -> list[int]:
    """Lengths of a pack of one long text and up to seven short ones, the tokens of both together alike."""
    long = min(longest, max(1, max_batch_tokens // 8))
    texts = min(8, max_batch_texts)
    return [long, *[max(1, long // 7)] * (texts - 1)]


def _packed(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """``parts [S_i, ...]`` side by side in one row, ``[1, sum of S_i, ...]``; a single part is not copied."""
    return (parts[0] if len(parts) == 1 else np.concatenate(parts))[None]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
