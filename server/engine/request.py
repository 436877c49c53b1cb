"""What travels through the engine: texts going in, items on their way, readings at each exit, answers coming out."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from models.exits import Floats, Policy, Reason

State = tuple[Any, ...]
"""What one text carries into its next segment: arrays ``[S, H]`` for each name of ``models.bundle.state_names``, or
what else the runner that made it will look up. Nobody else looks inside."""


class Work(Protocol):
    """What a runner needs of one text: ``ids [S]`` and ``type_ids [S]`` before segment 1, its state after."""

    @property
    def ids(self) -> NDArray[np.int64]: ...
    @property
    def type_ids(self) -> NDArray[np.int64]: ...
    @property
    def state(self) -> State: ...


class Output(Protocol):
    """What a segment says of B texts: ``logits [B, K]``, and the state that the next segment takes.

    Where nobody was to read the exit, ``logits`` may have no rows. ``widths`` are those of the arrays of state that
    came out on the host.
    """

    @property
    def logits(self) -> NDArray[np.float32]: ...
    @property
    def widths(self) -> Sequence[int]: ...
    def carry(self, rows: Sequence[int]) -> list[State]:
        """The state of each of ``rows``, the texts that go on."""


class SegmentRunner(Protocol):
    """What the engine asks of a runner; called from several threads at once."""

    def run(self, segment: int, items: Sequence[Work], *, lone: bool = False, read: bool = True) -> Output:
        """Runs ``segment`` (1 = first) on ``items``; ``lone`` says that nothing else runs or waits to be run, ``read``
        that somebody looks at the logits. Raises :class:`OutOfMemory` where fewer texts might have fitted; then, as
        after any failure, ``items`` can be run again."""


class OutOfMemory(Exception):
    """The device had no room for a run."""


@dataclass(frozen=True, slots=True)
class Text:
    """One text to classify, or a pair of texts."""

    text: str
    pair: str | None = None


@dataclass(frozen=True, slots=True)
class Reading:
    """What one exit said of one text: ``logits [K]``, ``probabilities [K]`` after the exit's temperature, the index of
    the label, the largest probability, the normalised entropy, the estimated chance that the last exit agrees, and the
    ``seconds`` of the segment's run (all texts of its micro-batch together)."""

    exit: int
    logits: Floats
    probabilities: Floats
    label: int
    confidence: float
    entropy: float
    agreement: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Answer:
    """The outcome for a text that was answered.

    ``readings`` are those of the exits passed, without those that nothing depended on; the last one is the exit that
    the text left at. ``queue_seconds`` is the time spent waiting for a worker before any of its segments,
    ``inference_seconds`` the time of those segments' runs.
    """

    readings: tuple[Reading, ...]
    reason: Reason
    tokens: int
    truncated: bool
    queue_seconds: float
    inference_seconds: float

    @property
    def left(self) -> Reading:
        """The reading that is the answer."""
        return self.readings[-1]


@dataclass(frozen=True, slots=True)
class Failure:
    """The outcome for a text that was not answered: its logits were not finite, its micro-batch broke, or its deadline
    passed before its first exit."""

    kind: Literal["nonfinite", "internal", "deadline"]


Outcome = Answer | Failure


class Submission:
    """The texts of one ``submit`` call: their outcomes, a future that completes with the last of them, and the id of
    the request that they came with.

    Only the event loop's thread touches it, but for the id.
    """

    def __init__(self, size: int, future: "asyncio.Future[None]", request_id: str = "") -> None:
        self.outcomes: list[Outcome | None] = [None] * size
        self.future = future
        self.request_id = request_id
        self._open = size

    def settle(self, index: int, outcome: Outcome) -> None:
        """Records the outcome of text ``index``; the future may be cancelled already."""
        self.outcomes[index] = outcome
        self._open -= 1
        if self._open == 0 and not self.future.done():
            self.future.set_result(None)


@dataclass(frozen=True, slots=True)
class Check:
    """A shadow check: the text was answered with label ``label`` under the certified quality ``tier``; what does the
    last exit say?"""

    tier: float
    label: int


@dataclass(slots=True, eq=False)
class Item:
    """One text on its way through the segments.

    ``arrival`` orders items by age; ``deadline`` and ``waiting_since`` are on the engine's clock, in seconds.
    ``segment`` is the one to run next. ``every_reading`` asks for what each exit on the way says, even where the text
    may not leave. ``audit_tier`` asks for a shadow check of its answer under that tier; a check is itself an item, of
    which nobody waits for the answer. ``done`` means that nobody waits for it any more: answered, failed or
    abandoned. ``runs`` are its own of a :class:`Timeline`, if there is one.
    """

    arrival: int
    ids: NDArray[np.int64]
    type_ids: NDArray[np.int64]
    policy: Policy
    truncated: bool
    submission: Submission | None
    index: int
    deadline: float | None = None
    every_reading: bool = True
    audit_tier: float | None = None
    check: Check | None = None
    segment: int = 1
    state: State = ()
    readings: list[Reading] = field(default_factory=list)
    previous_label: int = -1
    streak: int = 0
    waiting_since: float = 0.0
    queue_seconds: float = 0.0
    inference_seconds: float = 0.0
    runs: "list[tuple[float, Run]] | None" = None
    queued: bool = False
    done: bool = False

    @property
    def tokens(self) -> int:
        return len(self.ids)

    def answer(self, reason: Reason) -> Answer:
        """The answer of an item that leaves at its latest reading."""
        return Answer(
            readings=tuple(self.readings),
            reason=reason,
            tokens=self.tokens,
            truncated=self.truncated,
            queue_seconds=self.queue_seconds,
            inference_seconds=self.inference_seconds,
        )


@dataclass(frozen=True, slots=True)
class Run:
    """A run of a segment: its beginning and end on the engine's clock, and all its texts and their tokens."""

    segment: int
    started: float
    ended: float
    texts: int
    tokens: int


@dataclass(slots=True)
class Timeline:
    """When the texts of one ``submit`` call were tokenized and ran, for whoever asks: seconds on the engine's clock.

    ``runs[index]`` are those of text ``index``, each with the time since when the text had waited for it.
    """

    tokenizing: float = 0.0
    tokenized: float = 0.0
    runs: list[list[tuple[float, Run]]] = field(default_factory=list)


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Picked(Generic[T]):
    """A micro-batch: items that run segment ``segment`` together."""

    segment: int
    items: Sequence[T]


Batch = Picked[Item]
