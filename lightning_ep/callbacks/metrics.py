"""torchmetrics Metrics for overlap and expert load: usable alone, state summed over ranks."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torchmetrics import Metric


class OverlapFraction(Metric):
    """Share of communication time that ran beside compute, over all updates and ranks.

    `update(hidden, comm)` takes times in any one unit; `compute()` is sum(hidden) / sum(comm), NaN without
    communication (0 would read as "nothing hidden").
    """

    full_state_update = False
    higher_is_better = True
    hidden: Tensor
    comm: Tensor

    def __init__(self, **kwargs) -> None:
        super().__init__(**kwargs)
        self.add_state("hidden", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("comm", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, hidden: float | Tensor, comm: float | Tensor) -> None:
        """Add one measurement: `hidden` of `comm` was beside compute."""
        self.hidden += hidden
        self.comm += comm

    def compute(self) -> Tensor:
        return self.hidden / self.comm


class ExpertLoad(Metric):
    """How evenly tokens spread over experts, from the router's choices of all ranks.

    Args:
        num_experts: experts of a layer (global, not of one rank).
        num_layers: MoE layers.
        kwargs: torchmetrics' own.

    `compute()` gives a dict of tensors `[num_layers]` (torchmetrics makes scalars of them for one layer):
        `max_over_mean`: tokens of the busiest expert over the mean (1 is even; NaN before any token).
        `entropy`: of the load, 0 (one expert has all) to 1 (even).
        `dead`: experts without a single token.
    """

    full_state_update = False
    tokens: Tensor

    def __init__(self, num_experts: int, num_layers: int = 1, **kwargs) -> None:
        super().__init__(**kwargs)
        if num_experts < 1 or num_layers < 1:
            raise ValueError(f"num_experts={num_experts}, num_layers={num_layers}: both must be at least 1")
        self.num_experts = num_experts
        self.add_state("tokens", torch.zeros(num_layers, num_experts, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, top_k_index: Tensor, layer: int = 0) -> None:
        """Count the chosen experts of `layer`; no host wait.

        Args:
            top_k_index: global expert ids of any shape, for example `[T, K]`; negative ids are dropped tokens.
            layer: index of the MoE layer.
        """
        # Counted with one bin more, for dropped tokens; bincount would read its size on the host.
        bins = (top_k_index.detach().reshape(-1) + 1).clamp_min(0)
        counts = self.tokens.new_zeros(self.num_experts + 1)
        counts.index_add_(0, bins, torch.ones_like(bins, dtype=counts.dtype))
        self.tokens[layer] += counts[1:]

    def compute(self) -> dict[str, Tensor]:
        return load_statistics(self.tokens)


def load_statistics(tokens_LE: Tensor) -> dict[str, Tensor]:
    """`max_over_mean`, `entropy` and `dead` of each layer, `[L]`, from the tokens of each expert, `[L, E]`."""
    num_experts = tokens_LE.shape[1]
    tokens = tokens_LE.double()
    share = tokens / tokens.sum(1, keepdim=True)
    entropy = torch.special.entr(share).sum(1)
    if num_experts > 1:
        entropy = entropy / math.log(num_experts)
    return {"max_over_mean": share.amax(1) * num_experts, "entropy": entropy, "dead": (tokens_LE == 0).sum(1)}
