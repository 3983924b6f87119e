"""Sharded checkpoints on disk: written whole or not at all, read without executing anything.

    last.ckpt/
      .metadata       read by torch.distributed.checkpoint (DCP); says which files below hold which tensor
      3f9c.../        one save: __0_0.distcp, __1_0.distcp, ... one a rank, and meta.pt with everything else

A save is written to a hidden sibling `.unfinished-*`. A new checkpoint is renamed into place; an existing one gets the
new folder beside the old and then another `.metadata`. Either way one rename decides, so a process may die at any
moment: what was there before stays whole, and unfinished siblings are never taken for checkpoints.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import math
import os
import pickle
import re
import shutil
import time
import uuid
from collections.abc import Callable
from pathlib import Path, PurePath
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

METADATA = ".metadata"
META = "meta.pt"
_UNFINISHED = ".unfinished"
# Nothing was written to it for so long: whoever wrote it is dead.
_STALE_SECONDS = 3600

Key = tuple[str | int, ...]


def is_sharded(path: Path) -> bool:
    """Whether `path` is a sharded checkpoint (or pretends to be one)."""
    return (path / METADATA).is_file()


def is_remote(path: str | os.PathLike) -> bool:
    """Whether `path` is a URL (s3://, gs://, file://, ...), which this storage neither writes nor reads."""
    return re.match(r"[A-Za-z][\w+.-]+:/", os.fspath(path)) is not None


def local(path: str | os.PathLike) -> Path:
    """`path`, unless it is a URL: raises ValueError."""
    if is_remote(path):
        raise ValueError(
            f"checkpoint path {os.fspath(path)!r} is remote; use a directory on a file system that all ranks share"
        )
    return Path(path)


# -- writing


def new_token() -> str:
    """Name of one save; all ranks use the same."""
    return uuid.uuid4().hex


def write(target: Path, tensors: dict[str, Any], meta: dict[str, Any], token: str) -> None:
    """Write a checkpoint to `target`, replacing the one that is there. Collective over the world.

    Args:
        target: the directory to be, on a file system that all ranks share.
        tensors: nested dicts of tensors and DTensors, the same keys on every rank for what is shared.
        meta: the rest; rank 0's is saved.
        token: `new_token()` of rank 0.

    Raises:
        RuntimeError: on all ranks when any rank failed; what was at `target` before is untouched.
    """
    writer = _Writer(target, token, meta)
    try:
        dcp.save(tensors, storage_writer=writer, planner=DefaultSavePlanner())
    except CheckpointException as failed:  # a BaseException: `except Exception` of others would miss it
        causes = "; ".join(f"rank {rank}: {type(e).__name__}: {e}" for rank, (e, _) in failed.failures.items())
        raise RuntimeError(f"saving {target} failed, what was there before is unchanged ({causes})") from failed
    finally:
        if writer.is_coordinator:
            shutil.rmtree(writer.path, ignore_errors=True)


class _Writer(FileSystemWriter):
    """DCP's writer into a hidden sibling of `target`; its last step, on rank 0 alone, puts the whole in place."""

    def __init__(self, target: Path, token: str, meta: dict[str, Any]) -> None:
        super().__init__(unfinished(target, token))
        self.target, self.token, self.meta = target, token, meta
        self.is_coordinator = False

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        super().set_up_storage_writer(is_coordinator, *args, **kwargs)
        self.is_coordinator = is_coordinator
        if is_coordinator:
            _refuse_foreign(self.target)
            _remove_unfinished(self.target, spare=self.path)  # other ranks may have begun to write

    def prepare_local_plan(self, plan: Any) -> Any:
        plan = super().prepare_local_plan(plan)
        (self.path / self.token).mkdir(exist_ok=True)
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        def in_folder(plan: Any) -> Any:
            prefix = dataclasses.replace(plan.storage_data, prefix=f"{self.token}/{plan.storage_data.prefix}")
            return dataclasses.replace(plan, storage_data=prefix)

        return [in_folder(plan) for plan in super().prepare_global_plan(plans)]

    def storage_meta(self) -> StorageMeta:
        return StorageMeta(checkpoint_id=str(self.target), save_id=self.token)

    def finish(self, metadata: Metadata, results: list[Any]) -> None:
        with (self.path / self.token / META).open("wb") as file:
            torch.save(self.meta, file)
            file.flush()
            os.fsync(file.fileno())
        super().finish(metadata, results)
        _verify(self.path, metadata, "; checkpoints need a directory that all ranks share")
        _sync_directory(self.path / self.token)
        _sync_directory(self.path)
        _put_in_place(self.path, self.token, self.target)


def unfinished(target: Path, token: str | None = None) -> Path:
    """A sibling of `target` to write to until it is complete; the next save of `target` clears up what is left."""
    # Not the target's name: Lightning looks for checkpoints by patterns in names.
    return target.parent / f"{_UNFINISHED}-{_digest(target)}-{token or new_token()}"


def _digest(target: Path) -> str:
    return hashlib.sha256(target.name.encode()).hexdigest()[:12]


def _refuse_foreign(target: Path) -> None:
    if target.is_dir() and not target.is_symlink() and not is_sharded(target) and any(target.iterdir()):
        raise FileExistsError(f"{target} is a directory, but no checkpoint; remove it or save somewhere else")


def _put_in_place(staged: Path, token: str, target: Path) -> None:
    if is_sharded(target) and not target.is_symlink():
        os.rename(staged / token, target / token)
        _sync_directory(target)
        os.replace(staged / METADATA, target / METADATA)  # from here on the new one counts
        _sync_directory(target)
        for entry in target.iterdir():
            if entry.name != token and re.fullmatch("[0-9a-f]{32}", entry.name):
                shutil.rmtree(entry, ignore_errors=True)
        return
    aside = target.with_stem(f"{target.stem}-replaced")  # by its name still a "last", should we die right here
    replaces = target.is_symlink() or target.is_file()  # a single-file checkpoint, or a link to another checkpoint
    if replaces:
        os.replace(target, aside)
    os.rename(staged, target)
    _sync_directory(target.parent)
    if replaces:
        aside.unlink()


def _remove_unfinished(target: Path, spare: Path) -> None:
    """What killed saves of this target left behind, and anybody's that nobody has written to for an hour."""
    for path in target.parent.glob(f"{_UNFINISHED}-*"):
        same = path.name.startswith(f"{_UNFINISHED}-{_digest(target)}-")
        if path != spare and (same or _age_seconds(path) > _STALE_SECONDS):
            _remove_quietly(path)


def _remove_quietly(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _age_seconds(directory: Path) -> float:
    try:
        return time.time() - max(p.stat().st_mtime for p in [directory, *directory.rglob("*")])
    except OSError:  # going away under our hands
        return 0.0


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as e:
        if e.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems do not sync directories
            raise
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a checkpoint, file or directory; interrupted halfway, it is gone too."""
    if path.is_dir() and not path.is_symlink():
        doomed = unfinished(path)
        os.rename(path, doomed)
        shutil.rmtree(doomed, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


# -- reading


def read_metadata(directory: Path) -> Metadata:
    """What the checkpoint holds, after checking that its files are there and as long as they should be.

    Raises ValueError naming the file that is missing, truncated, foreign or not what it pretends to be.
    """
    path = directory / METADATA
    if not path.is_file():
        interrupted = f" (an interrupted save of {directory.name})" if directory.name.startswith(_UNFINISHED) else ""
        raise ValueError(f"{directory} is not a sharded checkpoint: it has no {METADATA}{interrupted}")
    try:
        with path.open("rb") as file:
            metadata = _MetadataUnpickler(file).load()
        assert isinstance(metadata, Metadata) and isinstance(metadata.state_dict_metadata, dict)
        assert metadata.planner_data is None or isinstance(metadata.planner_data, dict)
    except Exception as e:
        raise ValueError(f"{path} is damaged, or not the metadata of a checkpoint: {type(e).__name__}: {e}") from e
    try:
        _verify(directory, metadata, "")
    except ValueError:
        raise
    except Exception as e:
        raise ValueError(f"{path} is damaged: {type(e).__name__}: {e}") from e
    return metadata


_ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "collections": {"OrderedDict"},
}


class _MetadataUnpickler(pickle.Unpickler):
    """DCP reads its metadata with plain pickle, which executes what a file says. Here only DCP's own plain records."""

    def find_class(self, module: str, name: str) -> Any:
        if name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if module.startswith("pathlib") and name in ("PosixPath", "WindowsPath"):
            return PurePath
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no checkpoint needs")


def _verify(directory: Path, metadata: Metadata, hint: str) -> None:
    """Every file that the metadata names is there, long enough, and holds what the sizes of the tensors say.

    So the memory that a load allocates is bounded by the size of the files.
    """
    root = os.path.abspath(directory)
    sizes: dict[str, int] = {}
    for info in metadata.storage_data.values():
        if info.relative_path not in sizes:
            path = os.path.abspath(os.path.join(root, info.relative_path))
            if os.path.commonpath([root, path]) != root:
                raise ValueError(f"{directory / METADATA} names a file outside of the checkpoint: {info.relative_path}")
            if not os.path.isfile(path):
                raise ValueError(f"{directory} is incomplete: {info.relative_path} is missing{hint}")
            sizes[info.relative_path] = os.path.getsize(path)
        if info.offset < 0 or info.length < 0 or info.offset + info.length > sizes[info.relative_path]:
            raise ValueError(
                f"{directory / info.relative_path} is truncated: {sizes[info.relative_path]} bytes, at least "
                f"{info.offset + info.length} expected{hint}"
            )
        if getattr(info, "transform_descriptors", None):
            raise ValueError(f"{directory / info.relative_path} is stored with {info.transform_descriptors}")
    lengths: dict[str, int] = {}
    for index, info in metadata.storage_data.items():
        lengths[index.fqn] = lengths.get(index.fqn, 0) + info.length
    for key, tensor in metadata.state_dict_metadata.items():
        if isinstance(tensor, TensorStorageMetadata):
            needed = math.prod(tensor.size) * tensor.properties.dtype.itemsize
            if needed > lengths.get(key, 0):
                raise ValueError(f"{directory}: {key} needs {needed} bytes, its files hold {lengths.get(key, 0)}")


def read_meta(directory: Path, metadata: Metadata) -> dict[str, Any]:
    """What is not a tensor of the model or an optimizer. Lightning's own sharded checkpoints keep it in the same way."""
    token = str(getattr(metadata.storage_meta, "save_id", None))
    inside = directory / token / META
    return load_file(inside if re.fullmatch("[0-9a-f]{32}", token) and inside.is_file() else directory / META)


def read_tensors(
    directory: Path,
    metadata: Metadata,
    wants: Callable[[Key], bool],
    empty: Callable[[Key, torch.Size, torch.dtype], Tensor],
) -> dict[str, Any]:
    """Read tensors into nested dicts. Not collective: every rank reads what it needs.

    Args:
        wants: whether to read the tensor at a path into the nested dicts.
        empty: where to read a tensor of a (global) size into: a tensor, or a DTensor for a share of it.
    """
    paths = metadata.planner_data or {}
    keys = {name: tuple(paths.get(name, (name,))) for name in metadata.state_dict_metadata}
    into: dict[str, Tensor] = {}
    for name, entry in metadata.state_dict_metadata.items():
        if not wants(keys[name]):
            continue
        if not isinstance(entry, TensorStorageMetadata):
            raise ValueError(f"{directory}: {name} is a pickled object, and loading never executes code from a file")
        into[name] = empty(keys[name], entry.size, entry.properties.dtype)
    if into:
        _read_into(directory, metadata, into)
    nested: dict[str, Any] = {}
    for name, tensor in into.items():
        level = nested
        for part in keys[name][:-1]:
            level = level.setdefault(part, {})
        level[keys[name][-1]] = tensor
    return nested


def _read_into(directory: Path, metadata: Metadata, wanted: dict[str, Tensor]) -> None:
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        _load_state_dict(wanted, storage_reader=_Reader(directory, metadata), planner=planner, no_dist=True)
    except (Exception, CheckpointException) as e:
        causes = [c for c, _ in e.failures.values()] if isinstance(e, CheckpointException) else [e]
        raise ValueError(f"{directory} cannot be read, its tensors are damaged: {causes}") from e


class _Reader(FileSystemReader):
    def __init__(self, directory: Path, metadata: Metadata) -> None:
        super().__init__(directory)
        self._metadata = metadata

    def read_metadata(self) -> Metadata:
        return self._metadata


def load_file(path: Path, mmap: bool = False) -> dict[str, Any]:
    """Load a file of `torch.save` without executing code from it; with `mmap` tensors stay on disk until they are used.

    Raises ValueError naming the file, and what in it is not allowed.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint at {path}")
    try:
        with torch.serialization.safe_globals(safe_globals()):
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap and _is_zip(path))
    except Exception as e:
        raise ValueError(
            f"{path} cannot be loaded: it is damaged, or holds objects whose loading would execute code "
            f"(torch.serialization.add_safe_globals allows classes that you trust): {e}"
        ) from e
    if not isinstance(loaded, dict):
        raise ValueError(f"{path} is not a checkpoint: it holds a {type(loaded).__name__}")
    return loaded


def _is_zip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"


def safe_globals() -> list[Any]:
    """Numpy's arrays and numbers, which callbacks and loaders keep in their states."""
    import numpy as np

    kinds = {type(np.dtype(code)) for code in np.typecodes["All"]}
    return [np.ndarray, np.dtype, np.empty(0).__reduce__()[0], np.float64(0).__reduce__()[0], *kinds]


def write_file(value: dict[str, Any], path: Path) -> None:
    """`torch.save` to a file that appears, or is replaced, at once."""
    staged = unfinished(path)
    try:
        with staged.open("wb") as file:
            torch.save(value, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(staged, path)
    finally:
        staged.unlink(missing_ok=True)
