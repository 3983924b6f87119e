"""Which kernel is what: rules as data, first match wins, the user's own rules before ours.

A file of user rules is a JSON list: `[{"category": "communication", "name": "my_ring_.*"}, {"category":
"communication", "stream": [20, 24]}]`. `name` is a regular expression searched in the kernel's name, `stream` a list of
stream ids; a rule with both needs both. Categories: communication, gemm, attention, compute, memory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lightning_ep.profiling.kernels import Category

_MAX_RULES_BYTES = 1 << 20


@dataclass(frozen=True)
class Rule:
    """Kernels whose name has a match of `name` and whose stream is one of `streams` (None: any) are `category`."""

    category: Category
    name: str | None = None
    streams: frozenset[int] | None = None


def _rules(category: Category, *patterns: str) -> list[Rule]:
    return [Rule(category, pattern) for pattern in patterns]


DEFAULT_RULES: tuple[Rule, ...] = (
    *_rules(Category.MEMORY, r"^(hip)?Mem(cpy|set)", r"^\[CUDA mem(cpy|set)"),
    *_rules(
        Category.COMMUNICATION,
        r"^nccl|nccl(Dev)?Kernel|^rccl",
        r"deep_ep::",  # DeepEP, v1 and v2
        r"hybrid_ep::|HybridEP|\b(ag_nvl_kernel|rdma_sync_kernel|device_sync_kernel)\b",  # HybridEP
        r"nvshmem",
        r"symm(etric)?_?mem|multimem_|(one|two)_shot_all_reduce|all_to_all_vdev|\b(barrier|put_signal|wait_signal)_kernel",
        r"emulated|spin_kernel",  # the emulated fabric; torch.cuda._sleep
    ),
    *_rules(Category.ATTENTION, r"flash|fmha|attention|sdpa|(^|[^a-z])mha([^a-z]|$)"),
    *_rules(
        Category.GEMM,
        r"gemm|gemv|nvjet|cublas|cutlass|wgmma|xmma|splitK|grouped_mm|(^|[^a-z])(b?mm|matmul|addmm)([^a-z]|$)",
    ),
    *_rules(
        Category.COMPUTE,
        r"at::|at_cuda_detail|c10::|cub::|thrust::|cudnn|transformer_engine|apex|multi_tensor|^triton_|Cat(Array|Arr)",
        r"elementwise|reduce|softmax|norm|index|scatter|gather|sort|topk|cumsum|scan|histogram|bincount",
        r"^_.*(rows|slots|grads|places)$",  # lightning_ep's own Triton kernels
        r"permute|transpose|embedding|dropout|rope|rotary|silu|gelu|swiglu|cast|copy|fill|adam|fused",
    ),
)


def categorize(
    names: Sequence[str], name_N: NDArray[np.int32], stream_N: NDArray[np.int64], rules: Iterable[Rule] = DEFAULT_RULES
) -> NDArray[np.int8]:
    """Category of each row, `[N]` int8.

    Args:
        names: the distinct kernel names.
        name_N: index into `names` of each row.
        stream_N: stream id of each row.
        rules: tried in order; a row that none matches is `Category.UNKNOWN`.
    """
    category_N = np.full(len(name_N), int(Category.UNKNOWN), np.int8)
    undecided_N = np.ones(len(name_N), bool)
    for rule in rules:
        hit_N = undecided_N.copy()
        if rule.name is not None:
            pattern = re.compile(rule.name, re.IGNORECASE)
            hit_N &= np.array([bool(pattern.search(name)) for name in names], bool)[name_N]
        if rule.streams is not None:
            hit_N &= np.isin(stream_N, list(rule.streams))
        category_N[hit_N] = int(rule.category)
        undecided_N &= ~hit_N
    return category_N


def load_rules(path: str | Path) -> tuple[Rule, ...]:
    """User rules from a JSON file, followed by the defaults.

    Raises:
        ValueError: no such list, an unknown category, or a bad regular expression; file and rule are named.
    """
    path = Path(path)
    try:
        if path.stat().st_size > _MAX_RULES_BYTES:
            raise ValueError(f"{path} is larger than {_MAX_RULES_BYTES} bytes: that is no list of rules")
        rows = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"rules file {path}: {error}") from error
    if not isinstance(rows, list):
        raise ValueError(f'rules file {path}: expected a list of {{"category": ..., "name": ...}}')
    return tuple(_parse(row, f"rules file {path}, rule {i}") for i, row in enumerate(rows)) + DEFAULT_RULES


def _parse(row: object, where: str) -> Rule:
    if not isinstance(row, dict) or not row.keys() <= {"category", "name", "stream"}:
        raise ValueError(f"{where}: expected an object with category, name, stream, got {row!r}")
    category, name, streams = row.get("category"), row.get("name"), row.get("stream")
    known = [c.name.lower() for c in Category if c is not Category.UNKNOWN]
    if category not in known:
        raise ValueError(f"{where}: category={category!r}; use one of {', '.join(known)}")
    if name is None and streams is None:
        raise ValueError(f"{where}: needs name or stream, else it would match every kernel")
    if name is not None:
        try:
            re.compile(name)
        except (re.error, TypeError) as error:
            raise ValueError(f"{where}: name={name!r} is no regular expression: {error}") from error
    streams = [streams] if isinstance(streams, int) else streams
    if streams is not None and not (isinstance(streams, list) and all(isinstance(s, int) for s in streams)):
        raise ValueError(f"{where}: stream={streams!r}; use a stream id or a list of them")
    return Rule(Category[category.upper()], name, None if streams is None else frozenset(streams))
