"""The flex dispatchers beside their numbers (test_conformance.py): buffers, turns, errors, what is left after a step."""

from __future__ import annotations

import gc
import os
import sys
import weakref

import pytest
import torch
import torch.distributed as dist

from lightning_ep import libraries
from lightning_ep.config import EPConfig
from lightning_ep.dispatch import deepep, hybridep, make_carrier
from lightning_ep.dispatch.alltoall import GroupTransport
from lightning_ep.dispatch.base import dispatch
from lightning_ep.dispatch.hybridep import HybridEPDispatcher
from lightning_ep.experts.model import ParallelModel
from lightning_ep.flex import unreachable
from lightning_ep.libraries import DEEPEP, HYBRIDEP, LibraryError, load
from lightning_ep.schedule import turns
from tests.dispatch import conformance, fake_deep_ep
from tests.dispatch.conformance import OPTIONS, any_experts, make_batch, make_experts
from tests.distributed import run_distributed
from tests.experts.spread import make_mesh, run, spread
from tests.trained import train_distributed

CPU, BF16 = torch.device("cpu"), torch.bfloat16


def batch_of(rank: int, hidden: int = 32, tokens: int = 6, dtype: torch.dtype = BF16):
    return make_batch(any_experts(tokens, rank), hidden, rank, dtype, CPU)


def both_layers(parallel: ParallelModel, layers: list, hidden: list[int]) -> None:
    for layer, size in zip(layers, hidden, strict=True):
        run(layer, batch_of(dist.get_rank(), size), parallel)


# -- buffers


def buffers_of_a_model(version: str, backend: str) -> tuple[list[str], int, int]:
    """Calls that made or destroyed buffers over two steps of a model whose second layer is wider; buffers left."""
    mesh = make_mesh(2)
    with fake_deep_ep.installed(version):
        root = torch.nn.ModuleList(make_experts(hidden, 24, BF16) for hidden in (32, 64))
        config = EPConfig(expert_model_parallel_size=2, moe_deepep_num_sms=12, **OPTIONS[backend])
        parallel = ParallelModel(root, config, mesh)
        parallel.shard()
        for _ in range(2):
            both_layers(parallel, list(root), [32, 64])
        alive = len(fake_deep_ep.alive)
        parallel.close()
        both_layers(parallel, list(root), [32, 64])  # opens again
        parallel.close()
        made = [call for call in fake_deep_ep.calls if call.endswith("Buffer") or call == "destroy"]
        return made, alive, len(fake_deep_ep.alive)


def test_one_deepep_buffer_for_all_layers_grown_where_needed_and_destroyed() -> None:
    grown = ["Buffer", "destroy", "Buffer", "destroy"]
    assert run_distributed(buffers_of_a_model, 2, "1.2", "deepep") == [(grown * 2, 1, 0)] * 2
    assert fake_deep_ep.Buffer.num_sms == 20  # the ranks' processes set theirs


def test_one_elastic_buffer_for_all_layers() -> None:
    grown = ["ElasticBuffer", "destroy"] * 2
    assert run_distributed(buffers_of_a_model, 2, "2.1", "deepep") == [(grown * 2, 1, 0)] * 2


def test_one_hybridep_buffer_for_all_layers() -> None:
    # The smaller one stays too: freed by one rank alone, another's kernel may still poll it.
    assert run_distributed(buffers_of_a_model, 2, "hybrid-ep", "hybridep") == [(["HybridEPBuffer"] * 4, 2, 0)] * 2


def hybridep_capacities() -> list[tuple[int, int, int]]:
    mesh = make_mesh(2)
    with fake_deep_ep.installed("hybrid-ep"):
        group = make_carrier(EPConfig(2, **OPTIONS["hybridep"]), mesh)
        return [group.buffer(32, tokens, 4).capacity for tokens in (16, 512, 528, 100, 17_000, 21_824)]


def test_hybridep_grows_in_large_steps_up_to_its_limit_across_domains() -> None:
    tokens = [512, 512, 1024, 1024, 21_824, 21_824]
    assert run_distributed(hybridep_capacities, 2) == [[(32, n, 4) for n in tokens]] * 2
    assert hybridep._rounded(21_825) == 32_768


