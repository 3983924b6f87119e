"""Checkpoints that are interrupted, run out of space, are damaged, or are no checkpoints at all."""

from __future__ import annotations

import os
import pickle
import resource
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_ep import storage
from lightning_ep.checkpoint import consolidate_checkpoint, load_full_state_dict
from tests.checkpoint.runs import Scheduled, failure, train
from tests.distributed import run_distributed

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

SIZE = 1000


def write(target: Path, value: float, token: str | None = None) -> None:
    tensors = {"state_dict": {"a": torch.full((SIZE,), value), "b": torch.full((2, 2), value)}}
    storage.write(target, tensors, {"value": value}, token or storage.new_token())


def value_at(target: Path) -> float:
    """What was saved, after checking that all of it belongs together."""
    loaded = load_full_state_dict(target)
    if target.is_file():
        return loaded["a"][0].item()
    meta = storage.read_meta(target, storage.read_metadata(target))
    values = {meta["value"], *loaded["a"].tolist(), *loaded["b"].flatten().tolist()}
    assert len(values) == 1 and loaded["a"].shape == (SIZE,)
    return values.pop()


def write_killed_at(step: int, target: Path) -> bool:
    """Write in another process, which dies before its `step`-th change of the file system; whether it got that far."""
    pid = os.fork()
    if pid == 0:
        left = [step]

        def count(event: str, args: tuple) -> None:
            writes = event == "open" and isinstance(args[0], str | Path) and args[2] & (os.O_WRONLY | os.O_RDWR)
            if writes or event in ("os.rename", "os.remove", "os.rmdir", "os.mkdir"):
                left[0] -= 1
                if left[0] == 0:
                    os._exit(9)

        sys.addaudithook(count)
        try:
            write(target, 2.0)
        except BaseException:
            os._exit(1)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in (0, 9)
    return status == 9


def last_of(folder: Path) -> Path | None:
    """Lightning's rule for `ckpt_path="last"`."""
    found = [p for p in folder.iterdir() if p.suffix == ".ckpt" and p.stem.startswith("last")]
    return max(found, key=lambda p: p.stat().st_mtime, default=None)


@pytest.mark.parametrize("before", ["nothing", "checkpoint", "file", "link"])
def test_killed_at_any_moment(tmp_path: Path, before: str) -> None:
    step, seen = 0, set()
    while True:
        step += 1
        folder = tmp_path / str(step)
        folder.mkdir()
        target = folder / "last.ckpt"
        if before == "checkpoint":
            write(target, 1.0)
        elif before == "file":
            torch.save({"state_dict": {"a": torch.ones(SIZE)}}, target)
        elif before == "link":
            write(folder / "epoch=1.ckpt", 1.0)
            target.symlink_to("epoch=1.ckpt")
        killed = write_killed_at(step, target)
        last = last_of(folder)
        assert last is not None or before == "nothing"
        seen.add(value_at(last) if last is not None else None)
        if before == "link":
            assert value_at(folder / "epoch=1.ckpt") == 1.0
        if not killed:
            break
        write(target, 3.0)  # the next save of the same name clears up
        assert value_at(target) == 3.0
        assert [p.name for p in folder.iterdir() if p.name != "epoch=1.ckpt" and "-replaced" not in p.name] == [
            "last.ckpt"
        ]
        assert len(list(target.iterdir())) == 2
    assert step >= 8 and seen == {None if before == "nothing" else 1.0, 2.0}
    assert value_at(target) == 2.0


def _write_with_limit(target: Path, rank: int) -> str:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))  # as a full disk: write() fails
    try:
        return failure(write, target, 2.0, "0" * 32)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("rank", [0, 1])
def test_full_disk(tmp_path: Path, rank: int) -> None:
    target = tmp_path / "last.ckpt"
    write(target, 1.0)
    for said in run_distributed(_write_with_limit, 2, target, rank):
        assert f"RuntimeError: saving {target} failed, what was there before is unchanged (rank {rank}: " in said
        assert "File too large" in said
    assert value_at(target) == 1.0 and os.listdir(tmp_path) == ["last.ckpt"]


def _write_elsewhere(folder: Path) -> str:
    return failure(write, folder / str(dist.get_rank()) / "last.ckpt", 1.0, "0" * 32)


def test_directory_that_ranks_do_not_share(tmp_path: Path) -> None:
    for said in run_distributed(_write_elsewhere, 2, tmp_path):
        assert "__1_0.distcp is missing; checkpoints need a directory that all ranks share" in said
    assert not (tmp_path / "0/last.ckpt").exists()


def test_unfinished_saves_are_cleared(tmp_path: Path) -> None:
    """Those of the same name at once, others when they are old."""
    write(tmp_path / "a.ckpt", 1.0)
    same, other, old = (storage.unfinished(tmp_path / f"{n}.ckpt") for n in "abc")
    for path in (same, other, old):
        path.mkdir()
        (path / "__0_0.distcp").write_bytes(b"half")
    for path in (old, old / "__0_0.distcp"):
        os.utime(path, (1, 1))
    write(tmp_path / "a.ckpt", 2.0)
    assert sorted(tmp_path.iterdir()) == sorted([tmp_path / "a.ckpt", other])


