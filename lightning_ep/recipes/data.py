"""Data modules: a folder of text, and random tokens for benchmarks."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

# One file in this many is held out.
HELD_OUT = 20
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}


class Windows(Dataset):
    """A stream of tokens `[N]` cut into windows `[S]` of int64; what is left over at the end is not used."""

    def __init__(self, stream: Tensor, seq_length: int) -> None:
        self.windows = stream[: len(stream) // seq_length * seq_length].view(-1, seq_length)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> Tensor:
        return self.windows[index].long()


class TextFolder(LightningDataModule):
    """Text files as one stream of tokens: bytes, or a tokenizer's.

    Whole files are held out for validation and test, one in 20. Files are joined by a zero byte, or by the tokenizer's
    end-of-text token.

    Args:
        folder: searched with its subfolders; the sources of Python's standard library by default.
        pattern: which files in it are text.
        seq_length: tokens of a training sequence (S).
        micro_batch_size: sequences a rank sees at once (B).
        held_out_sequences: how many held-out sequences to validate on, evenly spread over the held-out text.
        tokenizer: name or folder of a Hugging Face tokenizer; None reads bytes, 256 token ids.

    Raises:
        ValueError: too little text for one batch in either part.
    """

    def __init__(
        self,
        folder: str | None = None,
        pattern: str = "**/*",
        seq_length: int = 256,
        micro_batch_size: int = 8,
        held_out_sequences: int = 128,
        tokenizer: str | None = None,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.bytes_per_token = 1.0
        self.train: Windows | None = None
        self.held_out: Windows | None = None

    def setup(self, stage: str | None = None) -> None:
        if self.train is not None:
            return
        hp = self.hparams
        files = list(text_files(hp.folder, hp.pattern))
        kept = [path for i, path in enumerate(files) if i % HELD_OUT]
        held_out = files[::HELD_OUT]
        self.train = Windows(self._stream(kept), hp.seq_length)
        windows = Windows(self._stream(held_out), hp.seq_length)
        windows.windows = windows.windows[:: max(1, len(windows) // hp.held_out_sequences)][: hp.held_out_sequences]
        self.held_out = windows
        for name, part in (("training", self.train), ("held-out", self.held_out)):
            if len(part) < hp.micro_batch_size:
                raise ValueError(
                    f"folder={hp.folder!r} with pattern={hp.pattern!r} has {len(files)} files of text, which give "
                    f"{len(part)} {name} sequences of seq_length={hp.seq_length}: fewer than one batch of "
                    f"micro_batch_size={hp.micro_batch_size}; give more files or lower the two"
                )
        rank_zero_info(
            f"text: {len(kept)} files, {self.train.windows.numel():,} tokens to train on; {len(held_out)} files held out"
        )

    def _stream(self, files: list[Path]) -> Tensor:
        if self.hparams.tokenizer is None:
            text = bytearray(b"\0".join(path.read_bytes() for path in files))
            return torch.frombuffer(text, dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(self.hparams.tokenizer)
        texts = [path.read_text(encoding="utf-8", errors="replace") for path in files]
        end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        ids = [token for text in texts for token in (*tokenizer(text, add_special_tokens=False)["input_ids"], *end)]
        self.bytes_per_token = sum(len(text.encode()) for text in texts) / max(1, len(ids))
        return torch.tensor(ids, dtype=torch.int32)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.train, batch_size=self.hparams.micro_batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(self.held_out, batch_size=self.hparams.micro_batch_size)

    test_dataloader = val_dataloader
    predict_dataloader = val_dataloader


def text_files(folder: str | None, pattern: str) -> Iterator[Path]:
    """Files that hold text (UTF-8, no zero byte), in an order that does not depend on the machine."""
    root = Path(folder or sysconfig.get_paths()["stdlib"])
    if not root.is_dir():
        raise ValueError(f"folder={folder!r} is no folder")
    for path in sorted(root.glob(pattern if folder else "**/*.py")):
        inside = path.relative_to(root).parts[:-1]
        if folder is None and _NOT_LIBRARY.intersection(inside):
            continue
        if path.is_file() and path.stat().st_size and _is_text(path):
            yield path


def _is_text(path: Path) -> bool:
    try:
        return b"\0" not in path.read_bytes().decode().encode()
    except (UnicodeDecodeError, OSError):
        return False


class RandomTokens(LightningDataModule):
    """Random token ids, for benchmarks: nothing to download, nothing to wait for. The same index is the same sequence.

    Args:
        vocab_size: ids lie in [0, vocab_size).
        seq_length: tokens of a sequence (S).
        micro_batch_size: sequences a rank sees at once (B).
        num_sequences: length of the data set over all ranks.
    """

    def __init__(
        self, vocab_size: int, seq_length: int = 4096, micro_batch_size: int = 1, num_sequences: int = 1_000_000
    ) -> None:
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self) -> DataLoader:
        hp = self.hparams
        sequences = _RandomSequences(hp.vocab_size, hp.seq_length, hp.num_sequences)
        return DataLoader(sequences, batch_size=hp.micro_batch_size)


class _RandomSequences(Dataset):
    def __init__(self, vocab_size: int, seq_length: int, num_sequences: int) -> None:
        self.vocab_size, self.seq_length, self.num_sequences = vocab_size, seq_length, num_sequences

    def __len__(self) -> int:
        return self.num_sequences

    def __getitem__(self, index: int) -> Tensor:
        generator = torch.Generator().manual_seed(index)
        return torch.randint(self.vocab_size, (self.seq_length,), generator=generator)
