"""Runs segments: one ONNX Runtime session for each graph of a bundle.

State crosses from segment to segment as NumPy arrays on the host, one slice for each text, so that survivors of
different micro-batches can be regrouped.
"""

import importlib
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from models.architecture import Architecture
from models.bundle import Bundle, Precision, segment_io, state_names
from server.config import StartError
from server.engine.request import State

logger = logging.getLogger("offramp.engine")


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
    """``logits [B, K]``, and for each text the state that its next segment takes (empty after the last segment)."""

    logits: NDArray[np.float32]
    states: list[State]


class SegmentRunner(Protocol):
    """What the engine asks of a runner; called from several threads at once."""

    def run(self, segment: int, items: Sequence[Work]) -> SegmentOutput: ...


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
    """The sessions of one bundle and precision. ``run`` may be called from several threads at once."""

    def __init__(self, bundle: Bundle, *, precision: Precision, device: str, threads: int) -> None:
        """Opens a session for every segment on ``device`` (``auto``, ``cpu``, ``cuda`` or ``cuda:<n>``), ``threads``
        CPU threads each, and checks them against the manifest.

        Raises :class:`StartError` where a graph does not fit the manifest or ``cuda`` does not work.
        """
        ort = load_onnxruntime()
        self._architecture: Architecture = bundle.manifest.architecture
        self._labels = len(bundle.manifest.labels)
        self._largest_id = bundle.encoder.largest_id
        self._largest_type = bundle.encoder.largest_type_id(pair=bundle.manifest.takes_pairs)
        segments = range(1, len(self._architecture.exits) + 1)
        self._paths = [bundle.graph(segment, precision) for segment in segments]
        self.device = device
        if device == "auto":
            self.device = "cuda" if "CUDAExecutionProvider" in ort.get_available_providers() else "cpu"
        try:
            self._sessions = [self._open(ort, bundle, precision, segment, threads) for segment in segments]
        except _NoCuda as error:
            if device != "auto":
                raise StartError(f"device {device} was asked for, but CUDA does not work here: {error}") from None
            logger.warning("device auto: CUDA does not work here, taking the CPU: %s", error)
            self.device = "cpu"
            self._sessions = [self._open(ort, bundle, precision, segment, threads) for segment in segments]
        self._outputs = [list(segment_io(self._architecture, segment)[1]) for segment in segments]
        self._states = [state_names(self._architecture, segment) for segment in segments][:-1]

    def _open(self, ort: Any, bundle: Bundle, precision: Precision, segment: int, threads: int) -> Any:
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.inter_op_num_threads = 1
        # Sessions in series spin against each other: segments took 7 times the monolith's time (design.md section 5).
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.add_session_config_entry("session.inter_op.allow_spinning", "0")
        # Memory patterns are per shape, and shapes are as many as batch sizes times lengths.
        options.enable_mem_pattern = False
        options.log_severity_level = 3
        path = bundle.graph(segment, precision)
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

    def run(self, segment: int, items: Sequence[Work]) -> SegmentOutput:
        """Runs ``segment`` (1 = first) on ``items``, padded to the longest of them."""
        feeds: dict[str, NDArray[Any]] = {}
        if segment == 1:
            lengths = [len(item.ids) for item in items]
            rows, longest = len(items), max(lengths)
            feeds["input_ids"] = _padded([item.ids for item in items], longest)
            offset = self._architecture.position_offset
            positions = np.arange(offset, offset + longest, dtype=np.int64)
            feeds["position_ids"] = np.broadcast_to(positions, (rows, longest)).copy()
            if self._architecture.uses_token_type_ids:
                feeds["token_type_ids"] = _padded([item.type_ids for item in items], longest)
        else:
            lengths = [len(item.state[0]) for item in items]
            longest = max(lengths)
            for place, name in enumerate(self._states[segment - 2]):
                feeds[name] = _padded([item.state[place] for item in items], longest)
        feeds["attention_mask"] = (np.arange(longest) < np.asarray(lengths)[:, None]).astype(np.int64)
        logits, *state = self._sessions[segment - 1].run(self._outputs[segment - 1], feeds)
        states = [tuple(array[row, :length] for array in state) for row, length in enumerate(lengths)]
        return SegmentOutput(logits, states)

    def warm_up(self, max_batch_tokens: int, max_batch_texts: int) -> None:
        """Runs every segment on a few shapes, the largest first, so that no request pays for first-time allocations.

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
        for rows, length in ((most, longest), (1, min(32, longest)), (1, 3)):
            items = [self._blank(length) for _ in range(rows)]
            for segment in range(1, len(self._sessions) + 1):
                output = self._try(segment, items)
                items = [self._blank(length, state) for state in output.states]

    def _blank(self, length: int, state: State = ()) -> "_Blank":
        ids, type_ids = np.zeros(length, dtype=np.int64), np.zeros(length, dtype=np.int64)
        ids[0], type_ids[0] = self._largest_id, self._largest_type
        return _Blank(ids, type_ids, state)

    def _try(self, segment: int, items: Sequence[Work]) -> SegmentOutput:
        path = self._paths[segment - 1]
        try:
            output = self.run(segment, items)
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
        if any(array.shape[-1] != width for array in output.states[0]):
            raise StartError(f"{path}: state is not as wide as the manifest's hidden_size {width}")


class _NoCuda(Exception):
    """CUDA is missing or does not work; the message says in what way."""


@dataclass(frozen=True, slots=True)
class _Blank:
    """A text for the warm-up: tokens 0 behind the largest id that there is."""

    ids: NDArray[np.int64]
    type_ids: NDArray[np.int64]
    state: State


def _padded(rows: Sequence[NDArray[Any]], longest: int) -> NDArray[Any]:
    """``rows [S_i, ...]`` stacked to ``[B, longest, ...]``, zeros behind the shorter ones."""
    first = rows[0]
    if len(rows) == 1:
        return np.ascontiguousarray(first[None])
    stacked = np.zeros((len(rows), longest, *first.shape[1:]), dtype=first.dtype)
    for row, values in enumerate(rows):
        stacked[row, : len(values)] = values
    return stacked


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