def test_other_directories_are_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/thesis.txt").write_text("years of work")
    with pytest.raises(RuntimeError, match="is a directory, but no checkpoint"):
        write(tmp_path / "notes", 1.0)
    assert (tmp_path / "notes/thesis.txt").read_text() == "years of work"


# -- damaged and hostile ones


class Bomb:
    """Pickled, it is a program."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def data_file(checkpoint: Path) -> Path:
    return next(checkpoint.rglob("__0_0.distcp"))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def repickle(checkpoint: Path, change) -> None:
    path = checkpoint / storage.METADATA
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def damage(checkpoint: Path, kind: str, bomb: Path) -> str:
    """Damage a checkpoint; what the error must name."""
    if kind == "no metadata":
        (checkpoint / storage.METADATA).unlink()
        return f"{checkpoint} is not a sharded checkpoint: it has no .metadata"
    if kind == "truncated metadata":
        truncate(checkpoint / storage.METADATA)
        return f"{checkpoint}/.metadata is damaged"
    if kind == "code in metadata":
        (checkpoint / storage.METADATA).write_bytes(pickle.dumps(Bomb(bomb)))
        return (
            f"{checkpoint}/.metadata is damaged, or not the metadata of a checkpoint.*mkdir, which no checkpoint needs"
        )
    if kind == "code beside metadata":
        repickle(checkpoint, lambda m: setattr(m, "planner_data", Bomb(bomb)))
        return "mkdir, which no checkpoint needs"
    if kind == "no data":
        data_file(checkpoint).unlink()
        return f"{checkpoint} is incomplete: .*/__0_0.distcp is missing"
    if kind == "truncated data":
        path = data_file(checkpoint)
        truncate(path)
        return f"{path} is truncated"
    if kind == "overwritten data":
        path = data_file(checkpoint)
        path.write_bytes(b"x" * path.stat().st_size)
        return f"{checkpoint} cannot be read, its tensors are damaged"
    if kind == "no meta":
        next(checkpoint.rglob("meta.pt")).unlink()
        return "no checkpoint at .*meta.pt"
    if kind == "code in meta":
        path = next(checkpoint.rglob("meta.pt"))
        torch.save({"callbacks": Bomb(bomb)}, path)
        return f"{path} cannot be loaded"
    if kind == "outside":
        shutil.copy(data_file(checkpoint), checkpoint.parent / "secret")
        repickle(checkpoint, lambda m: [setattr(i, "relative_path", "../secret") for i in m.storage_data.values()])
        return "names a file outside of the checkpoint: ../secret"
    if kind == "huge":
        repickle(
            checkpoint, lambda m: [setattr(t, "size", torch.Size([1 << 50])) for t in m.state_dict_metadata.values()]
        )
        return "needs 4503599627370496 bytes, its files hold"
    raise AssertionError(kind)


KINDS = [
    "no metadata", "truncated metadata", "code in metadata", "code beside metadata", "no data", "truncated data",
    "overwritten data", "no meta", "code in meta", "outside", "huge",
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_checkpoints_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    write(tmp_path / "a.ckpt", 1.0)
    expected = damage(tmp_path / "a.ckpt", kind, tmp_path / "bomb")
    with pytest.raises((ValueError, FileNotFoundError), match=expected):
        consolidate_checkpoint(tmp_path / "a.ckpt", tmp_path / "whole.pt")
    assert not (tmp_path / "bomb").exists() and not (tmp_path / "whole.pt").exists()


def _loads(paths: list[Path]) -> list[str]:
    return [failure(train, Scheduled, None, 2, 2, path, {}) for path in paths]


def test_strategy_refuses_them_on_all_ranks(tmp_path: Path) -> None:
    """In time, by name, without executing anything."""
    good = tmp_path / "epoch=0.ckpt"
    run_distributed(train, 2, Scheduled, tmp_path, 2, 1, None, {})
    expected = {}
    for kind in ("no metadata", "code in metadata", "truncated data", "overwritten data", "code in meta"):
        copy = tmp_path / kind
        shutil.copytree(good, copy)
        expected[copy] = damage(copy, kind, tmp_path / "bomb")
    file = tmp_path / "code.ckpt"
    torch.save({"state_dict": {}, "callbacks": Bomb(tmp_path / "bomb")}, file)
    expected[file] = f"{file} cannot be loaded"
    file = tmp_path / "list.ckpt"
    torch.save([1, 2], file)
    expected[file] = f"{file} is not a checkpoint: it holds a list"
    file = tmp_path / "weights.ckpt"
    torch.save({"model.a": torch.ones(1)}, file)
    expected[file] = f"{file} is not a checkpoint of Lightning: it has no state_dict"
    expected[tmp_path / "nowhere"] = f"no checkpoint at {tmp_path}/nowhere"
    for said in run_distributed(_loads, 2, list(expected)):
        for (path, pattern), text in zip(expected.items(), said, strict=True):
            with pytest.raises(ValueError, match=pattern):
                raise ValueError(text)
            assert path.name in text
    assert not (tmp_path / "bomb").exists()
