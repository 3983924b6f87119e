"""A whole model with its experts spread over ranks: finding, cutting, materialising, and which parameter is whose."""

from __future__ import annotations

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.model_summary import get_human_readable_count
from torch import Tensor, nn

from lightning_ep.config import EPConfig
from lightning_ep.dispatch import make_carrier, make_dispatcher
from lightning_ep.dispatch.alltoall import Transport
from lightning_ep.experts.finite import FiniteCheck
from lightning_ep.experts.gemm import gemm_backend
from lightning_ep.experts.interface import FoundExperts, find_experts
from lightning_ep.experts.parallel import ExpertParallel, install, shard_experts
from lightning_ep.experts.wgrad import WeightGradQueue, gradient_dtype
from lightning_ep.mesh import ExpertMesh
from lightning_ep.pretrained import load_deferred

# DDP's own name for it; Lightning's initial broadcast honours it too.
_IGNORED = "_ddp_params_and_buffers_to_ignore"


class ParallelModel:
    """The experts of one model, spread over an EP group, their tokens carried by `transport` (what `config` says).

    Attributes:
        overlaps: whether exchanges run beside the experts, which then leave their multiprocessors alone.
    """

    def __init__(
        self, model: nn.Module, config: EPConfig, mesh: ExpertMesh, transport: Transport | None = None
    ) -> None:
        self.model, self.config, self.mesh = model, config, mesh
        self.transport = transport or make_carrier(config, mesh)
        self.queue = WeightGradQueue(fuse=config.gradient_accumulation_fusion)
        self.queue.delay = config.delays_wgrad
        self.overlaps = False
        self.finite = FiniteCheck(model)
        self.experts: list[FoundExperts] = []

    def shard(self, required: bool = True) -> None:
        """Cut the experts that are still whole and let all of them exchange tokens.

        Called before the module's own set-up for what exists then, and after `configure_model` for the rest.
        Raises ExpertsNotFoundError when there are none, unless `required=False`.
        """
        self.experts = find_experts(self.model, required)
        for layer, found in enumerate(self.experts):
            shard_experts(found, self.mesh)
            install(found, self._expert_parallel(layer, found))
        sharded = self.expert_tensors()
        names = [
            *self.model.named_parameters(remove_duplicate=False),
            *self.model.named_buffers(remove_duplicate=False),
        ]
        ignored = {name for name, tensor in names if tensor in sharded}
        # Rank 0's experts must not overwrite the other ranks' in the initial broadcast.
        setattr(self.model, _IGNORED, sorted({*getattr(self.model, _IGNORED, ()), *ignored}))

    def _expert_parallel(self, layer: int, found: FoundExperts) -> ExpertParallel:
        return ExpertParallel(
            layer=layer,
            num_experts=found.num_experts,
            mesh=self.mesh,
            layout=found.layout,
            own_forward=type(found.module).forward,
            dispatcher=make_dispatcher(
                self.config, found.num_experts, self.transport, layer, after_dispatch_grad=self.queue.flush
            ),
            gemm=gemm_backend(self.config.experts_implementation, self._spared_sms),
            queue=self.queue,
            finite=self.finite,
            force_load_balancing=self.config.moe_router_force_load_balancing,
        )

    def _spared_sms(self) -> int:
        return self.transport.num_sms if self.overlaps or self.queue.delay else 0

    def float32_gradients(self) -> set[Tensor]:
        """Half-precision parameters whose gradients add up in float32."""
        if not self.queue.fuse:
            return set()
        layouts = [(found.module, found.layout) for found in self.experts if found.layout is not None]
        weights = {getattr(module, name) for module, layout in layouts for name in (layout.up, "down_proj")}
        return {weight for weight in weights if gradient_dtype(weight) != weight.dtype}

    def count_parameters(self) -> tuple[int, int, int]:
        """Parameters of the whole model, of all its experts, and of what this rank holds."""
        sharded = self.expert_tensors()
        local = sum(p.numel() for p in self.model.parameters())
        local_experts = sum(p.numel() for p in self.model.parameters() if p in sharded)
        experts = local_experts * self.mesh.ep_size
        return local - local_experts + experts, experts, local

    def expert_tensors(self) -> set[Tensor]:
        """Parameters and buffers of which this rank holds its share."""
        return {getattr(found.module, name) for found in self.experts for name in found.sharded}

    def ignored(self) -> set[str]:
        """Full names of parameters and buffers that are not the same on all ranks: experts, and the user's own list."""
        return set(getattr(self.model, _IGNORED, ()))

    def trainable(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """(dense, expert) parameters whose gradients this package reduces; the user's own DDP ignore list is left out."""
        sharded = self.expert_tensors()
        ignored = self.ignored()
        experts = [p for p in self.model.parameters() if p in sharded]
        dense = [p for name, p in self.model.named_parameters() if p not in sharded and name not in ignored]
        return dense, experts

    def sync_expert_replicas(self) -> None:
        """Ranks that hold the same experts start from the first one's. Collective over the EDP group."""
        if self.mesh.edp_size == 1:
            return
        source = dist.get_global_rank(self.mesh.edp_group, 0)
        for found in self.experts:
            for name in found.sharded:
                dist.broadcast(getattr(found.module, name).detach(), source, group=self.mesh.edp_group)

    def materialize(self, device: torch.device) -> None:
        """Allocate what is on the meta device, after cutting, and load or initialise it.

        Models of `lightning_ep.from_pretrained` read their shards. Of the rest Hugging Face models initialise by their
        own rules, other modules by `reset_parameters`. The generator differs by EP rank, or all ranks' experts would be
        copies; dense parameters are made equal by the initial broadcast.
        """
        load_deferred(self.model, self.experts, self.mesh, device)
        if not any(t.is_meta for t in [*self.model.parameters(), *self.model.buffers()]):
            return
        allocated: dict[Tensor, Tensor] = {}
        owners = []
        for name, module in self.model.named_modules():
            on_meta = [
                t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None and t.is_meta
            ]
            if not on_meta:
                continue
            owners.append((name, module))
            for slot in (module._parameters, module._buffers):
                for key, tensor in slot.items():
                    if tensor is not None and tensor.is_meta:
                        slot[key] = allocated.setdefault(tensor, _empty_like(tensor, device))
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            torch.manual_seed(torch.initial_seed() + 1 + self.mesh.ep_rank)
            _initialize(self.model, owners)

    def close(self) -> None:
        """Hand back what carried the tokens; collective."""
        self.transport.close()

    def describe(self) -> str:
        """A short table of what was found."""
        head = (
            f"experts found: {len(self.experts)} layers over EP {self.mesh.ep_size} x EDP {self.mesh.edp_size} "
            f"({self.config.moe_token_dispatcher_type} dispatcher)"
        )
        rows = [f"  {found.describe()}" for found in self.experts]
        if len(rows) > 6:
            rows = [*rows[:3], f"  ... {len(rows) - 4} more ...", rows[-1]]
        total, experts, local = (get_human_readable_count(count).strip() for count in self.count_parameters())
        size = (
            f"  {total} parameters, of them {experts} in experts; {local} on this rank, which Lightning's summary shows"
        )
        return "\n".join([head, *rows, size])


def _empty_like(tensor: Tensor, device: torch.device) -> Tensor:
    empty = torch.empty_like(tensor, device=device)
    return nn.Parameter(empty, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


@torch.no_grad()
def _initialize(model: nn.Module, owners: list[tuple[str, nn.Module]]) -> None:
    """Initialise the modules `owners`, whose own tensors were just allocated."""
    ruled = {m: root for root in model.modules() if hasattr(root, "_init_weights") for m in root.modules()}
    for name, module in owners:
        if module in ruled:
            ruled[module]._init_weights(module)
        elif hasattr(module, "reset_parameters"):
            module.reset_parameters()
        else:
            raise ValueError(
                f"{name!r} ({type(module).__name__}) was built on the meta device and has no reset_parameters() to "
                "initialise it; add one, or build it on a real device"
            )
