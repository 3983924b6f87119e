"""The `flex` dispatcher over HybridEP (NVIDIA's kernels in the branch hybrid-ep of DeepEP): moving to and from the
experts' order is part of its exchange.

    forward     dispatch_with_permute (x, routing) -> rows, weights, handle      combine_with_unpermute (rows, handle)
    backward    combine_with_unpermute (gradients of rows, weights, handle)      dispatch_with_permute (gradient, handle)

Its kernels take the same number of tokens from every rank, and its buffers must grow on all ranks at once, or some wait
forever. So the ranks exchange, ahead of the tokens, how many they have and for which experts: all pad to the group's
maximum with rows that go nowhere, and the library never has to ask the GPU for a size (its non-blocking mode).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_ep import libraries
from lightning_ep.dispatch.alltoall import CountsOnTheirWay, GroupTransport, choose_moves, refuse_ids
from lightning_ep.dispatch.base import Dispatcher, Exchange, ExpertRows
from lightning_ep.dispatch.lanes import Lanes
from lightning_ep.dispatch.permute import INVALID, ROWS, TOKENS

# Its kernels load and flag tokens in groups of this many.
_TOKENS_MULTIPLE = 16
_HIDDEN_MULTIPLE = 16
# Across NVLink domains a queue pair holds 3 x tokens + 1 requests, fewer than 65,536; in blocks of 64 tokens.
_LIMIT_ACROSS = 21_824


class HybridEPGroup:
    """HybridEP on one EP group: one buffer for all layers, grown on all ranks together.

    Args:
        num_sms: multiprocessors that an exchange occupies.

    Raises:
        LibraryError: HybridEP is missing or cannot be used, or there is no compiler for its kernels.
    """

    def __init__(self, group: ProcessGroup, device: torch.device, num_sms: int = 16) -> None:
        self._class = libraries.load(libraries.HYBRIDEP).HybridEPBuffer
        if device.type == "cuda":
            libraries.require_nvcc()
        self.group, self.transport, self.num_sms = group, GroupTransport(group), num_sms
        self.size, self.rank, self.lanes = self.transport.size, self.transport.rank, Lanes(device)
        self._capacity = (0, 0, 0)  # hidden size, tokens of a rank, experts of a rank
        self._buffers: list[Any] = []  # the last is the largest

    def buffer(self, hidden: int, tokens: int, num_local: int) -> Any:
        """The buffer, with room for as much on every rank. Collective where it has to grow.

        Smaller ones stay for the exchanges that began with them, until `close`: a rank that freed its own could do so
        while another's kernel still polls it. Growing compiles kernels, so it goes in large steps.
        """
        wanted = (hidden, _rounded(tokens), num_local)
        if any(want > have for want, have in zip(wanted, self._capacity, strict=True)):
            capacity = hidden, tokens, num_local = tuple(map(max, wanted, self._capacity))
            try:
                buffer = self._class(
                    group=self.group,
                    hidden_dim=hidden,
                    max_num_of_tokens_per_rank=tokens,
                    num_local_experts=num_local,
                    num_sms_dispatch_api=self.num_sms,
                    num_sms_combine_api=self.num_sms,
                )
            except RuntimeError as error:
                raise RuntimeError(
                    f"HybridEP refuses a buffer for {tokens} tokens of {hidden} and {num_local} experts on each of "
                    f"{self.size} ranks: {error} It needs a multiple of 4 experts in each NVLink domain and, across "
                    "domains, 3 x tokens + 1 below 65,536: lower the batch size or the sequence length, or set "
                    "moe_token_dispatcher_type='alltoall'"
                ) from error
            self._buffers.append(buffer)
            self._capacity = capacity
        return self._buffers[-1]

    def close(self) -> None:
        """Give the buffers back, when all ranks are done with them. Collective; not after a failure."""
        if self._buffers:
            if self.lanes.device.type == "cuda":
                torch.cuda.synchronize()
            dist.barrier(self.group)
            self._buffers, self._capacity = [], (0, 0, 0)


def _rounded(tokens: int) -> int:
    """Room for `tokens`: the next power of two, or the limit across NVLink domains where that is enough."""
    power = 1 << (max(tokens, 512) - 1).bit_length()
    return _LIMIT_ACROSS if tokens <= _LIMIT_ACROSS < power else power


class HybridEPDispatcher(Dispatcher):
    """Exchanges one layer's tokens over HybridEP; arguments as `AllToAllDispatcher`.

    Args:
        pad_multiple: fill each expert's rows up to a multiple with zeros, for GEMMs that want it.
    """

    def __init__(
        self,
        num_experts: int,
        group: HybridEPGroup,
        layer: int,
        fused: bool = False,
        after_dispatch_grad: Callable[[], None] = lambda: None,
        pad_multiple: int = 1,
    ) -> None:
        if num_experts % 4:
            raise ValueError(
                f"moe_flex_dispatcher_backend='hybridep' needs a multiple of 4 experts, and MoE layer {layer} has "
                f"{num_experts}; set moe_token_dispatcher_type='alltoall'"
            )
        self.num_experts, self.group, self.layer, self.pad_multiple = num_experts, group, layer, pad_multiple
        self.after_dispatch_grad = after_dispatch_grad
        self.moves = choose_moves(fused)

    def route(self, experts_TK: Tensor) -> HybridEPExchange:
        return HybridEPExchange(self, experts_TK)


class HybridEPExchange(Exchange):
    def __init__(self, dispatcher: HybridEPDispatcher, experts_TK: Tensor) -> None:
        self.dispatcher, self.lanes = dispatcher, dispatcher.group.lanes
        self.layer, self.after_dispatch_grad = dispatcher.layer, dispatcher.after_dispatch_grad
        self.experts_TK, self.num_tokens = experts_TK.to(torch.int64), len(experts_TK)
        _, counts_WC = dispatcher.moves.plan_rows(self.experts_TK, dispatcher.num_experts, dispatcher.group.size)
        counts_WC[:, ROWS] = self.num_tokens  # what each rank has, not what it sends to whom
        self._counts = CountsOnTheirWay(dispatcher.group.transport, counts_WC)

    # -- dispatch: tokens to experts

    def launch_dispatch(self, x_TD: Tensor, weights_TK: Tensor) -> None:
        _refuse_tokens(x_TD)
        self._read_counts()
        d, hidden = self.dispatcher, x_TD.shape[1]
        num_local = d.num_experts // d.group.size
        # Held as long as the exchange: the group's may grow meanwhile.
        self.buffer = d.group.buffer(hidden, self.padded_tokens, num_local)
        self._sent = self._padded(x_TD.detach()), *self._dense(weights_TK.detach())
        with self.lanes.beside() as self._under_way:
            self._rows, self._weights, _, self._ends, self.handle = self.buffer.dispatch_with_permute(
                hidden=self._sent[0],
                routing_map=self._sent[1],
                probs=self._sent[2],
                num_of_experts_per_rank=num_local,
                pad_multiple=d.pad_multiple,
                num_permuted_tokens=self.num_pairs,
                non_blocking=True,
            )

    def wait_dispatch(self) -> ExpertRows:
        self._under_way.wait()
        rows = ExpertRows(self._rows, self._weights, self._ends.cumsum(0, dtype=torch.int32), self.tokens_per_expert)
        del self._rows, self._weights, self._ends, self._sent, self._under_way
        return rows

    # -- combine: weighted outputs back to their tokens

    def launch_combine(self, out_PD: Tensor) -> None:
        self._rows = out_PD.detach().contiguous()
        with self.lanes.beside() as self._under_way:
            self._out, _ = self._combine(self._rows)

    def wait_combine(self) -> Tensor:
        self._under_way.wait()
        out_TD = self._out[: self.num_tokens]
        del self._out, self._rows, self._under_way
        return out_TD

    # -- backward of combine

    def launch_combine_grad(self, grad_TD: Tensor) -> None:
        self._grads = self._padded(grad_TD)
        with self.lanes.beside() as self._grads_under_way:
            self._grad_PD = self.buffer.dispatch_with_permute(
                hidden=self._grads,
                handle=self.handle,
                pad_multiple=self.dispatcher.pad_multiple,
                num_permuted_tokens=self.num_pairs,
                non_blocking=True,
            )[0]

    def wait_combine_grad(self) -> Tensor:
        self._grads_under_way.wait()
        grad_PD = self._grad_PD
        del self._grad_PD, self._grads, self._grads_under_way
        return grad_PD

    # -- backward of dispatch

    def launch_dispatch_grad(self, grad_PD: Tensor, grad_P: Tensor) -> None:
        self._grads = grad_PD.contiguous(), grad_P.contiguous()
        with self.lanes.beside() as self._grads_under_way:
            self._grad_TD, self._grad_TE = self._combine(*self._grads)

    def wait_dispatch_grad(self) -> tuple[Tensor, Tensor]:
        self._grads_under_way.wait()
        grad_TD = self._grad_TD[: self.num_tokens]
        grad_TK = self._grad_TE[: self.num_tokens].gather(1, self.experts_TK)
        del self._grad_TD, self._grad_TE, self._grads, self._grads_under_way, self.handle, self.buffer
        return grad_TD, grad_TK

    def _combine(self, rows_PD: Tensor, weights_P: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        return self.buffer.combine_with_unpermute(
            hidden=rows_PD, probs=weights_P, handle=self.handle, pad_multiple=self.dispatcher.pad_multiple
        )

    def _padded(self, rows_TD: Tensor) -> Tensor:
        """As many rows as every rank sends; the further ones are zero and go nowhere."""
        missing = self.padded_tokens - len(rows_TD)
        return torch.nn.functional.pad(rows_TD, (0, 0, 0, missing)) if missing else rows_TD.contiguous()

    def _dense(self, weights_TK: Tensor) -> tuple[Tensor, Tensor]:
        """Which experts each token chose, `[T, E]` bool, and with what weight, float32."""
        shape, ids, own = (self.padded_tokens, self.dispatcher.num_experts), self.experts_TK, self.num_tokens
        chosen_TE = torch.zeros(shape, dtype=torch.bool, device=ids.device)
        weights_TE = torch.zeros(shape, dtype=torch.float32, device=ids.device)
        # A token that chose an expert twice gives it the sum of both weights: every slot writes the same.
        same_TKK = ids[:, :, None] == ids[:, None, :]
        total_TK = (weights_TK.float()[:, None, :] * same_TKK).sum(-1)
        chosen_TE[:own].scatter_(1, ids, True)
        weights_TE[:own].scatter_(1, ids, total_TK)
        return chosen_TE, weights_TE

    def _read_counts(self) -> None:
        """How many tokens the ranks have, and how many of their pairs come here."""
        _, received, _ = self._counts.read()
        del self._counts
        if invalid := {rank: row[INVALID] for rank, row in enumerate(received) if row[INVALID]}:
            refuse_ids(self.layer, self.dispatcher.num_experts, invalid)
        self.padded_tokens = _multiple(max(1, *(row[ROWS] for row in received)), _TOKENS_MULTIPLE)
        pairs_L = [sum(column) for column in zip(*(row[TOKENS:] for row in received), strict=True)]
        self.tokens_per_expert = [_multiple(pairs, self.dispatcher.pad_multiple) for pairs in pairs_L]
        self.num_pairs = sum(self.tokens_per_expert)


def _multiple(number: int, of: int) -> int:
    return -(-number // of) * of


def _refuse_tokens(x_TD: Tensor) -> None:
    if x_TD.dtype != torch.bfloat16:
        raise ValueError(
            f"moe_flex_dispatcher_backend='hybridep' moves bfloat16 tokens, and these are {x_TD.dtype}; set the "
            "Trainer's precision='bf16-mixed' or 'bf16-true', or moe_token_dispatcher_type='alltoall'"
        )
    if x_TD.shape[1] % _HIDDEN_MULTIPLE:
        raise ValueError(
            f"moe_flex_dispatcher_backend='hybridep' moves tokens whose size is a multiple of {_HIDDEN_MULTIPLE}, and "
            f"this model's hidden_size={x_TD.shape[1]}; set moe_token_dispatcher_type='alltoall'"
        )
