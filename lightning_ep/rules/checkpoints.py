"""Rules of checkpoints: what the sharded storage cannot write to."""

from __future__ import annotations

from lightning_ep.rule import Rule
from lightning_ep.storage import is_remote

CHECKPOINTS = (
    Rule(
        "checkpoint-dir-remote",
        "error",
        ("checkpoint_dir",),
        lambda f: f.checkpoint_dir is not None and is_remote(f.checkpoint_dir),
        "training runs up to its first checkpoint and fails there",
        "all ranks write one sharded checkpoint, put in place by a rename, which object stores do not have",
        "set it to a directory on a file system that all ranks share, and copy finished checkpoints from there; or "
        "Trainer(enable_checkpointing=False)",
        "lightning_ep",
    ),
    Rule(
        "checkpoint-io",
        "error",
        ("checkpoint_io",),
        lambda f: f.checkpoint_io is not None,
        "a plugin that is never called",
        "every rank writes its own experts with torch.distributed.checkpoint, not through Lightning's CheckpointIO",
        "take the plugin out; lightning_ep.consolidate_checkpoint makes one file of a sharded checkpoint",
        "lightning_ep",
    ),
)
