"""Trainer runs in one rank of the process pool whose ranks have different data."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_ep import EPOverlapStrategy
from tests.reference import rank_loss, tiny_model, tokens
from tests.trained import CausalLM, quiet_trainer

MODEL = "qwen3_moe"


def sample(rank: int, i: int) -> Tensor:
    """Batch i of a rank, `[B, S]`: both sizes differ from rank to rank and batch to batch."""
    return tokens(i, 0, rank, batch=1 + (i + rank) % 2)[:, : 6 + rank + i % 3]


class Streamed(IterableDataset):
    """Batches of this rank, of a length that nobody knows."""

    def __init__(self, count: int) -> None:
        self.rank, self.count = dist.get_rank(), count

    def __iter__(self) -> Iterator[Tensor]:
        return (sample(self.rank, i) for i in range(self.count))


class Listed(Dataset):
    def __init__(self, count: int) -> None:
        self.rank, self.count = dist.get_rank(), count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> Tensor:
        return sample(self.rank, i)


class Stateful:
    """A loader without length that remembers its place."""

    def __init__(self, count: int) -> None:
        self.count, self.given, self.start = count, 0, 0

    def __iter__(self) -> Iterator[Tensor]:
        self.given, self.start = self.start, 0
        while self.given < self.count:
            self.given += 1
            yield sample(dist.get_rank(), self.given - 1)[None]

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["given"]


def loader(kind: str, counts: list[int]) -> Any:
    count = counts[dist.get_rank()]
    if kind == "stateful":
        return Stateful(count)
    return DataLoader({"sized": Listed, "streamed": Streamed}[kind](count), batch_size=1)


class Seeing(CausalLM):
    """Remembers which batches it saw, by loop, and what it predicted."""

    def __init__(self) -> None:
        super().__init__(tiny_model(MODEL))
        self.seen: dict[str, list[Any]] = {"train": [], "val": [], "test": [], "states": []}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen["train"].append(batch_idx)
        source = self.trainer.fit_loop._combined_loader.flattened[0]
        if hasattr(source, "state_dict"):
            self.seen["states"].append(source.state_dict()["given"])
        return super().training_step(batch, batch_idx)

    def _evaluate(self, name: str, batch: Any, batch_idx: int, dataloader_idx: int) -> None:
        batches = batch if isinstance(batch, list) else [batch]
        loss = sum(rank_loss(self.model, b[0]) for b in batches)
        self.seen[name].append((dataloader_idx, batch_idx, loss.item()))
        self.log(f"{name}_loss", loss, batch_size=1)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._evaluate("val", batch, batch_idx, dataloader_idx)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._evaluate("test", batch, batch_idx, dataloader_idx)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        if isinstance(batch, list):
            return batch[0].tolist(), self.model(input_ids=batch[1]).logits
        return self.model(input_ids=batch[0]).logits


def _trainer(ep_size: int, strategy: dict | None = None, **options: Any) -> pl.Trainer:
    return quiet_trainer(
        strategy=EPOverlapStrategy(expert_model_parallel_size=ep_size, **(strategy or {})),
        **{"use_distributed_sampler": False, **options},
    )


def train(
    kind: str, counts: list[int], val: tuple[str, list[int]] | None, strategy: dict, options: dict
) -> tuple[dict[str, list], list[str], bool]:
    """What each loop saw, the warnings, and whether the training loader was left as it was."""
    trainer = _trainer(dist.get_world_size(), strategy, **options)
    module, data = Seeing(), loader(kind, counts)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, data, *([loader(*val)] if val else []))
    ours = [str(w.message) for w in caught if "batches" in str(w.message) and "rank" in str(w.message)]
    return module.seen, ours, trainer.train_dataloader is data


def evaluate(fn: str, ep_size: int, kinds: list[tuple[str, list[int]]], options: dict, mode: str | None = None) -> list:
    """(loader, batch, loss) of every step of validate or test on this rank."""
    module = Seeing()
    loaders: Any = [loader(*kind) for kind in kinds]
    if mode is not None:
        loaders = CombinedLoader(loaders, mode)
    getattr(_trainer(ep_size, **options), fn)(module, loaders, verbose=False)
    return module.seen["val" if fn == "validate" else "test"]


def predict(ep_size: int, kind: str, counts: list[int], options: dict) -> list[Tensor]:
    return _trainer(ep_size, **options).predict(Seeing(), loader(kind, counts)) or []


def predict_sampled(ep_size: int, count: int, batch_size: int) -> list[tuple[list[int], Tensor]]:
    """Lightning's own sampler deals the samples out."""
    data = DataLoader(Common(count), batch_size=batch_size)
    return _trainer(ep_size, use_distributed_sampler=True).predict(Seeing(), data) or []


class Common(Dataset):
    """The same samples on every rank."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> tuple[int, Tensor]:
        return i, tokens(i, 0, 0, batch=1)[0]


def plain_logits(ids: Tensor) -> Tensor:
    """The model in one process, on `[B, S]`."""
    with torch.no_grad():
        return _plain()(input_ids=ids).logits


def plain_loss(ids: Tensor) -> float:
    with torch.no_grad():
        return rank_loss(_plain(), ids).item()


def _plain() -> torch.nn.Module:
    global _model
    if _model is None:
        _model = tiny_model(MODEL)
    return _model


_model: torch.nn.Module | None = None
