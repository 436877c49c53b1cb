"""One training step over several processes (``accelerate launch``), as one process would do it on the whole batch.

Each process runs the network on its part of a batch. The outputs are then gathered, so every process computes the
losses of the whole batch, contrasts between texts of different processes included, and gradients are averaged before
anything is decided by them. With dropout off, the weights are those of one process on the whole batch.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed

from models.network import ExitOutput


def launched_rank() -> int:
    """This process's number among those that ``accelerate launch`` started, before they have found one another."""
    return int(os.environ.get("RANK", "0"))


def launched_count() -> int:
    """How many processes ``accelerate launch`` started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@dataclass(frozen=True, slots=True)
class Processes:
    """This process's ``rank`` among ``count``; with one, nothing here communicates."""

    rank: int = 0
    count: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this is the one process that writes files and reports."""
        return self.rank == 0

    def part(self, rows: Sequence[int]) -> list[int]:
        """The rows of a batch that this process computes: its even share in order; one row where that is empty."""
        sizes = self._sizes(len(rows))
        start = sum(sizes[: self.rank])
        # A forward pass needs a row; whole() leaves out what was computed for its sake.
        return list(rows[start : start + sizes[self.rank]]) or list(rows[:1])

    def whole(self, outputs: Mapping[int, ExitOutput], total: int) -> dict[int, ExitOutput]:
        """Outputs of all ``total`` rows of the batch from each process's :meth:`part`, in the batch's order.

        Gradients flow back to this process's own rows only, multiplied by ``count``: :meth:`mean` divides them again.
        """
        if self.count == 1:
            return dict(outputs)
        sizes = self._sizes(total)
        return {
            number: ExitOutput(_gather(o.logits, sizes, self.rank), _gather(o.features, sizes, self.rank))
            for number, o in outputs.items()
        }

    def mean(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Each gradient averaged over the processes, which must agree on which are None."""
        if self.count == 1:
            return list(gradients)
        # Sparse ones hold other rows in each process.
        gradients = [g.to_dense() if g is not None and g.is_sparse else g for g in gradients]
        there = [g for g in gradients if g is not None]
        # One message: a network has a hundred small parameters.
        flat = torch.cat([g.flatten() for g in there])
        distributed.all_reduce(flat)
        parts = iter((flat / self.count).split([g.numel() for g in there]))
        return [None if g is None else next(parts).view_as(g) for g in gradients]

    def agree(self, decision: bool) -> bool:
        """What the main process decided."""
        return bool(self.gather(decision)[0])

    def gather(self, value: Any) -> list[Any]:
        """The value that each process gave, by rank."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        distributed.all_gather_object(values, value)
        return values

    def wait(self) -> None:
        """Returns when every process has come here."""
        if self.count > 1:
            distributed.barrier()

    def _sizes(self, total: int) -> list[int]:
        return [total * (rank + 1) // self.count - total * rank // self.count for rank in range(self.count)]


class _GatherRows(torch.autograd.Function):
    """Rows of all processes, ``sizes`` of them each; backward takes this process's own, times the number of processes.

    No communication on the way back: every process computes the same loss from the same rows.
    """

    @staticmethod
    def forward(ctx: Any, local: Tensor, sizes: list[int], rank: int) -> Tensor:
        ctx.sizes, ctx.rank, ctx.shape = sizes, rank, local.shape
        # Messages of one length: processes' parts may differ by a row.
        padded = local.new_zeros(max(sizes), *local.shape[1:])
        padded[: sizes[rank]] = local[: sizes[rank]]
        parts = [torch.empty_like(padded) for _ in sizes]
        distributed.all_gather(parts, padded)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        own = gradients[0].new_zeros(ctx.shape)
        start, size = sum(ctx.sizes[: ctx.rank]), ctx.sizes[ctx.rank]
        own[:size] = gradients[0][start : start + size] * len(ctx.sizes)
        return own, None, None


def _gather(local: Tensor, sizes: list[int], rank: int) -> Tensor:
    gathered: Tensor = _GatherRows.apply(local, sizes, rank)  # type: ignore[no-untyped-call]
    return gathered
