"""Which runner a bundle gets: by the device that was asked for, and by the precisions that the bundle has."""

import logging
from dataclasses import dataclass

from models.bundle import Bundle, Precision
from models.store import keeps_state_in_store
from server.config import Settings, StartError
from server.engine.cuda import CudaVersions, versions
from server.engine.device import Buckets, DeviceRunner, bytes_of_a_token
from server.engine.request import OutOfMemory
from server.engine.runner import Runner
from server.engine.sessions import has_cuda

logger = logging.getLogger("offramp")

# Tokens of texts under way that a store has room for, unless fewer can be accepted. BERT-base with peeks takes 4.8 GB
# for so many on a GPU.
GPU_STORE_TOKENS = 2**19
CPU_STORE_TOKENS = 2**16
# One lane's run goes on while the host judges what the other's has said.
GPU_LANES = 2
# At most so long the start captures CUDA graphs; sizes that it did not come to run without.
CAPTURE_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Runtime:
    """A runner, how many ``runs`` at once it is for, and the largest micro-batch: ``max_batch_tokens`` and
    ``max_batch_texts``. ``cuda`` is ``None`` on the CPU."""

    runner: Runner | DeviceRunner
    precision: Precision
    runs: int
    max_batch_tokens: int
    max_batch_texts: int
    cuda: CudaVersions | None


def open_runtime(settings: Settings, bundle: Bundle, runs: int, threads: int, *, serving: bool = False) -> Runtime:
    """Opens and warms the runner for ``bundle``; ``runs`` and ``threads`` are those that suit the CPUs. While this
    process is ``serving`` already, no CUDA graphs are captured.

    Raises :class:`StartError` where the bundle lacks the precision asked for, its graphs do not fit its manifest, or
    the device does not work.
    """
    manifest = bundle.manifest
    wants_gpu = settings.device != "cpu" and (settings.device != "auto" or has_cuda())
    precision = settings.precision or _precision_for(bundle, gpu=wants_gpu)
    if precision not in manifest.precisions:
        raise StartError(f"{bundle.path}: no graphs in precision {precision}; it has {', '.join(manifest.precisions)}")
    runner = _open(settings, bundle, precision, runs, threads, gpu=wants_gpu)
    if runner.device == "cpu" and wants_gpu and settings.precision is None and precision != manifest.default_precision:
        # auto, and CUDA is there but does not work: the graphs that suit the CPU.
        precision = manifest.default_precision
        runner = _open(settings, bundle, precision, runs, threads, gpu=False)
    on_cpu = runner.device == "cpu"
    tokens, texts = _largest_batch(settings, gpu=not on_cpu)
    runner.warm_up(tokens, texts)
    if not on_cpu and isinstance(runner, DeviceRunner) and not serving:
        _capture(runner, tokens)
    elif not on_cpu and isinstance(runner, Runner):
        logger.warning(
            "%s: state of %s graphs crosses to the host between segments; fp16 graphs leave it on the GPU "
            "(offramp calibrate --add-precision fp16)",
            manifest.name,
            precision,
        )
    if not on_cpu:
        runs = settings.runs or (GPU_LANES if isinstance(runner, DeviceRunner) else 1)
    return Runtime(runner, precision, runs, tokens, texts, None if on_cpu else versions())


def _precision_for(bundle: Bundle, *, gpu: bool) -> Precision:
    manifest = bundle.manifest
    suits_gpu = [precision for precision in manifest.precisions if keeps_state_in_store(precision)]
    return suits_gpu[0] if gpu and suits_gpu else manifest.default_precision


def _largest_batch(settings: Settings, *, gpu: bool) -> tuple[int, int]:
    """Tokens and texts."""
    tokens, texts = (8192, 256) if gpu else (512, 32)
    return settings.max_batch_tokens or tokens, settings.max_batch_texts or texts


def _open(
    settings: Settings, bundle: Bundle, precision: Precision, runs: int, threads: int, *, gpu: bool
) -> Runner | DeviceRunner:
    if not keeps_state_in_store(precision):
        return Runner(bundle, precision=precision, device=settings.device, threads=threads)
    tokens, texts = _largest_batch(settings, gpu=gpu)
    return DeviceRunner(
        bundle,
        precision=precision,
        device=settings.device,
        threads=threads,
        lanes=(settings.runs or GPU_LANES) if gpu else runs,
        buckets=Buckets.up_to(texts, bundle.manifest.architecture.max_length),
        store_tokens=_store_tokens(settings, bundle, tokens, gpu=gpu),
        memory_bytes=settings.gpu_memory_bytes if gpu else None,
    )


def _store_tokens(settings: Settings, bundle: Bundle, largest: int, *, gpu: bool) -> int:
    """Room for all texts that can be accepted, within reason (and a quarter of the memory allowed); for the largest
    micro-batch in any case."""
    longest = bundle.encoder.max_length
    room = min(settings.max_queue * longest, GPU_STORE_TOKENS if gpu else CPU_STORE_TOKENS)
    if settings.gpu_memory_bytes is not None:
        room = min(room, settings.gpu_memory_bytes // 4 // bytes_of_a_token(bundle.manifest.architecture))
    return max(room, largest, longest)


def _capture(runner: DeviceRunner, max_batch_tokens: int) -> None:
    try:
        sizes = runner.capture(max_batch_tokens, CAPTURE_SECONDS)
        logger.info("CUDA graphs for %d sizes of micro-batches", sizes)
    except OutOfMemory as error:
        logger.warning("no memory to capture more CUDA graphs: %s", error)
