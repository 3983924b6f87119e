"""The schedule in effect during one fit: which one, why, and the line that says so."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Literal

from lightning.pytorch.utilities import rank_zero_warn

from lightning_ep.config import EPConfig
from lightning_ep.experts.model import ParallelModel
from lightning_ep.facts import Facts
from lightning_ep.schedule.one_f_one_b import Backward, OneFOneB
from lightning_ep.schedule.two_batch import TwoBatch, find_stack

Choice = Literal["none", "1f1b", "two_batch"]


def choose_schedule(
    config: EPConfig | Facts, accumulate_grad_batches: int, automatic_optimization: bool
) -> tuple[Choice, str]:
    """The schedule that fits, and a few words that say why.

    Raises ValueError when "1f1b" was asked for and cannot work: it lives inside Lightning's own accumulation.
    """
    if not config.overlap_moe_expert_parallel_comm:
        return "none", "overlap_moe_expert_parallel_comm is off"
    if config.overlap_schedule == "1f1b" and not automatic_optimization:
        raise ValueError(
            "overlap_schedule='1f1b' pairs micro-batches of Lightning's automatic optimization, but the module sets "
            "automatic_optimization=False; use overlap_schedule='two_batch', or automatic optimization"
        )
    if config.overlap_schedule != "auto":
        return config.overlap_schedule, "as asked"
    if accumulate_grad_batches >= 2 and automatic_optimization:
        return "1f1b", f"accumulate_grad_batches={accumulate_grad_batches}"
    return "two_batch", "no accumulation that pairs micro-batches"


def effective(options: EPConfig | Facts, schedule: str, reason: str, world_size: int | None) -> str:
    """One line that says what the options come to; a world of unknown size is left out."""
    flex = options.moe_token_dispatcher_type == "flex"
    dispatcher = f"flex ({options.moe_flex_dispatcher_backend})" if flex else options.moe_token_dispatcher_type
    delays = options.delay_wgrad_compute or options.overlap_dispatch_backward_with_experts_wgrad
    graphs = f"; CUDA graphs of {', '.join(options.cuda_graph_scope)}" if options.cuda_graph_scope else ""
    ep = options.expert_model_parallel_size
    groups = f"EP {ep} x EDP {world_size // ep}" if world_size else f"EP {ep}"
    return (
        f"ep_overlap: schedule {schedule} ({reason}); dispatcher {dispatcher}; expert wgrad "
        f"{'delayed' if delays else 'in the backward'}; {groups}{graphs}"
    )


class Overlap:
    """Communication hidden by one schedule, or by none. Made when fit starts, closed when it ends."""

    def __init__(
        self, config: EPConfig, parallel: ParallelModel, accumulate_grad_batches: int, automatic_optimization: bool
    ) -> None:
        self.config, self.parallel, self._warned = config, parallel, False
        self.choice, self.reason = choose_schedule(config, accumulate_grad_batches, automatic_optimization)
        self._one_f_one_b = OneFOneB() if self.choice == "1f1b" else None
        self._two_batch: TwoBatch | None = None
        if self.choice == "1f1b" and accumulate_grad_batches < 2:
            self._nothing_to_overlap("accumulate_grad_batches=1 leaves no second micro-batch to pair")
        if self.choice == "two_batch":
            name, stack = find_stack(parallel.model, parallel.experts, config.overlap_split_module)
            self.reason += f", splits {name!r}"
            self._two_batch = TwoBatch(stack, lambda: self._nothing_to_overlap("a batch of 1 cannot be split"))
        parallel.queue.delay = config.delays_wgrad
        parallel.overlaps = self.choice != "none"

    def _nothing_to_overlap(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            rank_zero_warn(
                f"overlap_moe_expert_parallel_comm has nothing to overlap: {why}. Set accumulate_grad_batches to 2 or more "
                "(schedule '1f1b'), or the batch size to 2 or more (schedule 'two_batch')."
            )

    @contextmanager
    def forward_turns(self) -> Generator[None, None, None]:
        """Around `training_step`: a parked backward runs beside it."""
        if self._one_f_one_b is None:
            yield
            return
        with self._one_f_one_b.forward_turns():
            yield

    def park(self, backward: Backward) -> bool:
        """Keep a backward that is not the last of its window for the next forward; False: run it now."""
        if self._one_f_one_b is None:
            return False
        self._one_f_one_b.park(backward)
        return True

    @property
    def in_flight(self) -> int:
        """How many passes over the layers, of micro-batches or of halves, there are at a time."""
        return 1 if self.choice == "none" else 2

    @property
    def is_parked(self) -> bool:
        """Whether a backward waits for the next forward."""
        return self._one_f_one_b is not None and self._one_f_one_b.is_parked

    def drop(self) -> None:
        """Forget a parked backward: training ended or failed before its partner came."""
        if self._one_f_one_b is not None:
            self._one_f_one_b.drop()

    def close(self) -> None:
        if self._one_f_one_b is not None:
            self._one_f_one_b.close()
        if self._two_batch is not None:
            self._two_batch.close()

    def describe(self) -> str:
        """One line: what is effective, and why anything that was asked for is not."""
        mesh = self.parallel.mesh
        experts = {found.num_experts // mesh.ep_size for found in self.parallel.experts}
        line = effective(self.config, self.choice, self.reason, mesh.world_size)
        return f"{line}; {'/'.join(map(str, sorted(experts)))} experts a rank"
