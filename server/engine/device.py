"""Runs fp16 segments whose state stays on the device: token numbers and row numbers go in, only logits come out.

The layout is that of :mod:`models.store`. There are two sets of stores: segment n reads from one and writes to the
other, so that a run that failed, or that CUDA-graph capture repeats, can be run again on what it read. Both sets, and
the inputs and logits of every size of micro-batch, keep their addresses, as CUDA graphs must have it. Sizes are few:
micro-batches are padded up to :class:`Buckets`. The same code runs on the CPU, where "device" memory is the host's.
"""

import itertools
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.architecture import Architecture
from models.bundle import Bundle, Precision, state_names
from models.store import CLEAN_ROW, FIRST_ROW, starts_of, store_io
from server.config import StartError
from server.engine.latency import LatencyTable
from server.engine.request import OutOfMemory, State, Work
from server.engine.sessions import (
    NoCuda,
    check_session,
    device_number,
    load_onnxruntime,
    one_line,
    open_on,
    open_session,
)
from server.engine.warmup import MEASURING_ROUNDS, WarmUp

logger = logging.getLogger("offramp.engine")

# What ONNX Runtime, CUDA and cuBLAS say when memory has run out; they raise no type of their own.
_OUT_OF_MEMORY = ("failed to allocate", "out of memory", "alloc_failed", "available memory of")
# The annotation of a run that is not to be captured.
_NO_GRAPH = "-1"


class StoreFull(Exception):
    """More texts are under way than the store has rows for."""


class Rows:
    """The rows that one text holds; they are free again once nobody holds this object any more."""

    __slots__ = ("_free", "numbers")

    def __init__(self, numbers: NDArray[np.int32], free: "FreeRows") -> None:
        self.numbers = numbers
        self._free = free

    def __del__(self) -> None:
        self._free.give_back(self.numbers)


class FreeRows:
    """Which rows of the store are free. Any thread may take and give back."""

    def __init__(self, rows: int) -> None:
        self._stack = np.arange(FIRST_ROW, rows, dtype=np.int32)
        self._count = len(self._stack)
        # A text may be dropped wherever garbage is collected, here too: giving back must not wait for the lock.
        self._returned: deque[NDArray[np.int32]] = deque()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        with self._lock:
            self._collect()
            return self._count

    def take(self, lengths: Sequence[int]) -> list[Rows]:
        """Rows for texts of these ``lengths``. Raises :class:`StoreFull`, and takes none, where they are too few."""
        with self._lock:
            self._collect()
            if sum(lengths) > self._count:
                raise StoreFull(f"{sum(lengths)} tokens for {self._count} free rows")
            taken = []
            for length in lengths:
                self._count -= length
                taken.append(Rows(self._stack[self._count : self._count + length].copy(), self))
            return taken

    def give_back(self, numbers: NDArray[np.int32]) -> None:
        self._returned.append(numbers)

    def _collect(self) -> None:
        while self._returned:
            numbers = self._returned.popleft()
            self._stack[self._count : self._count + len(numbers)] = numbers
            self._count += len(numbers)


@dataclass(frozen=True, slots=True)
class Buckets:
    """Sizes that micro-batches are padded up to, rising: numbers of ``texts`` and their ``lengths``.

    Each is at most half again as large as the one before, so at worst a third of either is padding; the largest are the
    limits themselves, which full micro-batches reach.
    """

    texts: tuple[int, ...]
    lengths: tuple[int, ...]

    @classmethod
    def up_to(cls, max_texts: int, max_length: int) -> "Buckets":
        return cls(_steps(1, max_texts), _steps(8, max_length))

    def fit(self, texts: int, longest: int) -> tuple[int, int]:
        """The smallest size that holds so many texts of at most ``longest`` tokens; their own beyond the largest."""
        return _at_least(self.texts, texts), _at_least(self.lengths, longest)

    def within(self, tokens: int) -> Iterator[tuple[int, int]]:
        """Sizes of at most so many tokens, the smallest first."""
        sizes = [(texts, length) for texts in self.texts for length in self.lengths if texts * length <= tokens]
        return iter(sorted(sizes, key=lambda size: size[0] * size[1]))


