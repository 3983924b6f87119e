"""Facts read from real models of transformers (on the meta device), from Trainers, and from statements."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import transformers
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from lightning_ep import EPOverlapStrategy
from lightning_ep.config import EPConfig
from lightning_ep.constraints import check, gather_facts
from lightning_ep.facts import Facts, batch_facts, capability, hardware_facts, parse_fact, state_facts
from lightning_ep.model_facts import model_facts

TINY = dict(
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=3,
    num_attention_heads=2,
    num_key_value_heads=2,
    vocab_size=64,
)
DEEPSEEK = dict(n_routed_experts=8, n_group=2, topk_group=1, moe_intermediate_size=8, q_lora_rank=8, kv_lora_rank=8)


def build(config: Any) -> nn.Module:
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


def qwen2_moe(**changes: Any) -> nn.Module:
    sizes = dict(num_experts=4, moe_intermediate_size=8, shared_expert_intermediate_size=24)
    return build(transformers.Qwen2MoeConfig(**TINY | sizes | changes))


def deepseek_v3(**changes: Any) -> nn.Module:
    return build(transformers.DeepseekV3Config(**TINY | DEEPSEEK | {"first_k_dense_replace": 1} | changes))


def facts_of(model: nn.Module, **options: Any) -> Facts:
    return gather_facts(EPConfig(**options), model=model)


def test_qwen2_moe_has_a_shared_expert_and_a_qkv_bias() -> None:
    facts = facts_of(qwen2_moe())
    assert facts.num_moe_experts == 4
    assert facts.moe_shared_expert_intermediate_size == 24
    assert (facts.add_qkv_bias, facts.add_bias_linear) == (True, False)
    assert facts.origins["num_moe_experts"] == "num_experts of Qwen2MoeConfig"
    assert facts.transformers_version == transformers.__version__
    assert facts.origins["add_qkv_bias"] == "model.layers.0.self_attn.q_proj has a bias"
    assert facts_of(qwen2_moe(qkv_bias=False)).add_qkv_bias is False


def test_gpt_oss_has_both_biases() -> None:
    facts = facts_of(build(transformers.GptOssConfig(**TINY, num_local_experts=4)))
    assert (facts.num_moe_experts, facts.add_qkv_bias, facts.add_bias_linear) == (4, True, True)
    assert facts.moe_shared_expert_intermediate_size is None


def test_mixtral_has_neither() -> None:
    facts = facts_of(build(transformers.MixtralConfig(**TINY, num_local_experts=4)))
    assert (facts.num_moe_experts, facts.add_qkv_bias, facts.add_bias_linear) == (4, False, False)


@pytest.mark.parametrize("layers", [0, 1, 2])
def test_deepseek_v3_counts_its_next_token_prediction_layers(layers: int) -> None:
    facts = facts_of(deepseek_v3(num_nextn_predict_layers=layers), overlap_moe_expert_parallel_comm=True)
    assert facts.mtp_num_layers == layers
    assert facts.origins["mtp_num_layers"] == "num_nextn_predict_layers of DeepseekV3Config"
    assert facts.origins["num_moe_experts"] == "n_routed_experts of DeepseekV3Config"
    assert ("overlap-mtp-layers" in {v.id for v in check(facts)}) == (layers > 1)


def test_deepseek_shared_experts_are_counted_in_routed_ones() -> None:
    assert facts_of(deepseek_v3(n_shared_experts=2)).moe_shared_expert_intermediate_size == 16


def test_gradient_checkpointing_of_transformers_is_full_recompute() -> None:
    model = qwen2_moe()
    assert facts_of(model).recompute_granularity is None
    model.gradient_checkpointing_enable()
    facts = facts_of(model, overlap_moe_expert_parallel_comm=True)
    assert (facts.recompute_granularity, facts.recomputed_layers) == ("full", 3)
    (found,) = [v for v in check(facts) if v.id == "overlap-full-recompute"]
    assert (
        "activation checkpointing is on for 3 modules with experts inside, the first is model.layers.0" in found.cause
    )
    assert "gradient_checkpointing_enable()" in found.fix
    model.gradient_checkpointing_disable()
    assert facts_of(model).recompute_granularity is None


@pytest.mark.parametrize(("every", "layers"), [(1, 2), (2, 1), (3, 0)])
def test_only_layers_with_experts_count(every: int, layers: int) -> None:
    # The first of three layers is dense: every third layer is that one alone.
    model = deepseek_v3()
    model.gradient_checkpointing_enable(every_n_layers=every)
    facts = facts_of(model)
    assert facts.recomputed_layers == layers
    assert facts.recompute_granularity == ("full" if layers else None)


def test_checkpointing_of_attention_alone_is_allowed() -> None:
    model = qwen2_moe()
    for layer in model.model.layers:
        layer.self_attn = checkpoint_wrapper(layer.self_attn)
    facts = facts_of(model, overlap_moe_expert_parallel_comm=True)
    assert (facts.recompute_granularity, facts.recomputed_layers) == (None, 0)
    assert facts.add_qkv_bias is True  # the wrapper hides nothing from the search
    model.model.layers[1].mlp = checkpoint_wrapper(model.model.layers[1].mlp)
    assert facts_of(model).recomputed_layers == 1


class Wrapped(pl.LightningModule):
    """A model that is built in `configure_model`, as a large one should be."""

    def __init__(self, config: Any, batch_size: int = 2, sequence_length: int = 32) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["config"])
        self.config = config

    def configure_model(self) -> None:
        self.model = build(self.config)


def test_a_module_without_weights_shows_its_config() -> None:
    module = Wrapped(transformers.Qwen2MoeConfig(**TINY, num_experts=6, num_nextn_predict_layers=2))
    early, origins = model_facts(module)
    assert early["num_moe_experts"] == 6
    assert "recomputed_layers" not in early and origins["num_moe_experts"] == "num_experts of Qwen2MoeConfig"
    module.configure_model()
    late, _ = model_facts(module)
    assert late["recomputed_layers"] == 0 and late["num_moe_experts"] == 6


def test_nothing_is_known_of_an_empty_module() -> None:
    facts = facts_of(pl.LightningModule())
    assert facts.transformers_version is None  # installed, and not used
    assert facts.num_moe_experts is None and facts.add_qkv_bias is None and facts.recomputed_layers is None


class OwnExperts(nn.Module):
    def __init__(self, experts: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 8, 4))
        self.down_proj = nn.Parameter(torch.empty(experts, 4, 4))

    def forward(self, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
        raise NotImplementedError  # only looked at


def test_own_experts_are_counted_without_a_config() -> None:
    facts = facts_of(nn.Sequential(OwnExperts(8), OwnExperts(12)), expert_model_parallel_size=8)
    assert facts.num_moe_experts == 4  # what both can be divided by
    assert "experts-divisible" in {v.id for v in check(facts)}


def test_experts_that_are_cut_already_count_as_all_of_them() -> None:
    cut = OwnExperts(2)
    cut._ep_num_experts = 8  # what the strategy leaves on a module of which this rank holds a quarter
    assert facts_of(cut, expert_model_parallel_size=4).num_moe_experts == 8


def test_trainer_facts_need_no_process_group() -> None:
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, num_nodes=3, strategy="ddp", precision="bf16-mixed",
        accumulate_grad_batches=4, logger=False, enable_checkpointing=False, enable_progress_bar=False,
    )  # fmt: skip
    facts = gather_facts(EPConfig(expert_model_parallel_size=2), trainer, Wrapped(None))
    assert not torch.distributed.is_initialized()
    assert (facts.precision, facts.accumulate_grad_batches) == ("bf16-mixed", 4)
    assert (facts.world_size, facts.num_nodes, facts.accelerator) == (6, 3, "cpu")
    assert (facts.batch_size, facts.tokens_per_rank) == (2, 64)
    assert facts.torch_version == torch.__version__
    assert facts.gpu_name is None


class OwnIO(TorchCheckpointIO):
    """Of the user."""


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ({}, {}),
        ({"enable_checkpointing": False, "default_root_dir": "memory://run"}, {}),
        ({"default_root_dir": "memory://run"}, {"checkpoint_dir": ("memory://run", "default_root_dir of the Trainer")}),
        ({"default_root_dir": "memory://run", "logger": True},
         {"checkpoint_dir": ("memory://run", "default_root_dir of the Trainer")}),
        ({"callbacks": [ModelCheckpoint(dirpath="memory://run")]},
         {"checkpoint_dir": ("memory://run", "dirpath of ModelCheckpoint")}),
        # One of two is enough, and a dirpath of its own spares a callback the default.
        ({"callbacks": [ModelCheckpoint(dirpath="here"), OnExceptionCheckpoint("memory://run")]},
         {"checkpoint_dir": ("memory://run", "dirpath of OnExceptionCheckpoint")}),
        ({"callbacks": [ModelCheckpoint(dirpath="here")], "default_root_dir": "memory://run"}, {}),
        ({"logger": CSVLogger("memory://logs")}, {"checkpoint_dir": ("memory://logs", "save_dir of CSVLogger")}),
        ({"logger": CSVLogger("logs"), "default_root_dir": "memory://run"}, {}),
        ({"plugins": [AsyncCheckpointIO()]}, {"checkpoint_io": ("AsyncCheckpointIO", "in plugins of the Trainer")}),
        ({"plugins": [OwnIO()]}, {"checkpoint_io": ("OwnIO", "in plugins of the Trainer")}),
        ({"plugins": [TorchCheckpointIO()]}, {}),
        ({"strategy": EPOverlapStrategy(checkpoint_io=OwnIO())}, {"checkpoint_io": ("OwnIO", "in plugins of the Trainer")}),
    ],
)  # fmt: skip
def test_where_checkpoints_would_go(arguments: dict[str, Any], found: dict[str, tuple[str, str]]) -> None:
    quiet = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False}
    trainer = pl.Trainer(**quiet | arguments)
    facts = gather_facts(EPConfig(), trainer)
    violated = {"checkpoint_dir": "checkpoint-dir-remote", "checkpoint_io": "checkpoint-io"}
    assert {v.id for v in check(facts)} & set(violated.values()) == {violated[name] for name in found}
    for name, (value, origin) in found.items():
        assert (getattr(facts, name), facts.origins[name]) == (value, origin)
    trainer.state.fn = TrainerFn.VALIDATING  # saves nothing
    assert gather_facts(EPConfig(), trainer).checkpoint_dir is None


def test_manual_optimization_is_seen() -> None:
    module = pl.LightningModule()
    assert facts_of(module).automatic_optimization is True
    module.automatic_optimization = False
    facts = facts_of(module, overlap_moe_expert_parallel_comm=True, overlap_schedule="1f1b")
    assert "overlap-1f1b-manual" in {v.id for v in check(facts)}
    assert facts_of(nn.Linear(1, 1)).automatic_optimization is None


def test_batch_facts_take_only_sizes() -> None:
    assert batch_facts({"batch_size": "auto"}, {"micro_batch_size": 3}) == {"batch_size": 3, "tokens_per_rank": None}
    assert batch_facts({}) == {"batch_size": None, "tokens_per_rank": None}


@pytest.mark.parametrize(("value", "known"), [("1", 1), ("32", 32), ("", None), ("many", None)])
def test_launch_queues(value: str, known: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", value)
    assert hardware_facts("cpu") == {"cuda_device_max_connections": known}


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("expert_model_parallel_size", "16", 16),
        ("overlap_moe_expert_parallel_comm", "True", True),
        ("delay_wgrad_compute", "false", False),
        ("recompute_modules", "moe, core_attn", ("moe", "core_attn")),
        ("recompute_modules", "['moe']", ("moe",)),
        ("cuda_graph_scope", "none", ()),
        ("moe_flex_dispatcher_backend", "None", None),
        ("mtp_num_layers", "null", None),
        ("precision", "bf16-mixed", "bf16-mixed"),
        ("gpu_capability", "9.0", (9, 0)),
        ("gpu_capability", "sm_103", (10, 3)),
        ("gpu_capability", "(10, 0)", (10, 0)),
        ("te_version", "2.12.0", "2.12.0"),
        ("add_qkv_bias", "yes", True),
    ],
)
def test_statements(name: str, text: str, value: Any) -> None:
    facts = state_facts(Facts(origins={name: "elsewhere"}), {name: text})
    assert getattr(facts, name) == value
    assert facts.origins[name] == f"--fact {name}"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("world_size", "many"),
        ("add_qkv_bias", "perhaps"),
        ("te_version", "2.x.y"),
        ("gpu_capability", "hopper"),
        ("expert_model_parallel_size", "none"),
        ("delay_wgrad_compute", ""),
        ("nonsense", "1"),
    ],
)
def test_statements_that_are_none(name: str, text: str) -> None:
    with pytest.raises(ValueError, match=name):
        parse_fact(name, text)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("NVIDIA H200", (9, 0)),
        ("Tesla V100-SXM2", (7, 0)),
        ("NVIDIA GB300", (10, 3)),
        ("NVIDIA A100-SXM4", (8, 0)),
        ("NVIDIA L4", (8, 9)),
        ("NVIDIA B200", (10, 0)),
        ("Radeon", None),
    ],
)
def test_a_named_gpu_has_a_capability(name: str, found: tuple[int, int] | None) -> None:
    assert capability(Facts(gpu_name=name)) == found
    assert capability(Facts(gpu_name=name, gpu_capability=(6, 1))) == (6, 1)
