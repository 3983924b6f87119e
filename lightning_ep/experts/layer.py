"""`MoELayer` for people who write their own model; its experts have the layout of Hugging Face's."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_ep.dispatch.base import ExpertRows
from lightning_ep.experts.gemm import TorchGemm
from lightning_ep.experts.grouped import grouped_experts
from lightning_ep.experts.interface import ExpertsLayout
from lightning_ep.experts.parallel import compute_dtype
from lightning_ep.schedule.turns import half


class MoELayer(nn.Module):
    """A mixture of SwiGLU experts behind a softmax top-k router. Drop-in for the feed-forward part of a block.

    In one process it computes all experts; under `EPOverlapStrategy` they are spread over ranks, with no change here.

    Args:
        hidden_size: D, size of a token.
        intermediate_size: I, inner size of one expert.
        num_experts: E; `expert_model_parallel_size` has to divide it.
        top_k: K, experts that each token visits.
        normalize_weights: let the weights of a token's experts sum to one.
        initializer_range: standard deviation of the initial weights.

    Attributes:
        aux_loss: load-balancing loss of the latest forward (None before), 1.0 when experts are used evenly and up to E
            when one gets everything; add a small multiple of it (0.01 is usual) to your loss. Over this rank's tokens, as
            in data parallelism. Copies of the layer start without.

    Raises:
        ValueError: `top_k` larger than `num_experts`, or a size below one.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        num_experts: int,
        top_k: int = 2,
        normalize_weights: bool = True,
        initializer_range: float = 0.02,
    ) -> None:
        super().__init__()
        if min(hidden_size, intermediate_size, num_experts, top_k) < 1 or top_k > num_experts:
            raise ValueError(
                f"top_k={top_k}, num_experts={num_experts}, hidden_size={hidden_size}, intermediate_size="
                f"{intermediate_size}: sizes are at least 1, and top_k is at most num_experts"
            )
        self.router = TopKRouter(hidden_size, num_experts, top_k, normalize_weights, initializer_range)
        self.experts = Experts(hidden_size, intermediate_size, num_experts, initializer_range)
        self._routed: list[tuple[Tensor, Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        """`[..., D] -> [..., D]`."""
        x_TD = x.reshape(-1, x.shape[-1])
        index_TK, weights_TK, probabilities_TE = self.router(x_TD)
        # A checkpointed layer comes by again in its backward, when the next micro-batch may have been here already.
        if torch._C._current_graph_task_id() == -1:
            self._routed = [*(self._routed if half.get() else ()), (probabilities_TE, index_TK)]
        return self.experts(x_TD, index_TK, weights_TK).view_as(x)

    @property
    def aux_loss(self) -> Tensor | None:
        if not self._routed:
            return None
        probabilities, indices = zip(*self._routed, strict=True)  # of both halves where a schedule splits the batch
        return load_balancing_loss(torch.cat(probabilities), torch.cat(indices))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_routed": []}  # tensors of a graph cannot be copied


class TopKRouter(nn.Module):
    """Softmax over all experts in float32, then the best K."""

    def __init__(
        self, hidden_size: int, num_experts: int, top_k: int, normalize_weights: bool, initializer_range: float
    ) -> None:
        super().__init__()
        self.top_k, self.normalize_weights, self.initializer_range = top_k, normalize_weights, initializer_range
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.initializer_range)

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Expert ids `[T, K]` int64, their weights `[T, K]` and all experts' probabilities `[T, E]`, both float32."""
        probabilities_TE = F.linear(x_TD, self.weight).softmax(-1, dtype=_at_least_float32(x_TD))
        weights_TK, index_TK = probabilities_TE.topk(self.top_k, -1)
        if self.normalize_weights:
            weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
        return index_TK, weights_TK, probabilities_TE


def load_balancing_loss(probabilities_TE: Tensor, index_TK: Tensor) -> Tensor:
    """E times the sum over experts of (share of the choices) x (mean probability), as in Switch Transformers."""
    num_experts = probabilities_TE.shape[1]
    chosen_E = F.one_hot(index_TK, num_experts).sum((0, 1))
    # A rank without tokens has a loss of zero, not 0 / 0.
    share_E = chosen_E / chosen_E.sum().clamp(min=1)
    mean_E = probabilities_TE.sum(0) / max(len(probabilities_TE), 1)
    return num_experts * (share_E * mean_E).sum()


def _default_apply_gate(self: Experts, gate_up: Tensor) -> Tensor:
    # Under this name the grouped path knows it as plain SwiGLU and fuses it.
    gate, up = gate_up.chunk(2, dim=-1)
    return self.act_fn(gate) * up


class Experts(nn.Module):
    """All experts' weights as 3-D parameters, under the names and flags of transformers' `use_experts_implementation`.

    `gate_up_proj [E, 2I, D]` (gate first), `down_proj [E, D, I]`.
    """

    has_gate = True
    has_bias = False
    is_transposed = False
    is_concatenated = True
    has_post_expert_norm = False
    _apply_gate = _default_apply_gate

    def __init__(self, hidden_size: int, intermediate_size: int, num_experts: int, initializer_range: float) -> None:
        super().__init__()
        self.num_experts, self.initializer_range = num_experts, initializer_range
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * intermediate_size, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, intermediate_size))
        self.act_fn = nn.SiLU()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.gate_up_proj, std=self.initializer_range)
        nn.init.normal_(self.down_proj, std=self.initializer_range)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """All experts in this process: `[T, D]`, ids `[T, K]`, weights `[T, K]` -> `[T, D]`.

        `EPOverlapStrategy` replaces this method by its exchange, around the same grouped GEMMs.
        """
        x_TD = hidden_states.to(compute_dtype(hidden_states))
        top_k = top_k_index.shape[1]
        order_P = top_k_index.flatten().argsort(stable=True)
        counts_E = top_k_index.flatten().bincount(minlength=self.num_experts)
        rows = ExpertRows(
            rows_PD=x_TD.repeat_interleave(top_k, 0)[order_P],
            weights_P=top_k_weights.flatten()[order_P].to(_at_least_float32(x_TD)),
            offsets_L=counts_E.cumsum(0, dtype=torch.int32),
            tokens_per_expert=counts_E.tolist(),
        )
        out_PD = grouped_experts(self, _LAYOUT, rows, TorchGemm())
        # Back to the tokens' order by a permutation and a sum: no atomics, so the same result every time.
        pairs_TKD = out_PD[order_P.argsort()].view(-1, top_k, x_TD.shape[1])
        return pairs_TKD.sum(1, dtype=_at_least_float32(x_TD)).to(hidden_states.dtype)


_LAYOUT = ExpertsLayout(
    up="gate_up_proj",
    has_gate=Experts.has_gate,
    has_bias=Experts.has_bias,
    is_transposed=Experts.is_transposed,
    is_concatenated=Experts.is_concatenated,
    has_post_expert_norm=Experts.has_post_expert_norm,
)


def _at_least_float32(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