def _steps(first: int, last: int) -> tuple[int, ...]:
    """1, 2, 3, 4, 6, 8, 12, 16, 24 ... from ``first`` up to ``last``, which is among them."""
    powers = (2**power for power in range(last.bit_length()))
    steps = {step for power in powers for step in (power, power + power // 2) if first <= step < last}
    return (*sorted(steps), last)


def _at_least(steps: Sequence[int], wanted: int) -> int:
    return next((step for step in steps if step >= wanted), wanted)


@dataclass(frozen=True, slots=True)
class StoreOutput:
    """What a segment says of B texts: ``logits [B, K]``; their state is where their rows are."""

    logits: NDArray[np.float32]
    rows: Sequence[Rows]
    widths: Sequence[int] = ()

    def carry(self, rows: Sequence[int]) -> list[State]:
        """The state of each of ``rows``, the texts that go on."""
        return [(self.rows[row],) for row in rows]


@dataclass(frozen=True, slots=True)
class _Bound:
    """One segment at one size: everything it reads and writes, at addresses that stay."""

    binding: Any
    inputs: dict[str, Any]
    logits: Any
    options: Any
    graph: bool


@dataclass(slots=True)
class _Lane:
    """Sessions and buffers for one run at a time. While the host judges what one lane's run said, another's runs.
    ``graphs`` says whether its sessions may capture CUDA graphs."""

    sessions: list[Any]
    graphs: bool
    bound: dict[tuple[int, int, int], _Bound] = field(default_factory=dict)
    # Never twice: a session would replay the other size's graph.
    graph_ids: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    sent: int = 0
    fetched: int = 0


class DeviceRunner:
    """The sessions of one bundle's fp16 graphs. ``run`` may be called from several threads at once, ``lanes`` of which
    get ahead; the others wait."""

    def __init__(
        self,
        bundle: Bundle,
        *,
        precision: Precision = "fp16",
        device: str,
        threads: int,
        lanes: int,
        buckets: Buckets,
        store_tokens: int,
        memory_bytes: int | None = None,
    ) -> None:
        """Opens ``lanes`` sets of sessions on ``device`` (``auto``, ``cpu``, ``cuda`` or ``cuda:<n>``) and a store for
        ``store_tokens`` tokens of texts under way. Micro-batches are padded to ``buckets``. On a GPU all of it together
        keeps to ``memory_bytes``.

        Raises :class:`StartError` where a graph does not fit the manifest, ``cuda`` does not work, or ``memory_bytes``
        are too few.
        """
        self._ort = load_onnxruntime()
        manifest = bundle.manifest
        self._architecture, self._labels = manifest.architecture, len(manifest.labels)
        segments = range(1, len(self._architecture.exits) + 1)
        self._paths = [bundle.graph(segment, precision) for segment in segments]
        self._io = [store_io(self._architecture, segment) for segment in segments]
        self._buckets = buckets
        self._free = FreeRows(FIRST_ROW + store_tokens)
        shape = (FIRST_ROW + store_tokens, self._architecture.hidden_size)
        limits: list[int | None] = [None] * len(self._paths)
        if memory_bytes is not None:
            graph_bytes = [path.stat().st_size for path in self._paths]
            stores = store_tokens * bytes_of_a_token(self._architecture)
            limits = list(session_limits(memory_bytes, stores, graph_bytes, lanes))
        self._limits = limits
        self._threads = threads
        self.device, self._all_lanes = open_on(device, lambda there: [self._lane(there) for _ in range(lanes)])
        names = _names_of_state(self._architecture)
        self._stores = [{name: self._value(np.zeros(shape, np.float16)) for name in names} for _ in range(2)]
        self._lanes: queue.SimpleQueue[_Lane] = queue.SimpleQueue()
        for lane in self._all_lanes:
            self._lanes.put(lane)
        self.threads, self.lone_threads = threads, (threads,) * len(self._paths)
        self._warm_up = WarmUp(bundle, precision)

    def run(self, segment: int, items: Sequence[Work], *, lone: bool = False, read: bool = True) -> StoreOutput:
        """Runs ``segment`` (1 = first) on ``items``, all of whose exits are read. Raises :class:`OutOfMemory`, or
        :class:`StoreFull` where newcomers find no rows."""
        rows = self._free.take([len(item.ids) for item in items]) if segment == 1 else [item.state[0] for item in items]
        lane = self._lanes.get()
        try:
            return StoreOutput(self._guarded(lane, segment, items, rows), rows)
        finally:
            self._lanes.put(lane)

    def warm_up(self, max_batch_tokens: int, max_batch_texts: int) -> None:
        """:meth:`WarmUp.check`."""
        self._warm_up.check(self, max_batch_tokens, max_batch_texts)

    def measure(
        self, max_batch_tokens: int, max_batch_texts: int, seconds: float, *, rounds: int = MEASURING_ROUNDS
    ) -> LatencyTable:
        """:meth:`WarmUp.measure`. Inside, a micro-batch is padded: an empty place is computed like a token."""
        table = self._warm_up.measure(self, max_batch_tokens, max_batch_texts, seconds, rounds)
        return replace(table, padding=1.0)

    def capture(self, max_batch_tokens: int, seconds: float) -> int:
        """Captures CUDA graphs of micro-batches of every size up to ``max_batch_tokens``, the smallest first, until
        ``seconds`` are over, and returns how many sizes have them; the others run without.

        Nothing else in this process may use the GPU meanwhile: ONNX Runtime captures in CUDA's global mode, in which a
        copy by any other thread is an error and spoils the graph. Raises :class:`OutOfMemory`.
        """
        end, sizes = time.perf_counter() + seconds, 0
        for texts, longest in self._buckets.within(min(max_batch_tokens, len(self._free))):
            if time.perf_counter() > end:
                break
            rows = self._free.take([longest] * texts)
            items = [_Blank(np.zeros(longest, np.int64)) for _ in range(texts)]
            for lane in self._all_lanes:
                for segment in range(1, len(self._paths) + 1):
                    size = segment, texts, longest
                    lane.bound[size] = self._bind(lane, segment, texts, longest, graph=lane.graphs)
                    try:
                        self._guarded(lane, segment, items, rows)
                    except OutOfMemory:
                        # Or it would be captured when it is met.
                        del lane.bound[size]
                        raise
            sizes += all(lane.graphs for lane in self._all_lanes)
        return sizes

    @property
    def bytes_sent(self) -> int:
        """Bytes that went to the device, the store's first zeros and weights left out."""
        return sum(lane.sent for lane in self._all_lanes)

    @property
    def bytes_fetched(self) -> int:
        """Bytes that came back from the device."""
        return sum(lane.fetched for lane in self._all_lanes)

    def _guarded(self, lane: _Lane, segment: int, items: Sequence[Work], rows: Sequence[Rows]) -> NDArray[np.float32]:
        try:
            return self._run(lane, segment, items, rows)
        except Exception as error:
            if _is_out_of_memory(error):
                raise OutOfMemory(one_line(error)) from error
            raise

    def _run(self, lane: _Lane, segment: int, items: Sequence[Work], rows: Sequence[Rows]) -> NDArray[np.float32]:
        texts, longest = self._buckets.fit(len(items), max(len(own.numbers) for own in rows))
        bound = lane.bound.get((segment, texts, longest))
        if bound is None:
            bound = lane.bound[segment, texts, longest] = self._bind(lane, segment, texts, longest, graph=False)
        arrays = {"rows": np.full((texts, longest), CLEAN_ROW, np.int32), "lengths": np.ones(texts, np.int32)}
        if segment == 1:
            arrays |= {name: np.zeros((texts, longest), np.int32) for name in bound.inputs if name.endswith("_ids")}
        for place, (item, own) in enumerate(zip(items, rows, strict=True)):
            length = len(own.numbers)
            arrays["rows"][place, :length] = own.numbers
            arrays["lengths"][place] = length
            if segment == 1:
                arrays["input_ids"][place, :length] = item.ids
                if "token_type_ids" in arrays:
                    arrays["token_type_ids"][place, :length] = item.type_ids
        for name, array in arrays.items():
            bound.inputs[name].update_inplace(array)
            lane.sent += array.nbytes
        try:
            lane.sessions[segment - 1].run_with_iobinding(bound.binding, bound.options)
        except Exception as error:
            if not bound.graph or _is_out_of_memory(error):
                raise
            logger.warning("CUDA graphs do not work here, going on without: %s", one_line(error))
            self._give_up_graphs(lane)
            return self._run(lane, segment, items, rows)
        # A copy: on the CPU the array would be the buffer that the next run overwrites.
        logits = np.array(bound.logits.numpy())
        lane.fetched += logits.nbytes
        return logits[: len(items)]

    def _bind(self, lane: _Lane, segment: int, texts: int, longest: int, *, graph: bool) -> _Bound:
        """Buffers for ``segment`` at this size: its own for what the host sends and for logits, shared stores. With
        ``graph`` its first run captures one."""
        names, outputs = self._io[segment - 1]
        binding = lane.sessions[segment - 1].io_binding()
        read, written = self._stores[(segment - 1) % 2], self._stores[segment % 2]
        offset = self._architecture.position_offset
        fixed = {
            "starts": starts_of(texts, longest),
            "position_ids": np.arange(offset, offset + longest, dtype=np.int32)[None],
            "lengths": np.ones(texts, np.int32),
        }
        inputs = {}
        for name in names:
            if name in read and segment > 1:
                value = read[name]
            elif name.startswith("into_"):
                value = written[name.removeprefix("into_")]
            else:
                value = self._value(fixed.get(name, np.zeros((texts, longest), np.int32)))
                if name not in ("starts", "position_ids"):
                    inputs[name] = value
            binding.bind_ortvalue_input(name, value)
        logits = self._value(np.zeros((texts, self._labels), np.float32))
        for name in outputs:
            binding.bind_ortvalue_output(name, logits if name == "logits" else written[name.removeprefix("next_")])
        options = self._ort.RunOptions()
        options.add_run_config_entry("gpu_graph_id", str(next(lane.graph_ids)) if graph else _NO_GRAPH)
        return _Bound(binding, inputs, logits, options, graph)

    def _value(self, array: NDArray[Any]) -> Any:
        """``array`` in memory of the device's own."""
        if self.device == "cpu":
            return self._ort.OrtValue.ortvalue_from_numpy(array)
        return self._ort.OrtValue.ortvalue_from_numpy(array, "cuda", device_number(self.device))

    def _lane(self, device: str) -> _Lane:
        try:
            return _Lane(self._open_all(device, graphs=True), graphs=True)
        except NoCuda as error:
            # The GPU may work and only capture may not; if it does not either, this says so.
            lane = _Lane(self._open_all(device, graphs=False), graphs=False)
            logger.warning("CUDA graphs do not work here, going on without: %s", error)
            return lane

    def _give_up_graphs(self, lane: _Lane) -> None:
        lane.bound.clear()
        lane.sessions, lane.graphs = self._open_all(self.device, graphs=False), False

    def _open_all(self, device: str, *, graphs: bool) -> list[Any]:
        sessions = []
        for path, io, limit in zip(self._paths, self._io, self._limits, strict=True):
            options = {
                "enable_cuda_graph": "1" if graphs else "0",
                # Sums of LayerNormalization in fp32; the quicker kernel keeps them in fp16.
                "enable_skip_layer_norm_strict_mode": "1",
                # What is fp32 is so for its precision.
                "use_tf32": "0",
                "arena_extend_strategy": "kSameAsRequested",
            }
            if limit is not None:
                options["gpu_mem_limit"] = str(limit)
            session = open_session(path, device, self._threads, options)
            check_session(session, path, io, self._labels)
            sessions.append(session)
        return sessions


@dataclass(frozen=True, slots=True)
class _Blank:
    """A text of zeros."""

    ids: NDArray[np.int64]
    state: State = ()

    @property
    def type_ids(self) -> NDArray[np.int64]:
        return self.ids


def bytes_of_a_token(architecture: Architecture) -> int:
    """Bytes that both sets of stores have for one token."""
    return 2 * len(_names_of_state(architecture)) * architecture.hidden_size * np.dtype(np.float16).itemsize


def _names_of_state(architecture: Architecture) -> set[str]:
    return {name for spec in architecture.exits[:-1] for name in state_names(architecture, spec.number)}


def session_limits(total: int, stores: int, graph_bytes: Sequence[int], lanes: int) -> list[int]:
    """Bytes that each segment's session may take in every lane, so that all keep to ``total`` together with ``stores``
    bytes of state: its weights, and a like share of what is left for all.

    Raises :class:`StartError` where nothing is left.
    """
    left = total - stores - lanes * sum(graph_bytes)
    if left <= 0:
        raise StartError(
            f"gpu_memory_bytes {total} are too few: weights take {lanes * sum(graph_bytes)}, states of texts {stores}"
        )
    return [weights + left // (lanes * len(graph_bytes)) for weights in graph_bytes]


def _is_out_of_memory(error: Exception) -> bool:
    return any(words in str(error).lower() for words in _OUT_OF_MEMORY)
