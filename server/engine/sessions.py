"""Opening ONNX Runtime sessions on the device that was asked for, and nowhere else."""

import importlib
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from models.bundle import READ
from server.config import StartError
from server.engine.cuda import versions

logger = logging.getLogger("offramp.engine")

_T = TypeVar("_T")
CUDA = "CUDAExecutionProvider"


class NoCuda(Exception):
    """CUDA is missing or does not work; the message says in what way."""


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


def has_cuda() -> bool:
    """Whether this onnxruntime was built for CUDA; whether the machine has it is seen when a session opens."""
    return CUDA in load_onnxruntime().get_available_providers()


def open_on(device: str, open_all: Callable[[str], _T]) -> tuple[str, _T]:
    """What ``open_all`` opens on ``device`` (``auto``, ``cpu``, ``cuda`` or ``cuda:<n>``), and the device it is on.

    Raises :class:`StartError` where ``cuda`` was asked for and does not work; ``auto`` takes the CPU then.
    """
    ort = load_onnxruntime()
    there = device if device != "auto" else "cuda" if has_cuda() else "cpu"
    if there != "cpu" and hasattr(ort, "preload_dlls"):
        # CUDA and cuDNN from NVIDIA's own packages, where they are not on the loader's path; says what it misses.
        ort.preload_dlls()
    try:
        return there, open_all(there)
    except NoCuda as error:
        if device != "auto":
            found = f"{error} ({versions()})"
            raise StartError(f"device {device} was asked for, but CUDA does not work here: {found}") from None
        logger.warning("device auto: CUDA does not work here, taking the CPU: %s (%s)", error, versions())
        return "cpu", open_all("cpu")


def device_number(device: str) -> int:
    """The number of the GPU that ``device`` names, ``cuda`` or ``cuda:<n>``."""
    return int(device.partition(":")[2] or 0)


def open_session(path: Path, device: str, threads: int, cuda_options: Mapping[str, str] | None = None) -> Any:
    """A session for the graph at ``path`` on ``device`` (``cpu``, ``cuda`` or ``cuda:<n>``), with ``threads`` CPU
    threads and, on a GPU, the provider's ``cuda_options``.

    Raises :class:`NoCuda` where the GPU cannot be used, :class:`StartError` where the graph is none.
    """
    ort = load_onnxruntime()
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
    if device != "cpu":
        if CUDA not in ort.get_available_providers():
            raise NoCuda(f"this onnxruntime {ort.__version__} has no {CUDA}; install offramp[gpu]")
        provider = (CUDA, {"device_id": str(device_number(device)), **(cuda_options or {})})
        providers = [provider, "CPUExecutionProvider"]
    try:
        session = ort.InferenceSession(str(path), options, providers=providers)
    except Exception as error:  # noqa: BLE001 - onnxruntime raises many types of its own
        if device != "cpu":
            raise NoCuda(one_line(error)) from None
        raise StartError(f"{path}: not a graph that onnxruntime can run ({one_line(error)})") from None
    # A session falls back to the CPU without a word; its own list of providers tells.
    if device != "cpu" and session.get_providers()[0] != CUDA:
        raise NoCuda("the session fell back to the CPU; check the NVIDIA driver, CUDA and cuDNN")
    return session


def check_session(session: Any, path: Path, io: tuple[tuple[str, ...], tuple[str, ...]], labels: int) -> None:
    """Raises :class:`StartError` where ``session`` does not take and return what ``io`` names, or its logits are not
    ``labels`` wide."""
    inputs, outputs = io
    found_inputs = {node.name for node in session.get_inputs()}
    found_outputs = {node.name: node.shape for node in session.get_outputs()}
    if found_inputs != set(inputs):
        raise StartError(f"{path}: takes {sorted(found_inputs)}, but the manifest means {sorted(inputs)}")
    if set(found_outputs) != set(outputs):
        raise StartError(f"{path}: returns {sorted(found_outputs)}, but the manifest means {sorted(outputs)}")
    width = found_outputs["logits"][-1] if found_outputs["logits"] else None
    if isinstance(width, int) and width != labels:
        raise StartError(f"{path}: logits of width {width} for {labels} labels")


def can_pass(session: Any) -> bool:
    """Whether the graph can leave out what only its logits need: whether it has the optional input ``READ``."""
    return any(node.name == READ for node in session.get_overridable_initializers())


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
