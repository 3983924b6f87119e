"""`EPOverlapStrategy`: what Lightning calls, in the order in which it calls it. No mechanism lives here."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from datetime import timedelta
from functools import wraps
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.overrides.distributed import _sync_module_states
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ep import checkpoint
from lightning_ep.agreement import on_all_ranks
from lightning_ep.config import EPConfig, ExpertsImplementation, OverlapSchedule
from lightning_ep.constraints import enforce
from lightning_ep.dense import fuse_rms_norms
from lightning_ep.dispatch.alltoall import Transport
from lightning_ep.experts.model import ParallelModel
from lightning_ep.experts.parallel import serve_experts
from lightning_ep.facts import Facts, gather_facts
from lightning_ep.gradients import AgreeingGradScaler, GradientReducer, global_grad_norm
from lightning_ep.graphs.dense import DenseGraphs
from lightning_ep.graphs.recorder import CudaRecorder, Recorder
from lightning_ep.guards.failure import left_where_it_is
from lightning_ep.guards.loaders import UnevenData
from lightning_ep.guards.strategy import GuardedStrategy
from lightning_ep.mesh import ExpertMesh, build_mesh, keep_mesh, kept_mesh
from lightning_ep.pretrained import experts_will_be_cut
from lightning_ep.replicas import ReplicatedBuffers, check_ddp_arguments, check_gradients, check_optimizers
from lightning_ep.schedule.overlap import Overlap
from lightning_ep.schedule.two_batch import find_stack

log = logging.getLogger(__name__)

# Larger than any compile, small enough to notice a dead rank.
DEFAULT_TIMEOUT = timedelta(minutes=10)


class EPOverlapStrategy(GuardedStrategy):
    """Expert parallelism for any model with a Hugging Face style experts module, dense parameters replicated.

    Every rank is a data-parallel rank with its own batch. Experts are spread over groups of
    `expert_model_parallel_size` consecutive ranks; ranks that hold the same experts average their gradients.

    Args:
        expert_model_parallel_size: ranks that share one set of experts; divides the world and every layer's experts.
        moe_token_dispatcher_type: "alltoall", or "flex" with a backend.
        moe_flex_dispatcher_backend: "deepep" or "hybridep", for flex; moves bfloat16 tokens.
        moe_deepep_num_sms, moe_hybridep_num_sms: multiprocessors that their exchanges occupy (DeepEP: even).
        moe_permute_fusion: move rows with Triton kernels where there is a GPU.
        moe_dispatch_dedup: send a token once per destination rank instead of once per expert.
        rms_norm_fusion: run the model's RMSNorms as one kernel each; rounds once instead of twice in half precision.
        moe_router_force_load_balancing: for benchmarks; replaces the routing by a balanced random one.
        delay_wgrad_compute: under an overlap schedule, compute expert weight gradients while the dispatch gradient travels.
        overlap_dispatch_backward_with_experts_wgrad: the same under an ordinary backward, without a schedule.
        gradient_accumulation_fusion: expert weight gradients are accumulated by their GEMM, with no temporary. Of
            half-precision parameters `.grad` is float32 until the window ends, then rounded to the parameter's dtype.
        overlap_grad_reduce: all-reduce gradients in buckets of `bucket_cap_mb` as soon as the window's last backward has
            completed them.
        cuda_graph_scope: ["attn", "moe_router"] launches the dense parts of every layer (all but the experts) as CUDA graphs,
            for micro-batches of one shape. What a layer returns is overwritten by a later micro-batch, and a `.grad` that
            is kept (not copied) by the next backward.
        experts_implementation: "grouped_mm", or "transformer_engine" for its grouped GEMMs on the same parameters, in
            the FP8 recipe of Lightning's `TransformerEnginePrecision` where that is the precision.
        timeout: how long ranks may wait for each other before the job ends; larger than any compile.
        uneven_data: when ranks have different numbers of training batches, "stop" ends each epoch with the first rank
            that has no more (and says so), "error" refuses. Evaluation and prediction see every batch anyway.
        kwargs: Lightning's `DDPStrategy` arguments: `process_group_backend`, `start_method`, `cluster_environment`,
            `bucket_cap_mb`, `broadcast_buffers` and so on. `find_unused_parameters` has nothing to do here: a parameter
            that no rank used keeps no gradient, one that some ranks used counts as zero on the others.

    Raises:
        ValueError: a value that means nothing, with the fix.
    """

    strategy_name = "ep_overlap"

    def __init__(
        self,
        expert_model_parallel_size: int = 1,
        moe_token_dispatcher_type: str = "alltoall",
        moe_flex_dispatcher_backend: str | None = None,
        overlap_moe_expert_parallel_comm: bool = False,
        overlap_schedule: OverlapSchedule = "auto",
        overlap_split_module: str | None = None,
        delay_wgrad_compute: bool = False,
        overlap_dispatch_backward_with_experts_wgrad: bool = False,
        gradient_accumulation_fusion: bool = False,
        overlap_grad_reduce: bool = False,
        moe_shared_expert_overlap: bool = False,
        moe_router_force_load_balancing: bool = False,
        moe_permute_fusion: bool = True,
        moe_dispatch_dedup: bool = True,
        rms_norm_fusion: bool = False,
        experts_implementation: ExpertsImplementation = "grouped_mm",
        moe_deepep_num_sms: int = 20,
        moe_hybridep_num_sms: int = 16,
        recompute_granularity: str | None = None,
        recompute_method: str | None = None,
        recompute_num_layers: int | None = None,
        recompute_modules: list[str] | None = None,
        pipeline_model_parallel_size: int = 1,
        virtual_pipeline_model_parallel_size: int | None = None,
        tensor_model_parallel_size: int = 1,
        cuda_graph_scope: list[str] | None = None,
        timeout: timedelta | None = DEFAULT_TIMEOUT,
        uneven_data: UnevenData = "stop",
        **kwargs: Any,
    ) -> None:
        given = locals()
        self.config = EPConfig(**{field.name: given[field.name] for field in fields(EPConfig)})
        super().__init__(timeout=timeout, uneven_data=uneven_data, **kwargs)
        check_ddp_arguments(self)
        self.mesh: ExpertMesh | None = None
        self.parallel: ParallelModel | None = None
        self._is_described = False  # validate and test after fit need not say it again
        self._may_close = True
        self._reducer: GradientReducer | None = None
        self._buffers: ReplicatedBuffers | None = None
        self._overlap: Overlap | None = None
        self._graphs: DenseGraphs | None = None
        self._syncing = True
        self._reduced = True
        self.last_grad_norm: Tensor | None = None

    # -- set-up, in Lightning's order

    def setup_environment(self) -> None:
        enforce(self._facts())  # before any process group and any weight exists
        super().setup_environment()
        # A model that exists already is cut here: callbacks that copy it in their setup must see local experts.
        if self.mesh is None or not self._may_close:
            self.mesh, self._may_close = self._build_mesh(), True
        assert self.lightning_module is not None
        self._is_described = self.parallel is not None and self.parallel.model is self.lightning_module
        self.parallel = ParallelModel(self.lightning_module, self.config, self.mesh, self._transport())
        self._cut()
        _cut_when_configured(self.lightning_module, self._cut)

    def _cut(self, required: bool = False) -> None:
        """Leave this rank's experts of what exists of the model; who copies it from now on copies only them."""
        assert self.parallel is not None
        enforce(self._facts())  # again: Lightning calls configure_model after the groups exist
        self.parallel.shard(required)
        self.parallel.materialize(self.root_device)

    def _facts(self) -> Facts:
        assert self.lightning_module is not None
        return gather_facts(self.config, self.lightning_module.trainer, self.lightning_module)

    def _build_mesh(self) -> ExpertMesh:
        arguments = (self.config.expert_model_parallel_size, self.root_device.type, self._timeout)
        kept = kept_mesh(*arguments)
        all_have_one = kept is not None if self._hosts is None else self._hosts.all(kept is not None)
        return kept if kept is not None and all_have_one else build_mesh(*arguments)

    def _facts_to_compare(self) -> Mapping[str, Any]:
        return {f"EPOverlapStrategy({name})": value for name, value in vars(self.config).items()}

    def _ep_ranks(self) -> list[int]:
        assert self.mesh is not None
        return dist.get_process_group_ranks(self.mesh.ep_group)

    def _serve(self, layer: int, *sizes: Any) -> None:
        assert self.parallel is not None
        with self.precision_plugin.forward_context():
            serve_experts(self.parallel.experts[layer].module, *sizes, self.root_device)

    def _transport(self) -> Transport | None:
        """What carries tokens instead of the EP group."""
        return None

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """`trainer.init_module(empty_init=True)` builds on the meta device; only local experts are ever allocated."""
        if empty_init:
            with torch.device("meta"):
                yield
        else:
            with super().tensor_init_context(empty_init):
                yield

    def setup(self, trainer: pl.Trainer) -> None:
        assert self.parallel is not None
        self._cut(required=True)
        if self.config.rms_norm_fusion:
            fuse_rms_norms(self.parallel.model)
        if not self._is_described:
            rank_zero_info(self.parallel.describe())
        super().setup(trainer)
        if self._is_fitting():
            check_optimizers(self.optimizers, self.parallel.model)
        else:  # Lightning made the dense parameters equal
            self.parallel.sync_expert_replicas()

    def configure_ddp(self) -> None:
        """Fitting: no DDP wrapper, whose hooks know nothing of two passes in flight; one reducer for all parameters."""
        assert self.parallel is not None and self.mesh is not None
        if self._ddp_kwargs.get("init_sync", True):
            _sync_module_states(self.lightning_module)
            self.parallel.sync_expert_replicas()
        check_gradients(self.parallel.model)
        dense, experts = self.parallel.trainable()
        if self._reducer is not None:
            self._reducer.close()
        self._reducer = GradientReducer(
            dense,
            experts,
            self.mesh,
            self._ddp_kwargs.get("bucket_cap_mb") or 25,
            float32=self.parallel.float32_gradients(),
            overlap=self.config.overlap_grad_reduce,
        )
        keeps = self._ddp_kwargs.get("broadcast_buffers", True)
        self._buffers = ReplicatedBuffers(self.parallel.model, self.parallel.ignored()) if keeps else None
        self._syncing = self._reduced = True  # an earlier fit may have ended anywhere
        self._record_graphs()
        self.use(self.config)
        rank_zero_info(self._overlap.describe())

    def _record_graphs(self) -> None:
        """From now on, if so asked; the experts and the exchange stay outside."""
        assert self.parallel is not None
        if self._graphs is not None:
            self._graphs.close()
            self._graphs = None
        if self.config.cuda_graph_scope:
            _, stack = find_stack(self.parallel.model, self.parallel.experts, self.config.overlap_split_module)
            self._graphs = DenseGraphs(
                stack, self.parallel.experts, self._recorder(), self.precision_plugin.forward_context
            )

    def _recorder(self) -> Recorder:
        return CudaRecorder(self.root_device)

    def use(self, config: EPConfig) -> None:
        """Overlap as `config` says from the next accumulation window on; also for matched comparisons in one run."""
        assert self.parallel is not None and self.lightning_module is not None
        if self._overlap is not None:
            self._overlap.close()
        module = self.lightning_module
        self._overlap = Overlap(
            config, self.parallel, module.trainer.accumulate_grad_batches, module.automatic_optimization
        )
        if self._graphs is not None:
            self._graphs.want(self._overlap.in_flight)

    def setup_precision_plugin(self) -> None:
        super().setup_precision_plugin()
        plugin = self.precision_plugin
        stock = isinstance(plugin, MixedPrecision) and not isinstance(plugin.scaler, AgreeingGradScaler)
        if stock and plugin.scaler is not None:
            plugin.scaler = AgreeingGradScaler(plugin.scaler, self.root_device)

    @property
    def precision_plugin(self) -> Precision:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        """Whatever plugin the Trainer chose clips by the norm of all experts, not of this rank's."""
        if plugin is not None:
            _clip_with(plugin, self)
        self._precision_plugin = plugin

    # -- a training step

    @contextmanager
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Lightning's gradient accumulation: gradients stay local inside."""
        self._syncing = False
        try:
            yield
        finally:
            self._syncing = True

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self._overlap is not None
        if self._graphs is not None and not self._overlap.is_parked:
            self._graphs.record_wanted()
        with self._overlap.forward_turns():
            return super().training_step(*args, **kwargs)

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Run the backward, or park it beside the next forward when the accumulation window goes on.

        Around a parked backward `on_before_backward` and `on_after_backward` run with the next `training_step`.
        """
        assert self._overlap is not None
        backward = _Backward(self, closure_loss, optimizer, args, kwargs, reduces=self._syncing)
        if not self._syncing and self._overlap.park(backward):
            return closure_loss.detach()
        backward.before()
        backward.run()
        return backward.after()

    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: pl.LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        def closed() -> Any:
            result = closure()
            self._reduce()  # the last micro-batch may have had no loss
            assert self.parallel is not None
            self.parallel.queue.assert_empty()
            if self._buffers is not None:
                self._buffers.broadcast()
            return result

        return super().optimizer_step(optimizer, closed, model, **kwargs)

    def _accumulate(self) -> None:
        """Gradients of a backward come on top of what is there, which may be reduced already (manual optimization)."""
        if self._reducer is not None:
            self._reducer.reopen()
            self._reduced = False

    def _reduce(self) -> None:
        if not self._reduced and self._reducer is not None:
            assert self.parallel is not None
            self.parallel.queue.assert_empty()
            self._reducer.reduce()
            self._reduced = True

    def clip_grad_norm(self, parameters: list[nn.Parameter], max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Clip by the norm over all experts of all ranks; returns it. Call it on every rank.

        `Trainer(gradient_clip_val=...)` does; a module that overrides `configure_gradient_clipping` may.
        """
        norm = self.grad_norm(parameters, norm_type)
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        self.last_grad_norm = norm
        return norm

    def grad_norm(self, parameters: list[nn.Parameter], norm_type: float = 2.0) -> Tensor:
        """The gradients' norm over all experts of all ranks. Call it on every rank."""
        assert self.parallel is not None and self.mesh is not None
        return global_grad_norm(parameters, self.parallel.expert_tensors(), self.mesh, norm_type)

    # -- checkpoints

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True  # only then it is known which experts this rank reads

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return checkpoint.optimizer_state(self, optimizer)

    def save_checkpoint(self, checkpoint_: dict[str, Any], filepath: str | Path, storage_options: Any = None) -> None:
        assert self.parallel is not None
        if not self.refuses_to_save(filepath):
            # In the place of a good one, a spoilt one would be worse than none.
            on_all_ranks(lambda: self.parallel.finite.refuse_nan(filepath))
            checkpoint.save(self, checkpoint_, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        """Code in a checkpoint is never executed, whatever `weights_only` says."""
        return checkpoint.load(self, checkpoint_path, fitting=self._is_fitting())

    def load_optimizer_state_dict(self, checkpoint_: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict({"optimizer_states": checkpoint.optimizer_states_to_load(self, checkpoint_)})

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        self._forget_unfinished()
        # Closing is collective, and the other ranks may be elsewhere.
        self._may_close = False

    def teardown(self) -> None:
        if self.lightning_module is not None:
            vars(self.lightning_module).pop("configure_model", None)
        self._forget_unfinished()
        if self._overlap is not None:
            self._overlap.close()
            self._overlap = None
        if self._graphs is not None:
            self._graphs.close()
            self._graphs = None
        if self.parallel is not None and self._may_close:
            self.parallel.close()
        keep_mesh(self.mesh if self._may_close else None, self._timeout)
        with left_where_it_is(self.lightning_module):
            super().teardown()

    def _forget_unfinished(self) -> None:
        """A backward whose partner never came, weight gradients of a backward that failed: never carried on."""
        if self._overlap is not None:
            self._overlap.drop()
        if self.parallel is not None:
            self.parallel.queue.drop()

    def remove_checkpoint(self, filepath: str | Path) -> None:
        checkpoint.remove(self, filepath)

    def _is_fitting(self) -> bool:
        assert self.lightning_module is not None
        return self.lightning_module.trainer.state.fn == TrainerFn.FITTING

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        if cls.strategy_name not in strategy_registry:
            strategy_registry.register(
                cls.strategy_name, cls, description="Expert parallelism with hidden communication"
            )


class _Backward:
    """The backward of one micro-batch: hooks before, the pass itself (maybe in another thread), hooks after."""

    def __init__(
        self,
        strategy: EPOverlapStrategy,
        loss: Tensor,
        optimizer: Optimizer | None,
        args: tuple,
        kwargs: dict[str, Any],
        reduces: bool,
    ) -> None:
        self.strategy, self.loss, self.optimizer, self.args, self.kwargs = strategy, loss, optimizer, args, kwargs
        self.reduces = reduces  # the last of its accumulation window

    def before(self) -> None:
        self.strategy.pre_backward(self.loss)
        self.loss = self.strategy.precision_plugin.pre_backward(self.loss, self.strategy.lightning_module)

    def run(self) -> None:
        self.strategy._accumulate()
        queue, reducer = self.strategy.parallel.queue, self.strategy._reducer
        if self.reduces:
            reducer.start()
        try:
            self.strategy.precision_plugin.backward(
                self.loss, self.strategy.lightning_module, self.optimizer, *self.args, **self.kwargs
            )
            queue.flush()
        except BaseException:
            queue.drop()
            reducer.abort()
            raise

    def after(self) -> Tensor:
        strategy = self.strategy
        if self.reduces:
            strategy._reduce()  # before on_after_backward: hooks and clipping see final gradients
        loss = strategy.precision_plugin.post_backward(self.loss, strategy.lightning_module)
        strategy.post_backward(loss)
        return loss


def _clip_with(plugin: Precision, strategy: EPOverlapStrategy) -> None:
    """Make `plugin` clip through `strategy`, keeping its type: its class name is a key in checkpoints."""

    def clip_grad_by_norm(optimizer: Optimizer, clip_val: int | float) -> None:
        strategy.clip_grad_norm(list(plugin.main_params(optimizer)), clip_val)

    plugin.clip_grad_by_norm = clip_grad_by_norm  # type: ignore[method-assign]


def _cut_when_configured(module: pl.LightningModule, cut: Callable[[], None]) -> None:
    """Let `configure_model` end with `cut`, whoever calls it: weight averaging does, and copies what was built.

    Inside, `lightning_ep.from_pretrained` leaves the weights to `materialize`.
    """
    build = module.configure_model
    if not is_overridden("configure_model", module):
        return

    @wraps(build)
    def configure_model() -> None:
        with experts_will_be_cut():
            build()
        cut()

    module.configure_model = configure_model  # type: ignore[method-assign]


EPOverlapStrategy.register_strategies(StrategyRegistry)
