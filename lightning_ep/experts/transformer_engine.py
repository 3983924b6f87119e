"""Transformer Engine's grouped GEMMs on the experts' own stacked parameters.

TE's modules hold one parameter an expert, which would be a second set of weights beside the checkpoint's, and delay
weight gradients by a queue of their own, which assigns over gradients instead of adding to them. So what is used is the
function under `GroupedLinear`, given slices of the stacked weight and of its gradient: checkpoints, optimizers, delayed
weight gradients and their accumulation are those of the other experts.

FP8 follows the `autocast` context around the forward (Lightning's `TransformerEnginePrecision` opens one), with recipes
that keep no state between steps. Operands are quantized where they are used.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_ep.experts.gemm import Split

# Operands by their place in TE's lists of quantizers: (mode, place, quantizers an expert).
_INPUT, _WEIGHT, _GRAD = ("forward", 0, 3), ("forward", 1, 3), ("backward", 0, 2)


class TransformerEngineGemm:
    """The backend of `experts_implementation="transformer_engine"`: half precision, on a GPU.

    Args:
        recipe: of FP8, from `transformer_engine.common.recipe`; None computes in the rows' dtype.

    Raises:
        ValueError: for a recipe that keeps histories (DelayedScaling) or is not of FP8.
    """

    def __init__(self, recipe: Any = None) -> None:
        if recipe is not None and not (
            recipe.float8_current_scaling() or recipe.float8_block_scaling() or recipe.mxfp8()
        ):
            raise ValueError(
                f"experts_implementation='transformer_engine' does not support the recipe {type(recipe).__name__}; use "
                "Float8CurrentScaling, Float8BlockScaling or MXFP8BlockScaling, for example "
                "TransformerEnginePrecision(weights_dtype=torch.bfloat16, recipe=Float8CurrentScaling())"
            )
        self.recipe = recipe
        # FP8 tensor cores take blocks of rows (get_align_size_for_quantization in TE).
        self.row_multiple = 1 if recipe is None else 32 if recipe.mxfp8() else 16

    @classmethod
    def in_context(cls) -> TransformerEngineGemm:
        """In the precision of the `autocast` context around the call."""
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager as State

        return cls(State.get_fp8_recipe() if State.is_fp8_enabled() else None)

    def product(self, x_Pi: Tensor, weight: Tensor, split: Split, transposed: bool) -> Tensor:
        out_Po = x_Pi.new_empty(len(x_Pi), weight.shape[2 if transposed else 1])
        return self._rows_times_weight(out_Po, x_Pi, _INPUT, weight, split, "NN" if transposed else "TN", "fprop")

    def input_grad(self, grad_Po: Tensor, weight: Tensor, split: Split, transposed: bool) -> Tensor:
        out_Pi = grad_Po.new_empty(len(grad_Po), weight.shape[1 if transposed else 2])
        return self._rows_times_weight(out_Pi, grad_Po, _GRAD, weight, split, "TN" if transposed else "NN", "dgrad")

    def weight_grad(self, grad_Po: Tensor, x_Pi: Tensor, split: Split, transposed: bool) -> Tensor:
        left, right = (x_Pi, grad_Po) if transposed else (grad_Po, x_Pi)
        out = left.new_empty(len(split.counts), left.shape[1], right.shape[1])
        self._outer(out, grad_Po, x_Pi, split, transposed, accumulate=False)
        return out

    def add_weight_grad(self, out: Tensor, grad_Po: Tensor, x_Pi: Tensor, split: Split, transposed: bool) -> None:
        self._outer(out, grad_Po, x_Pi, split, transposed, accumulate=True)

    def _rows_times_weight(
        self, out: Tensor, rows: Tensor, kind: tuple, weight: Tensor, split: Split, layout: str, step: str
    ) -> Tensor:
        # In TE's terms the weight comes first, and its layout "T" is [out, in].
        if len(rows):
            weights = list(weight.unbind())
            if self.recipe is not None:
                quantizers = self._quantizers(len(weights), _WEIGHT, columns=layout == "NN")
                weights = [quantizer.quantize(w) for quantizer, w in zip(quantizers, weights, strict=True)]
            self._gemm(weights, self._split(rows, split, kind), [out], split, layout, step, one_output=True)
        return out

    def _outer(
        self, out: Tensor, grad_Po: Tensor, x_Pi: Tensor, split: Split, transposed: bool, accumulate: bool
    ) -> None:
        if not len(x_Pi):
            if not accumulate:
                out.zero_()
            return
        grads = self._split(grad_Po, split, _GRAD, columns=True)
        inputs = self._split(x_Pi, split, _INPUT, columns=True)
        first, second = (grads, inputs) if transposed else (inputs, grads)
        self._gemm(first, second, list(out.unbind()), split, "NT", "wgrad", accumulate=accumulate)

    def _gemm(
        self,
        first: list,
        second: list,
        out: list[Tensor],
        split: Split,
        layout: str,
        step: str,
        one_output: bool = False,
        accumulate: bool = False,
    ) -> None:
        from transformer_engine.pytorch.cpp_extensions import general_grouped_gemm

        general_grouped_gemm(
            first,
            second,
            out,
            quantization_params=[None] * len(first),
            out_dtype=out[0].dtype,
            layout=layout,
            m_splits=split.counts,
            grad=step != "fprop",
            accumulate=accumulate,
            single_output=one_output,
            use_split_accumulator=self._adds_in_float32(step),
        )

    def _adds_in_float32(self, step: str) -> bool:
        """What TE calls a split accumulator; without its own word in the recipe, only the forward does without."""
        params = getattr(self.recipe, f"fp8_gemm_{step}", None)
        return step != "fprop" if params is None else params.use_split_accumulator

    def _split(self, rows: Tensor, split: Split, kind: tuple, columns: bool = False) -> list:
        """Each expert's rows, in FP8 where there is a recipe; `columns`: for a product over the rows."""
        if self.recipe is None:
            return list(rows.split(split.counts))
        import transformer_engine_torch as tex

        return tex.split_quantize(rows, split.counts, self._quantizers(len(split.counts), kind, columns))

    def _quantizers(self, num_experts: int, kind: tuple, columns: bool) -> list:
        """A quantizer an expert, for a product over the columns of its operand or over the rows."""
        from transformer_engine.pytorch.quantization import RecipeState

        key = (id(self.recipe), num_experts, kind)
        if key not in _made_quantizers:
            mode, place, each = kind
            state = RecipeState.create(self.recipe, mode=mode, num_quantizers=each * num_experts)
            _made_quantizers[key] = (self.recipe, state.make_quantizers()[place::each])
        _, quantizers = _made_quantizers[key]
        for quantizer in quantizers:
            quantizer.internal = True  # plain storage, seen by nobody else
            # Scaling by tensor transposes what it quantized by rows.
            quantizer.set_usage(rowwise=not columns or self.recipe.float8_current_scaling(), columnwise=columns)
        return quantizers


# By recipe (held, as its id is the key), number and kind; they keep no state.
_made_quantizers: dict[tuple, tuple[Any, list]] = {}