def hybridep_too_large() -> str:
    with fake_deep_ep.installed("hybrid-ep"):
        group = make_carrier(EPConfig(2, **OPTIONS["hybridep"]), make_mesh(2))
        with pytest.raises(RuntimeError) as error:
            group.buffer(32, 200_000, 4)
        return str(error.value)


def test_a_buffer_that_hybridep_refuses() -> None:
    for text in run_distributed(hybridep_too_large, 2):
        assert "262144 tokens of 32 and 4 experts on each of 2 ranks: The buffer config is not valid" in text
        assert "3 x tokens + 1 below 65,536" in text


def padded_rows(pad_multiple: int) -> dict[str, float]:
    """Conformance where each expert's rows are filled up with zeros."""
    usual = hybridep.HybridEPDispatcher.__init__.__defaults__
    HybridEPDispatcher.__init__.__defaults__ = (*usual[:-1], pad_multiple)
    try:
        with fake_deep_ep.installed("hybrid-ep"), conformance.poisoned_memory():
            routing = conformance.ROUTINGS["other numbers of tokens on each rank and step"]
            return conformance.errors_of(routing, make_mesh(2), 32, 24, BF16, CPU, **OPTIONS["hybridep"])
    finally:
        HybridEPDispatcher.__init__.__defaults__ = usual


def test_experts_rows_filled_up_to_a_multiple() -> None:
    for errors in run_distributed(padded_rows, 2, 16):
        assert len(errors) == 8 and not conformance.wrong(errors, BF16)


# -- turns


class Recorder:
    """A schedule with nobody else in it."""

    def hand_over(self, me: int) -> None:
        fake_deep_ep.calls.append("turn" if me == turns.FORWARD else "turn (backward)")


def order_of_calls(version: str, backend: str) -> list[str]:
    with fake_deep_ep.installed(version):
        experts, parallel = spread(make_experts(32, 24, BF16), make_mesh(2), **OPTIONS[backend])
        run(experts, batch_of(dist.get_rank()), parallel)  # makes the buffer
        fake_deep_ep.calls.clear()
        turns.activate(Recorder())
        try:
            run(experts, batch_of(dist.get_rank()), parallel)
        finally:
            turns.activate(None)
        parallel.close()
        return [call for call in fake_deep_ep.calls if call != "destroy"]


@pytest.mark.parametrize(
    ("version", "backend", "before"),
    [("1.2", "deepep", ["layout"]), ("2.1", "deepep", []), ("hybrid-ep", "hybridep", [])],
)
def test_the_turn_goes_before_the_host_waits_and_after_every_launch(version: str, backend: str, before: list) -> None:
    forward = [*before, "turn", "dispatch", "turn", "combine", "turn"]
    back = "turn (backward)"
    backward = ["dispatch again", back, back, "combine", back]
    assert run_distributed(order_of_calls, 2, version, backend) == [forward + backward] * 2


def trained(overlap: bool) -> dict:
    import lightning_ep.strategy

    enforce, lightning_ep.strategy.enforce = lightning_ep.strategy.enforce, lambda facts: None  # "DeepEP needs a GPU"
    try:
        with fake_deep_ep.installed("1.2"):
            options = {
                "strategy": OPTIONS["deepep"] | {"overlap_moe_expert_parallel_comm": overlap},
                "trainer": {"precision": "bf16-true"},
            }
            result = train_distributed("qwen3_moe", 2, 2, 2, None, "adamw", 1e-2, options)
            assert "dispatch" in fake_deep_ep.calls and not fake_deep_ep.alive, "teardown closes the buffer"
            return result
    finally:
        lightning_ep.strategy.enforce = enforce


def test_training_with_overlap_changes_no_bit() -> None:
    for plain, overlapped in zip(*(run_distributed(trained, 2, overlap) for overlap in (False, True)), strict=True):
        assert plain["losses"] == overlapped["losses"]
        assert all(torch.equal(plain["params"][name], p) for name, p in overlapped["params"].items())


# -- what is left


