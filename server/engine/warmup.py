"""The first runs of a model: on blank texts, before any request, to check what comes out and time how long it takes."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from models.bundle import Bundle, Precision
from server.config import StartError
from server.engine.latency import LatencyTable, Measurement
from server.engine.request import Output, SegmentRunner, State
from server.engine.sessions import one_line
from server.machine import cpu_quota

# More than these change a median little, and a fast model need not be measured until its time is up.
MEASURING_ROUNDS = 5

Clock = Callable[[], float]


def run_clock(threads: int, device: str) -> Clock:
    """What times runs of so many threads on ``device``, in seconds.

    One CPU thread is the caller's own, and its CPU time is what a run takes on a CPU that it shares with nobody: a
    server that starts beside busy neighbours learns the same as in peace. Under a quota of less than a CPU it is
    stretched by as much. When the last of several threads has ended, or a GPU, only the wall knows.
    """
    if threads > 1 or device != "cpu":
        return time.perf_counter
    slowness = 1.0 / min(1.0, cpu_quota())
    return lambda: slowness * time.thread_time()


@dataclass(frozen=True, slots=True)
class Blank:
    """A text for the warm-up."""

    ids: NDArray[np.int64]
    type_ids: NDArray[np.int64]
    state: State


class WarmUp:
    """Trial runs of a bundle's runner with texts of its largest ids. It does not hold the runner, which holds it: in a
    cycle a model's memory would not be free at once when another version takes its place."""

    def __init__(self, bundle: Bundle, precision: Precision) -> None:
        architecture = bundle.manifest.architecture
        self._paths = [bundle.graph(spec.number, precision) for spec in architecture.exits]
        self._labels = len(bundle.manifest.labels)
        self._limit = architecture.max_length
        self._width = architecture.hidden_size
        self._largest_id = bundle.encoder.largest_id
        self._largest_type = bundle.encoder.largest_type_id(pair=bundle.manifest.takes_pairs)

    def check(self, runner: SegmentRunner, max_batch_tokens: int, max_batch_texts: int) -> None:
        """Runs every segment on a few sizes, the largest first, so that no request pays for first-time allocations.

        No batch is larger than requests will make one. The texts are as long as any can be and hold the largest ids
        that the tokenizer gives, so what passes here looks up nothing beyond a graph's tables later. Raises
        :class:`StartError`, naming the graph, where one does not run, logits or state come out with the wrong shape, or
        logits are not finite.
        """
        longest = min(self._limit, max_batch_tokens)
        if self._limit > longest:
            # Only segment 1 looks positions up; to take such a text through all of them would hold up the start.
            self._try(runner, 1, [self._blank(self._limit)])
        most = min(max_batch_texts, max(1, max_batch_tokens // longest))
        for texts, length in ((most, longest), (1, min(3, longest))):
            self.time(runner, [length] * texts)

    def measure(
        self,
        runner: SegmentRunner,
        max_batch_tokens: int,
        max_batch_texts: int,
        seconds: float,
        rounds: int = MEASURING_ROUNDS,
        clock: Clock = time.perf_counter,
    ) -> LatencyTable:
        """How long runs of several sizes take by ``clock``, measured for about ``seconds`` and at most ``rounds`` times
        each, the smallest first: larger ones can be told from them where the time is up."""
        end = time.perf_counter() + seconds
        longest = min(self._limit, max_batch_tokens)
        sizes = sorted(_sizes(max_batch_tokens, max_batch_texts, longest), key=sum)
        measured: list[Measurement] = []
        per_token = 0.0
        for lengths in sizes * rounds:
            if measured and time.perf_counter() + per_token * sum(lengths) > end:
                break
            started = time.perf_counter()
            measured += self.time(runner, lengths, clock=clock)
            per_token = (time.perf_counter() - started) / sum(lengths)
        return LatencyTable.from_measurements(measured)

    def time(
        self,
        runner: SegmentRunner,
        lengths: Sequence[int],
        *,
        lone: bool = False,
        clock: Clock = time.perf_counter,
    ) -> list[Measurement]:
        """Takes texts of these ``lengths`` through all segments, checks what comes out, and says how long each took."""
        items = [self._blank(length) for length in lengths]
        measured = []
        for segment in range(1, len(self._paths) + 1):
            started = clock()
            output = self._try(runner, segment, items, lone=lone)
            measured.append(Measurement(segment, len(lengths), sum(lengths), clock() - started))
            states = output.carry(range(len(items)))
            items = [self._blank(length, state) for length, state in zip(lengths, states, strict=True)]
        return measured

    def _blank(self, length: int, state: State = ()) -> Blank:
        """Tokens 0 behind the largest id that there is."""
        ids, type_ids = np.zeros(length, dtype=np.int64), np.zeros(length, dtype=np.int64)
        ids[0], type_ids[0] = self._largest_id, self._largest_type
        return Blank(ids, type_ids, state)

    def _try(self, runner: SegmentRunner, segment: int, items: Sequence[Blank], *, lone: bool = False) -> Output:
        path = self._paths[segment - 1]
        try:
            output = runner.run(segment, items, lone=lone)
        except Exception as error:  # noqa: BLE001 - onnxruntime raises many types of its own
            raise StartError(f"{path}: does not run ({one_line(error)})") from None
        self._check_output(output, len(items), path)
        return output

    def _check_output(self, output: Output, rows: int, path: object) -> None:
        if output.logits.shape != (rows, self._labels):
            raise StartError(
                f"{path}: logits of shape {list(output.logits.shape)} for {rows} texts and {self._labels} labels"
            )
        if not np.isfinite(output.logits).all():
            raise StartError(f"{path}: logits of a warm-up text are not finite")
        if any(width != self._width for width in output.widths):
            raise StartError(f"{path}: state is not as wide as the manifest's hidden_size {self._width}")


def _sizes(max_batch_tokens: int, max_batch_texts: int, longest: int) -> list[list[int]]:
    """Lengths of the texts of each micro-batch to measure: 1, 8, 32, 128 ... texts; 8, 32, 128 ... tokens."""
    sizes = []
    for texts in sorted({1, *(min(8 * 4**power, max_batch_texts) for power in range(5))}):
        tokens = 8
        while tokens <= max_batch_tokens:
            if 3 <= tokens // texts <= longest:
                sizes.append([tokens // texts] * texts)
            tokens *= 4
    return sizes or [[longest]]
