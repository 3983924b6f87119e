"""Stands in for Transformer Engine 2.11 and later on a machine without GPUs: the same names, signatures and demands.

What the real functions insist on is asserted here: layouts, operands quantized the way that a layout reads them, rows
in multiples, one output or one an expert.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor


class MMParams(NamedTuple):
    use_split_accumulator: bool = True


_SPLIT = MMParams()


@dataclass
class Recipe:
    """Like `transformer_engine.common.recipe.Recipe`; equal recipes have no hash there either."""

    kind: str
    fp8_gemm_wgrad: MMParams = _SPLIT

    def float8_current_scaling(self) -> bool:
        return self.kind == "current"

    def float8_block_scaling(self) -> bool:
        return self.kind == "block"

    def mxfp8(self) -> bool:
        return self.kind == "mxfp8"


@dataclass
class Quantized:
    """Rounded to FP8, and readable along its rows, its columns, or both."""

    data: Tensor
    rowwise: bool
    columnwise: bool
    multiple: int


@dataclass
class Quantizer:
    recipe: Recipe
    dtype: torch.dtype
    internal: bool = False
    rowwise: bool = True
    columnwise: bool = True

    def set_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        self.rowwise = self.rowwise if rowwise is None else rowwise
        self.columnwise = self.columnwise if columnwise is None else columnwise

    def quantize(self, tensor: Tensor) -> Quantized:
        assert self.internal and (self.rowwise or not self.recipe.float8_current_scaling())
        scale = torch.finfo(self.dtype).max / tensor.abs().max().clamp(min=1e-12).float()
        data = (tensor.float() * scale).to(self.dtype).float() / scale
        return Quantized(data, self.rowwise, self.columnwise, 32 if self.recipe.mxfp8() else 16)


class RecipeState:
    def __init__(self, recipe: Recipe, mode: str, num_quantizers: int) -> None:
        self.recipe, self.mode, self.num_quantizers = recipe, mode, num_quantizers

    @staticmethod
    def create(recipe: Recipe, *, mode: str, num_quantizers: int = 1, device: Any = None) -> RecipeState:
        return RecipeState(recipe, mode, num_quantizers)

    def make_quantizers(self) -> list[Quantizer]:
        assert self.num_quantizers % {"forward": 3, "backward": 2}[self.mode] == 0
        dtype = torch.float8_e4m3fn if self.mode == "forward" else torch.float8_e5m2
        return [Quantizer(self.recipe, dtype) for _ in range(self.num_quantizers)]


class FP8GlobalStateManager:
    recipe: Recipe | None = None

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return cls.recipe is not None

    @classmethod
    def get_fp8_recipe(cls) -> Recipe:
        assert cls.recipe is not None
        return cls.recipe


@contextmanager
def autocast(recipe: Recipe | None) -> Iterator[None]:
    FP8GlobalStateManager.recipe = recipe
    try:
        yield
    finally:
        FP8GlobalStateManager.recipe = None


def split_quantize(tensor: Tensor, split_sections: list[int], quantizer_list: list[Quantizer]) -> list[Quantized]:
    assert len(split_sections) == len(quantizer_list)
    parts = zip(tensor.split(split_sections), quantizer_list, strict=True)
    return [
        quantizer.quantize(part) if len(part) else Quantized(part.float(), quantizer.rowwise, quantizer.columnwise, 1)
        for part, quantizer in parts
    ]


calls: list[str] = []  # layouts, with a "+" where the product is accumulated


def general_grouped_gemm(
    A: list[Any],
    B: list[Any],
    out: list[Tensor],
    quantization_params: list[Any],
    out_dtype: torch.dtype,
    layout: str = "TN",
    m_splits: list[int] | None = None,
    gelu: bool = False,
    grad: bool = False,
    accumulate: bool = False,
    bias: list[Tensor] | None = None,
    use_bias: bool = False,
    use_split_accumulator: bool = False,
    D_dtype: Any = None,
    single_output: bool = False,
) -> None:
    """cuBLAS's order: `op(B) op(A)`, where A "T" is [n, k] and B "T" is [k, m]."""
    calls.append(layout + "+" * accumulate)
    assert layout in ("TN", "NN", "NT") and len(A) == len(B) == len(quantization_params)
    assert all(o.is_contiguous() and o.dtype == out_dtype for o in out)
    if single_output:
        assert m_splits is not None and len(out) == 1 and not accumulate
        outputs = list(out[0].split(m_splits))
    else:
        outputs = out
    for a, b, o in zip(A, B, outputs, strict=True):
        a, b = _operand(a, layout[0] == "T"), _operand(b, layout[1] == "N")
        if not a.numel() or not b.numel():
            o.zero_() if not accumulate else None
            continue
        product = (b.t() if layout[1] == "T" else b) @ (a.t() if layout[0] == "T" else a)
        o.add_(product) if accumulate else o.copy_(product)


def _operand(x: Tensor | Quantized, along_rows: bool) -> Tensor:
    if isinstance(x, Tensor):
        assert x.is_contiguous()
        return x.float()
    assert x.rowwise if along_rows else x.columnwise, "quantized for another layout"
    assert x.data.shape[0] % x.multiple == 0 and x.data.shape[1] % x.multiple == 0, x.data.shape
    return x.data


def install() -> None:
    """From now on this process imports the fake."""
    tree = {
        "transformer_engine": {},
        "transformer_engine.pytorch": {},
        "transformer_engine.pytorch.cpp_extensions": {"general_grouped_gemm": general_grouped_gemm},
        "transformer_engine.pytorch.quantization": {
            "FP8GlobalStateManager": FP8GlobalStateManager,
            "RecipeState": RecipeState,
        },
        "transformer_engine_torch": {"split_quantize": split_quantize},
    }
    for name, contents in tree.items():
        module = ModuleType(name)
        vars(module).update(contents)
        sys.modules[name] = module


def uninstall() -> None:
    for name in [n for n in sys.modules if n.split(".")[0] in ("transformer_engine", "transformer_engine_torch")]:
        del sys.modules[name]
