"""Loaders that differ over the ranks: a batch needs every rank, for its experts.

Training ends an epoch on all ranks when the first one has no batch left (or refuses loaders of different lengths).
Evaluation and prediction go on: a rank without batches serves its experts until the last rank is done (`serving.py`).

Lengths are compared once, when Lightning has prepared a loader. Where they are known and equal, the loader is left as
it is. Where they are unknown, hosts agree batch by batch, one batch ahead, so that nobody waits.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, Literal, get_args

import lightning.pytorch as pl
from lightning.fabric.utilities.data import has_iterable_dataset, sized_len
from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.utils.data import DataLoader

from lightning_ep.guards.agreement import SideGroup
from lightning_ep.guards.failure import naming
from lightning_ep.guards.serving import Attendance, Serving

UnevenData = Literal["stop", "error"]
UNEVEN_DATA = get_args(UnevenData)
_END = object()


class UnevenDataError(RuntimeError):
    """Ranks have different numbers of training batches, and that is refused."""


class Lengths:
    """Batches of each rank. `known` is empty unless every rank's length is a number that can be relied on."""

    def __init__(self, lengths: list[int | None], exact: bool) -> None:
        self.promised = lengths
        self.known = [n for n in lengths if n is not None] if exact and None not in lengths else []

    def equal_within(self, limit: int | float) -> bool:
        """Whether all ranks take as many batches; an integer limit may hide a difference."""
        most = limit if isinstance(limit, int) else float("inf")
        return len({min(n, most) for n in self.known}) == 1

    def __str__(self) -> str:
        by_length: dict[int | None, list[int]] = {}
        for rank, n in enumerate(self.promised):
            by_length.setdefault(n, []).append(rank)
        return ", ".join(f"{'unknown' if n is None else n} on {naming(ranks)}" for n, ranks in by_length.items())


def even_loader(loader: Any, trainer: pl.Trainer, side: SideGroup, serving: Serving, uneven_data: UnevenData) -> Any:
    """`loader` as it is when all ranks have as many batches, or one that keeps them together. Collective.

    Raises UnevenDataError on all ranks for a training loader without batches on some rank, and for one whose known
    lengths differ when `uneven_data="error"`.
    """
    # The length that an iterable dataset promises may be wrong (several workers), so it is not relied on.
    exact = not (isinstance(loader, DataLoader) and has_iterable_dataset(loader))
    answers = side.gather((sized_len(loader), exact))
    lengths = Lengths([n for n, _ in answers], all(e for _, e in answers))
    if lengths.equal_within(_limit(trainer)):
        return loader
    if not trainer.training:
        return EvaluationLoader(loader, lengths, trainer, side, serving)
    if lengths.known:
        fewest = min(lengths.known)
        text = f"ranks have different numbers of training batches: {lengths}"
        if uneven_data == "error" or fewest == 0:
            hint = f", or set uneven_data='stop' to use {fewest} of each" if fewest else ""
            raise UnevenDataError(f"{text}. Give every rank as many{hint}.")
        rank_zero_warn(f"{text}. Every epoch ends after {fewest} on all ranks; the rest is not used.")
    return TrainingLoader(loader, lengths, side, uneven_data)


def _limit(trainer: pl.Trainer) -> int | float:
    """Lightning's `limit_*_batches` of the loop that is running or prepared."""
    if trainer.training:
        return trainer.limit_train_batches
    if trainer.testing:
        return trainer.limit_test_batches
    return trainer.limit_predict_batches if trainer.predicting else trainer.limit_val_batches


class Wrapped:
    """A loader with another way to iterate; everything else is the loader's own, its state included."""

    _own: tuple[str, ...] = ("_loader", "_lengths", "_side")

    def __init__(self, loader: Any, lengths: Lengths, side: SideGroup) -> None:
        self._loader, self._lengths, self._side = loader, lengths, side

    def __getattr__(self, name: str) -> Any:
        if "_loader" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._own:
            self.__dict__[name] = value
        else:
            setattr(self._loader, name, value)

    def __iter__(self) -> Iterator[Any]:
        raise NotImplementedError


