"""`GuardedStrategy`: which guard stands at which of Lightning's hooks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any
from uuid import uuid4

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.distributed import _init_dist_connection, _sync_ddp_if_available
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.rank_zero import rank_prefixed_message
from torch import Tensor

from lightning_ep.guards import handshake
from lightning_ep.guards.agreement import SideGroup
from lightning_ep.guards.attempt import attempt_store
from lightning_ep.guards.board import hosted_by_launcher
from lightning_ep.guards.control import Control
from lightning_ep.guards.failure import PeerError, described, is_communication_error
from lightning_ep.guards.launcher import let_ranks_end
from lightning_ep.guards.loaders import UNEVEN_DATA, UnevenData, even_loader
from lightning_ep.guards.peers import Process
from lightning_ep.guards.progress import progress
from lightning_ep.guards.serving import Serving
from lightning_ep.guards.watch import Watch

log = logging.getLogger(__name__)

_NO_TIMEOUT = timedelta(days=365)
# Larger tensors are reduced where they are.
_SMALL = 1024


class GuardedStrategy(DDPStrategy):
    """DDPStrategy whose ranks end together, for whatever reason one of them ends; see `docs/reliability.md`.

    Args:
        timeout: how long ranks may wait for each other.
        uneven_data: what to do when ranks have different numbers of training batches: "stop" ends each epoch with the
            first rank that has no more (and says so), "error" refuses.
    """

    def __init__(self, timeout: timedelta | None, uneven_data: UnevenData = "stop", **kwargs: Any) -> None:
        if uneven_data not in UNEVEN_DATA:
            raise ValueError(f"uneven_data={uneven_data!r} is not a choice; use one of {UNEVEN_DATA}")
        if timeout is not None and timeout <= timedelta(0):
            raise ValueError(
                f"timeout={str(timeout)!r} leaves no time to wait; set it to '0:10:00', or None for no limit"
            )
        super().__init__(timeout=timeout, **kwargs)
        self.uneven_data = uneven_data
        self._hosts: SideGroup | None = None  # our agreements
        self._calls: SideGroup | None = None  # what Lightning, callbacks and modules call on the strategy
        self._processes: list[Process] = []
        self._watch: Watch | None = None
        self._control: Control | None = None
        self._serving: Serving | None = None

    # -- what a strategy with experts adds

    def _facts_to_compare(self) -> Mapping[str, Any]:
        """What else must be the same on all ranks."""
        return {}

    def _ep_ranks(self) -> list[int]:
        """The ranks whose experts this rank's tokens need."""
        raise NotImplementedError

    def _serve(self, layer: int, hidden: int, slots: int, dtype: torch.dtype, weights_dtype: torch.dtype) -> None:
        """Take part in one exchange without own tokens."""
        raise NotImplementedError

    # -- set-up

    def setup_distributed(self) -> None:
        if hosted_by_launcher() and not dist.is_initialized():
            self.set_world_ranks()
            cluster, rank, size = self.cluster_environment, self.global_rank, self.world_size
            timeout = self._timeout or _NO_TIMEOUT
            _init_dist_connection(
                cluster,
                self._get_process_group_backend(),
                store=attempt_store(cluster.main_address, cluster.main_port, rank, size, timeout),
                timeout=self._timeout,
                device_id=self.root_device if self.root_device.type != "cpu" else None,
            )
        super().setup_distributed()

    def setup_environment(self) -> None:
        super().setup_environment()
        if dist.get_world_size() == 1:
            return
        self._hosts, self._calls = SideGroup(self._timeout), SideGroup(self._timeout)
        self._processes = self._hosts.gather(Process.own())
        trainer = self.lightning_module.trainer
        handshake.compare(self._hosts, {**handshake.run_facts(trainer), **self._facts_to_compare()}, "code or options")
        self._watch = Watch(
            self._processes,
            self.global_rank,
            self._hosts.broadcast(uuid4().hex),
            self._timeout or _NO_TIMEOUT,
            where=lambda: _where(trainer),
            is_ending=lambda: trainer.interrupted,
        )
        let_ranks_end(self._watch.grace + 5)
        self._hosts.barrier()  # every rank has begun its heartbeats

    def setup(self, trainer: pl.Trainer) -> None:
        if self._hosts is not None:
            handshake.compare(self._hosts, handshake.model_facts(self.lightning_module), "models")
            self._control = Control(trainer, self._hosts)
            self._control.attach()
            self._serving = Serving(self._hosts, self._ep_ranks(), self._serve)
        super().setup(trainer)

    def process_dataloader(self, dataloader: object) -> object:
        dataloader = super().process_dataloader(dataloader)
        if self._hosts is None or self._serving is None:
            return dataloader
        trainer = self.lightning_module.trainer
        with progress.at("the comparison of loaders"):
            return even_loader(dataloader, trainer, self._hosts, self._serving, self.uneven_data)

    # -- loops

    def on_train_start(self) -> None:
        super().on_train_start()
        if self._control is not None:
            self._control.start()

    def on_validation_start(self) -> None:
        super().on_validation_start()
        self._evaluation_starts()

    def on_test_start(self) -> None:
        super().on_test_start()
        self._evaluation_starts()

    def on_predict_start(self) -> None:
        super().on_predict_start()
        self._evaluation_starts()

    def _evaluation_starts(self) -> None:
        if self._serving is not None:
            self._serving.on_start()

    def on_validation_end(self) -> None:
        super().on_validation_end()
        self._evaluation_ends()
        if self._control is not None:
            self._control.validated = True

    def on_test_end(self) -> None:
        super().on_test_end()
        self._evaluation_ends()

    def on_predict_end(self) -> None:
        super().on_predict_end()
        self._evaluation_ends()

    def _evaluation_ends(self) -> None:
        if self._serving is not None:
            self._serving.on_end()

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate(super().validation_step, *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate(super().test_step, *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate(super().predict_step, *args, **kwargs)

    def _evaluate(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._serving is None or self._control is None:
            return step(*args, **kwargs)
        with self._serving.step() as ranks_may_differ:
            if not ranks_may_differ:
                self._control.after_evaluation_batch()
            return step(*args, **kwargs)

    # -- what others call: on hosts, apart from gradients, and not at all on a rank that fails alone

    @property
    def _alone(self) -> bool:
        """Whether this rank is on its way out without the others, so that nobody would answer it."""
        if self._watch is None or not self.lightning_module.trainer.interrupted:
            return False
        return self._control is None or not self._control.agreed_end

    def barrier(self, name: str | None = None) -> None:
        if self._calls is None:
            super().barrier(name)
        elif not self._alone:
            with progress.at(f"the barrier {name!r}" if name else "a barrier"):
                self._calls.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if self._calls is None:
            return super().broadcast(obj, src)
        if self._alone:
            return obj
        with progress.at("a broadcast"):
            return self._calls.broadcast(obj, src)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        if self._calls is None:
            return super().reduce_boolean_decision(decision, all)
        if self._alone:
            return bool(decision)
        with progress.at("a decision of all ranks"):
            return self._calls.all(bool(decision)) if all else self._calls.any(bool(decision))

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if self._calls is None or not isinstance(tensor, Tensor):
            return super().reduce(tensor, group, reduce_op)
        if self._alone:
            return tensor
        with progress.at("the reduction of a value, as of log(sync_dist=True)"):
            if group is not None or tensor.numel() > _SMALL:
                return super().reduce(tensor, group, reduce_op)
            on_host = tensor.detach().to("cpu", copy=True)
            return tensor.copy_(_sync_ddp_if_available(on_host, self._calls.group, reduce_op))

    def refuses_to_save(self, filepath: Any) -> bool:
        """Whether a checkpoint cannot be written because the other ranks will not write theirs; says so."""
        if self._alone:
            log.warning(
                rank_prefixed_message(
                    f"not saved: {filepath}. A checkpoint holds every rank's experts, and this rank ends without the "
                    "others. What was saved before is untouched.",
                    self.global_rank,
                )
            )
        return self._alone

    # -- the end

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        if self._watch is None or (self._control is not None and self._control.agreed_end):
            return
        if isinstance(exception, PeerError):
            self._watch.explain()
        elif is_communication_error(exception):
            cause = self._watch.explain()
            exception.args = (f"{cause.message(_where(self.lightning_module.trainer))} ({described(exception)})",)
        else:
            self._watch.fail(exception)

    def teardown(self) -> None:
        if self._control is not None:
            self._control.detach()
        if self._watch is not None:
            together = not self._alone
            if together:
                # A rank that leaves before the others looks dead to them.
                self.barrier("end of the run")
            try:
                super().teardown()
            finally:
                self._watch.close()
                self._watch = self._control = self._serving = None
                self._leave_side_groups(together)
        else:
            super().teardown()

    def _leave_side_groups(self, together: bool) -> None:
        """The next run makes its own. After a failure they stay as they are: closing would wait for what never comes."""
        for side in (self._hosts, self._calls):
            if together and side is not None:
                side.destroy()
        self._hosts = self._calls = None


def _where(trainer: pl.Trainer) -> str:
    """Where this rank is, for a message to others. Called from other threads, so it only reads."""
    stage = trainer.state.stage
    batch = f" batch {trainer.fit_loop.epoch_loop.batch_idx}" if trainer.training else ""
    return f"{progress.describe()}" + (f", in {stage.value}{batch}" if stage is not None else "")