def exchanges_left(version: str, backend: str) -> tuple[int, int]:
    """Exchanges alive after steps, and after forwards without backward."""
    kinds = {"deepep": deepep.DeepEPExchange, "hybridep": hybridep.HybridEPExchange}
    seen = weakref.WeakSet()
    made = kinds[backend].__init__

    def counted(self, *args) -> None:
        seen.add(self)
        made(self, *args)

    kinds[backend].__init__ = counted
    try:
        with fake_deep_ep.installed(version):
            experts, parallel = spread(make_experts(32, 24, BF16), make_mesh(2), **OPTIONS[backend])
            batch = batch_of(dist.get_rank())
            for _ in range(3):
                run(experts, batch, parallel)
            gc.collect()
            after_steps = len(seen)
            with torch.no_grad():
                experts(batch.x_TD, batch.index_TK, batch.weights_TK)
            return after_steps, len(seen)
    finally:
        kinds[backend].__init__ = made


@pytest.mark.parametrize(("version", "backend"), [("1.2", "deepep"), ("2.1", "deepep"), ("hybrid-ep", "hybridep")])
def test_no_handle_outlives_its_step(version: str, backend: str) -> None:
    assert run_distributed(exchanges_left, 2, version, backend) == [(0, 0)] * 2


# -- errors


def error_of(version: str, backend: str, what: str) -> str:
    rank = dist.get_rank()
    with fake_deep_ep.installed(version):
        hidden = 40 if what == "hidden" else 32
        dtype = torch.float32 if what == "dtype" else BF16
        experts, _ = spread(make_experts(hidden, 24, dtype), make_mesh(2), **OPTIONS[backend])
        batch = batch_of(rank, hidden, dtype=dtype)
        if what == "ids" and rank == 0:
            batch.index_TK[0, 0] = conformance.NUM_EXPERTS
        if what == "time-out":
            fake_deep_ep.Buffer.dispatch = lambda *args, **kwargs: (_ for _ in ()).throw(
                RuntimeError("DeepEP error: CPU recv timeout")
            )
        try:
            exchange = experts._expert_parallel.dispatcher.route(batch.index_TK)
            dispatch(exchange, batch.x_TD, batch.weights_TK)
        except (ValueError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
        return ""


@pytest.mark.parametrize(("version", "backend"), [("1.2", "deepep"), ("2.1", "deepep"), ("hybrid-ep", "hybridep")])
def test_tokens_that_cannot_travel(version: str, backend: str) -> None:
    for text in run_distributed(error_of, 2, version, backend, "dtype"):
        assert f"moe_flex_dispatcher_backend='{backend}' moves bfloat16 tokens, and these are torch.float32" in text
        assert "precision='bf16-mixed'" in text and text.startswith("ValueError")
    for text in run_distributed(error_of, 2, version, backend, "hidden"):
        assert "multiple of 16" in text and "hidden_size=40" in text and text.startswith("ValueError")


def test_ids_of_no_expert() -> None:
    wrong = "MoE layer 0: expert ids outside [0, 8), or weights that are not finite, came from the router of EP ranks {0: 1} (rank: how many)"
    first, second = run_distributed(error_of, 2, "1.2", "deepep", "ids")
    assert wrong in first and second == ""  # nobody tells the others: a guard of the strategy's ends them
    assert all(wrong in text for text in run_distributed(error_of, 2, "hybrid-ep", "hybridep", "ids"))


def time_out() -> str:
    dispatch = fake_deep_ep.Buffer.dispatch
    try:
        return error_of("1.2", "deepep", "time-out")
    finally:
        fake_deep_ep.Buffer.dispatch = dispatch


def test_a_time_out_says_where() -> None:
    for rank, text in enumerate(run_distributed(time_out, 2)):
        assert (
            f"failed in MoE layer 0, its exchange number 1, on EP rank {rank} of 2, which sends 6 tokens of 32" in text
        )
        assert "CPU recv timeout" in text and "look at the other ranks first" in text


def test_a_group_that_deepep_cannot_connect() -> None:
    assert not unreachable(8, 8) and not unreachable(16, 8) and not unreachable(2, 4)
    for size, per_node in ((16, 4), (8, 4), (12, 8)):
        text = unreachable(size, per_node)
        assert f"expert_model_parallel_size={size} spans nodes of {per_node} ranks" in text and "alltoall" in text


def nodes_of_one() -> str:
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    with fake_deep_ep.installed("1.2"), pytest.raises(ValueError) as error:
        make_carrier(EPConfig(2, **OPTIONS["deepep"]), make_mesh(2))
    return str(error.value)


def test_the_group_is_looked_at_before_training() -> None:
    assert all("spans nodes of 1 ranks" in text for text in run_distributed(nodes_of_one, 2))


def alone() -> bool:
    return all(
        isinstance(make_carrier(EPConfig(1, **OPTIONS[name]), make_mesh(1)), GroupTransport)
        for name in ("deepep", "hybridep")
    )


def test_one_rank_needs_no_library() -> None:
    assert run_distributed(alone, 1) == [True]


def test_hybridep_wants_experts_in_fours() -> None:
    with pytest.raises(ValueError, match=r"multiple of 4 experts, and MoE layer 3 has 6"):
        HybridEPDispatcher(6, None, 3)


# -- libraries


def test_a_missing_library_is_one_error_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LibraryError) as error:
        load(DEEPEP)
    assert str(error.value) == (
        "DeepEP cannot be used. Looked for: deep_ep.Buffer. Found: no module deep_ep in this environment. Fix: pip install "
        "'lightning-ep[deepep]', check with `lightning-ep doctor`, or set moe_token_dispatcher_type='alltoall'"
    )
    with fake_deep_ep.installed("1.2"), pytest.raises(LibraryError) as error:
        load(HYBRIDEP)
    assert "without HybridEPBuffer" in str(error.value) and "branch hybrid-ep" in str(error.value)


