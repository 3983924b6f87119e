"""Which GPU gets which backend, without the hardware: device properties are passed in."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import Qwen3MoeConfig

from lightning_ep.flex import (
    apply_flex_dispatcher_backend,
    both_overridden,
    settle_dispatcher,
    supports,
    validate_flex_dispatcher_backend,
)


@dataclass
class GPU:
    name: str
    major: int
    minor: int


A100 = GPU("NVIDIA A100-SXM4-80GB", 8, 0)
L40S = GPU("NVIDIA L40S", 8, 9)
H100 = GPU("NVIDIA H100 80GB HBM3", 9, 0)
GH200 = GPU("NVIDIA GH200 480GB", 9, 0)
B200 = GPU("NVIDIA B200", 10, 0)
B300 = GPU("NVIDIA B300 SXM6 AC", 10, 3)
GB200 = GPU("NVIDIA GB200", 10, 0)
GB300 = GPU("NVIDIA GB300", 10, 3)
V100 = GPU("Tesla V100-SXM2-32GB", 7, 0)
RTX5090 = GPU("NVIDIA GeForce RTX 5090", 12, 0)

SUPPORTED = {
    "deepep": (A100, L40S, H100, GH200, B200, B300),
    "hybridep": (A100, L40S, H100, GH200, B200, B300, GB200, GB300),
}
EVERY = (A100, L40S, H100, GH200, B200, B300, GB200, GB300, V100, RTX5090)
YES = [(backend, gpu) for backend, gpus in SUPPORTED.items() for gpu in gpus]
NO = [(backend, gpu) for backend, gpus in SUPPORTED.items() for gpu in EVERY if gpu not in gpus]


def moe(**changes: Any) -> SimpleNamespace:
    settings = dict(
        num_moe_experts=64,
        moe_token_dispatcher_type="alltoall",
        moe_flex_dispatcher_backend=None,
        moe_shared_expert_overlap=True,
    )
    return SimpleNamespace(**settings | changes)


@pytest.mark.parametrize(("backend", "gpu"), YES, ids=str)
def test_switches_to_flex(backend: str, gpu: GPU) -> None:
    config = moe()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        apply_flex_dispatcher_backend(config, backend, device_properties=gpu)
        validate_flex_dispatcher_backend(config, device_properties=gpu)
    assert config == moe(
        moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend=backend, moe_shared_expert_overlap=False
    )


@pytest.mark.parametrize(("backend", "gpu"), NO, ids=str)
def test_falls_back_on_other_gpus(backend: str, gpu: GPU) -> None:
    config = moe(moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend="deepep")
    with pytest.warns(UserWarning, match=f"{gpu.name}.*Falling back"):
        apply_flex_dispatcher_backend(config, moe_flex_dispatcher_backend=backend, device_properties=gpu)
    assert config == moe()


@pytest.mark.parametrize(("backend", "gpu"), NO, ids=str)
def test_refuses_other_gpus(backend: str, gpu: GPU) -> None:
    config = moe(moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend=backend)
    with pytest.raises(ValueError, match=f"{backend}.*{gpu.name}"):
        validate_flex_dispatcher_backend(config, device_properties=gpu)


@pytest.mark.parametrize("backend", ["deepep", "hybridep"])
def test_a_login_node_records_the_wish(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    config = moe()
    apply_flex_dispatcher_backend(config, backend)
    validate_flex_dispatcher_backend(config)
    assert (config.moe_token_dispatcher_type, config.moe_flex_dispatcher_backend) == ("flex", backend)
    assert config.moe_shared_expert_overlap is False


@pytest.mark.parametrize("experts", [None, 0])
def test_dense_models_stay_as_they_are(experts: int | None) -> None:
    config = moe(num_moe_experts=experts)
    with pytest.warns(UserWarning, match="MoE models only"):
        apply_flex_dispatcher_backend(config, "deepep", device_properties=H100)
    assert config == moe(num_moe_experts=experts)


@pytest.mark.parametrize("backend", ["nvshmem", "DeepEP", None])
def test_unknown_backends_change_nothing(backend: str | None) -> None:
    config = moe()
    with pytest.warns(UserWarning, match="no backend of the flex dispatcher"):
        apply_flex_dispatcher_backend(config, backend, device_properties=H100)
    assert config == moe()


def test_unknown_backends_are_refused() -> None:
    with pytest.raises(ValueError, match="'nvshmem' is unknown; use one of 'deepep', 'hybridep'"):
        validate_flex_dispatcher_backend(
            moe(moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend="nvshmem"), device_properties=H100
        )


def test_a_cleared_backend_restores_alltoall() -> None:
    config = moe(moe_token_dispatcher_type="flex")
    validate_flex_dispatcher_backend(config, device_properties=V100)
    assert config == moe()


def test_alltoall_needs_no_gpu_and_asks_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: pytest.fail("the GPU was asked"))
    validate_flex_dispatcher_backend(moe(moe_flex_dispatcher_backend="deepep"))


@pytest.mark.parametrize("call", ["apply", "validate"])
def test_errors_of_the_gpu_query_propagate(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(device: int) -> None:
        raise RuntimeError("CUDA driver version is insufficient")

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_properties", broken)
    with pytest.raises(RuntimeError, match="driver version"):
        if call == "apply":
            apply_flex_dispatcher_backend(moe(), "deepep")
        else:
            config = moe(moe_token_dispatcher_type="flex", moe_flex_dispatcher_backend="deepep")
            validate_flex_dispatcher_backend(config)


def test_warnings_come_from_rank_zero_only(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.pytorch.utilities.rank_zero import rank_zero_only

    monkeypatch.setattr(rank_zero_only, "rank", 3, raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        apply_flex_dispatcher_backend(moe(), "deepep", device_properties=V100)


@dataclass
class Settings:
    num_local_experts: int = 8
    moe_token_dispatcher_type: str = "alltoall"
    moe_flex_dispatcher_backend: str | None = None
    moe_shared_expert_overlap: bool = True


def test_dataclasses_and_mappings_are_configs_too() -> None:
    settings, mapping = Settings(), {"num_experts": 8}
    for config in (settings, mapping):
        apply_flex_dispatcher_backend(config, "hybridep", device_properties=GB200)
        validate_flex_dispatcher_backend(config, device_properties=GB200)
    assert settings == Settings(8, "flex", "hybridep", False)
    assert mapping == {
        "num_experts": 8,
        "moe_token_dispatcher_type": "flex",
        "moe_flex_dispatcher_backend": "hybridep",
        "moe_shared_expert_overlap": False,
    }


def test_a_hugging_face_config_is_a_config() -> None:
    config = Qwen3MoeConfig(num_experts=8)
    apply_flex_dispatcher_backend(config, "deepep", device_properties=H100)
    assert (config.moe_token_dispatcher_type, config.moe_flex_dispatcher_backend) == ("flex", "deepep")


def test_unnamed_gpus_are_judged_as_far_as_possible() -> None:
    assert supports("deepep", None, None) is None
    assert supports("deepep", None, (10, 0)) is None  # B200 or GB200?
    assert supports("deepep", None, (9, 0)) is True
    assert supports("hybridep", None, (10, 0)) is True
    assert supports("hybridep", None, (7, 5)) is False


@pytest.mark.parametrize(
    ("kind", "backend", "settled"),
    [
        ("alltoall", "deepep", ("flex", "deepep")),
        ("alltoall", "hybridep", ("flex", "hybridep")),
        ("flex", None, ("alltoall", None)),
        ("flex", "None", ("alltoall", None)),
    ],
)
def test_the_backend_wins_and_says_so(kind: str, backend: str | None, settled: tuple[str, str | None]) -> None:
    *result, sentence = settle_dispatcher(kind, backend)
    assert tuple(result) == settled
    assert "the backend wins" in sentence


@pytest.mark.parametrize(("kind", "backend"), [("alltoall", None), ("flex", "deepep"), ("flex", "nvshmem")])
def test_nothing_to_settle(kind: str, backend: str | None) -> None:
    assert settle_dispatcher(kind, backend) == (kind, backend, "")


def test_only_two_overrides_are_settled() -> None:
    strategy = "--trainer.strategy.init_args"
    kind, backend = f"{strategy}.moe_token_dispatcher_type", f"{strategy}.moe_flex_dispatcher_backend"
    assert both_overridden(["fit", "--config", "x.yaml", f"{kind}=alltoall", f"{backend}=deepep"])
    assert both_overridden([kind, "alltoall", "--trainer.strategy.moe_flex_dispatcher_backend", "null"])
    assert not both_overridden([f"{backend}=deepep"])
    assert not both_overridden([f"{kind}=flex", "--model.moe_flex_dispatcher_backend=deepep"])