class TrainingLoader(Wrapped):
    """Ends on all ranks after the same batch: the last one that every rank has."""

    _own = (*Wrapped._own, "_uneven_data")

    def __init__(self, loader: Any, lengths: Lengths, side: SideGroup, uneven_data: UnevenData) -> None:
        super().__init__(loader, lengths, side)
        self._uneven_data = uneven_data

    def __len__(self) -> int:
        promised = self._lengths.promised
        if None in promised:
            raise TypeError(f"{type(self._loader).__name__} has no length on every rank")
        return min(promised)

    def __iter__(self) -> Iterator[Any]:
        return islice(self._loader, len(self)) if self._lengths.known else self._until_one_is_dry()

    def _until_one_is_dry(self) -> Iterator[Any]:
        # A stateful loader must not be ahead of what it was asked for when it is saved: there the hosts do wait.
        ahead = not isinstance(self._loader, _Stateful)
        batches, count = iter(self._loader), 0
        batch = next(batches, _END)
        present = self._tell(batch)
        while True:
            if ahead:
                following = next(batches, _END) if batch is not _END else _END
                coming = self._tell(following)
            flags = present.read()
            if not all(flags):
                break
            yield batch
            count += 1
            if not ahead:
                following = next(batches, _END)
                coming = self._tell(following)
            batch, present = following, coming
        if any(flags):
            self._some_are_dry([rank for rank, has in enumerate(flags) if not has], count)

    def _tell(self, batch: Any) -> Any:
        flags = [0] * self._side.size
        flags[self._side.rank] = int(batch is not _END)
        return self._side.start_sum(flags)

    def _some_are_dry(self, dry: list[int], count: int) -> None:
        text = f"{naming(dry)} had no more than {count} training batches, the other ranks had more"
        if self._uneven_data == "error" or count == 0:
            hint = ", or set uneven_data='stop' to end the epoch there" if count else ""
            raise UnevenDataError(f"{text}. Give every rank as many{hint}.")
        rank_zero_warn(f"{text}: the epoch ends there on all ranks, the rest is not used.")


class EvaluationLoader(TrainingLoader):
    """Gives every rank all of its own batches; ranks with fewer serve the others.

    (Batches that combine several loaders in another way than one after the other end with the shortest loader.)
    """

    _own = (*TrainingLoader._own, "_trainer", "_serving")

    def __init__(self, loader: Any, lengths: Lengths, trainer: pl.Trainer, side: SideGroup, serving: Serving) -> None:
        super().__init__(loader, lengths, side, "stop")
        self._trainer, self._serving = trainer, serving

    def __len__(self) -> int:
        if not self._is_sequential():
            return super().__len__()
        promised = [n for n in self._lengths.promised if n is not None]
        if len(promised) < len(self._lengths.promised):
            raise TypeError(f"{type(self._loader).__name__} has no length on every rank")
        return max(promised)

    def __iter__(self) -> Iterator[Any]:
        return self._all_batches() if self._is_sequential() else super().__iter__()

    def _all_batches(self) -> Iterator[Any]:
        known = self._lengths.known
        attendance = Attendance(self._side, known or None, self._most_steps())
        batches = iter(self._loader)
        if known:
            if not attendance.has(1):
                self._serving.nothing_to_do(attendance)
            for batch in batches:
                self._serving.taken(attendance)
                yield batch
            return
        count, batch = 0, next(batches, _END)
        attendance.total = 0 if batch is _END else None
        attendance.start()
        if batch is _END:
            self._serving.nothing_to_do(attendance)
        while batch is not _END:
            count += 1
            # Whether this is the last batch has to be known when its step begins.
            following = next(batches, _END)
            attendance.total = count if following is _END else None
            self._serving.taken(attendance)
            yield batch
            batch = following

    def _most_steps(self) -> float:
        limit, trainer = _limit(self._trainer), self._trainer
        try:
            length: float = len(self)
        except TypeError:
            length = float("inf")
        steps = min(length, limit) if isinstance(limit, int) else length if limit == 1.0 else int(length * limit)
        return min(steps, trainer.num_sanity_val_steps) if trainer.sanity_checking else steps

    def _is_sequential(self) -> bool:
        combined = getattr(self._trainer._active_loop, "_combined_loader", None)
        return getattr(combined, "_mode", "sequential") == "sequential"