@pytest.mark.parametrize(
    ("fault", "advice"),
    [
        ("libnvshmem_host.so.3: cannot open shared object file", "pip install nvidia-nvshmem-cu13"),
        ("undefined symbol: _ZN3c104cuda", f"built for another torch than {torch.__version__}"),
        ("anything else", "pip install 'lightning-ep[deepep]'"),
    ],
)
def test_a_library_that_does_not_import(fault: str, advice: str, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deep_ep.py").write_text(f"raise ImportError({fault!r})")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(LibraryError) as error:
        load(DEEPEP)
    assert fault in str(error.value) and advice in str(error.value)
    assert "deep_ep" not in sys.modules


def test_no_ibgda_is_one_error(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "params").write_text('EnableStreamMemOPs: 0\nRegistryDwords: ""\n')
    found = libraries.ibgda(tmp_path / "params")
    monkeypatch.setattr(libraries, "ibgda", lambda: found)
    with pytest.raises(LibraryError) as error:
        libraries.require_ibgda()
    for words in (
        "across nodes",
        "Looked for: IBGDA",
        found,
        "NVreg_EnableStreamMemOPs=1",
        "NVSHMEM_IBGDA_NIC_HANDLER=cpu",
    ):
        assert words in str(error.value)
    monkeypatch.setenv("NVSHMEM_IBGDA_NIC_HANDLER", "cpu")
    libraries.require_ibgda()
    monkeypatch.delenv("NVSHMEM_IBGDA_NIC_HANDLER")
    monkeypatch.setattr(libraries, "ibgda", lambda: "unknown (no NVIDIA driver)")
    libraries.require_ibgda()


def test_no_compiler_for_hybridep_is_one_error(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_HOME", raising=False)
    with fake_deep_ep.installed("hybrid-ep"), pytest.raises(LibraryError) as error:
        hybridep.HybridEPGroup(None, torch.device("cuda"))
    assert "Looked for: $CUDA_HOME/bin/nvcc" in str(error.value) and "Found: CUDA_HOME=None" in str(error.value)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(LibraryError, match=f"CUDA_HOME={tmp_path} has no bin/nvcc"):
        libraries.require_nvcc()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/nvcc").touch(0o755)
    libraries.require_nvcc()


def test_versions_come_from_whatever_distribution_brought_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    assert libraries.installed(DEEPEP) == "of unknown version"
    monkeypatch.setattr("lightning_ep.imports.metadata.packages_distributions", lambda: {"deep_ep": ["torch"]})
    assert libraries.installed(DEEPEP) == torch.__version__
