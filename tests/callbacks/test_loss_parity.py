"""LossParity under plain Trainers: it knows nothing of expert parallelism."""

import json
import math
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision

from lightning_ep import EPOverlapStrategy
from lightning_ep.callbacks import LossParity
from lightning_ep.callbacks.parity import read_run, tolerance_for
from tests.callbacks.training import STEPS, Regression, SkipTo, fit
from tests.distributed import run_distributed
from tests.reference import tiny_model
from tests.trained import CausalLM, loader, quiet_trainer


@pytest.fixture
def baseline(tmp_path):
    path = tmp_path / "base.jsonl"
    fit(tmp_path, LossParity(str(path)))
    return path


def test_records_every_step(tmp_path):
    seen = []

    class Watch(Regression):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            seen.append(loss.item())
            return loss

    fit(tmp_path, LossParity(), module=Watch(), accumulate_grad_batches=2)
    header, records = read_run(tmp_path / "losses.jsonl")
    assert header == {
        "version": 1, "seed": 7, "batch_size": 4, "accumulate_grad_batches": 2, "world_size": 1,
        "global_batch_size": 8, "steps": STEPS, "precision": "32-true",
    }  # fmt: skip
    assert list(records) == list(range(1, STEPS + 1))
    for step, record in records.items():
        assert record.loss == (seen[2 * step - 2] + seen[2 * step - 1]) / 2
        assert record.lr == [pytest.approx(1e-2 / step)], "the one that the step used"
        assert record.grad_norm > 0 and record.finite and not record.skipped


def test_equal_runs_are_clean(tmp_path, baseline):
    parity = LossParity(baseline=str(baseline), on_divergence="raise", flush_every=3)
    fit(tmp_path, parity)
    assert parity.report.ok and parity.report.compared == STEPS and parity.report.missing == 0
    assert parity.report.max_deviation == 0.0 and parity.report.tolerance == tolerance_for("32-true")


@pytest.mark.parametrize("step", [1, 5, STEPS])
def test_a_planted_change_is_found_at_its_step(tmp_path, baseline, step):
    """1e-3 in one weight, just before step `step`."""
    parity = LossParity(baseline=str(baseline), flush_every=3)
    with pytest.warns(UserWarning, match=f"diverged at step {step}: loss"):
        fit(tmp_path, parity, module=Regression(change_at=step - 1))
    assert parity.report.first_divergent_step == step and parity.report.compared == STEPS
    assert parity.report.max_deviation > parity.report.tolerance


def test_raise(tmp_path, baseline):
    parity = LossParity(baseline=str(baseline), on_divergence="raise", flush_every=2)
    with pytest.raises(RuntimeError, match="diverged at step 3"):
        fit(tmp_path, parity, module=Regression(change_at=2))
    _, records = read_run(tmp_path / "losses.jsonl")
    assert list(records) == [1, 2, 3, 4], "what was seen is on disk"


def test_stop(tmp_path, baseline):
    parity = LossParity(baseline=str(baseline), on_divergence="stop", flush_every=1)
    with pytest.warns(UserWarning, match="diverged at step 3"):
        trainer = fit(tmp_path, parity, module=Regression(change_at=2))
    assert trainer.global_step == 3


def test_tolerance_can_be_set(tmp_path, baseline):
    parity = LossParity(baseline=str(baseline), tolerance=0.5, on_divergence="raise")
    fit(tmp_path, parity, module=Regression(change_at=2))
    assert parity.report.ok and 0 < parity.report.max_deviation < 0.5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 8}, "seed is 8 here and 7 in the baseline"),
        ({"max_steps": 9}, r"length \(optimizer steps\) is 9 here and 8"),
        ({"batch_size": 2}, "global batch size is 2 here and 4"),
        ({"accumulate_grad_batches": 2}, "global batch size is 8 here and 4"),
    ],
)
def test_runs_that_cannot_be_compared_are_an_error(tmp_path, baseline, change, message):
    with pytest.raises(ValueError, match=message):
        fit(tmp_path, LossParity(baseline=str(baseline)), **change)


def test_tolerance_follows_the_coarser_precision(tmp_path, baseline):
    parity = LossParity(baseline=str(baseline))
    fit(tmp_path, parity, precision="bf16-mixed")
    assert parity.report.tolerance == tolerance_for("bf16-mixed") > tolerance_for("32-true")
    assert tolerance_for("64-true") < tolerance_for("32-true") < tolerance_for("16-mixed") < tolerance_for("bf16-true")


def test_resume_goes_on_in_the_same_file(tmp_path):
    """Stopped after step 3 and again after 6 without a checkpoint there: dropped lines, no double ones, clean parity."""
    fit(tmp_path, LossParity(str(tmp_path / "base.jsonl")), loader=SkipTo(4))
    path = str(tmp_path / "ours.jsonl")

    class Stop(Exception):
        pass

    class StopAt(ModelCheckpoint):
        def on_train_batch_end(self, trainer, *args):
            super().on_train_batch_end(trainer, *args)
            if trainer.global_step == 6:
                raise Stop

    checkpoint = StopAt(tmp_path, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    with pytest.raises(Stop):
        fit(
            tmp_path,
            LossParity(path, baseline=str(tmp_path / "base.jsonl"), on_divergence="raise"),
            checkpoint,
            loader=SkipTo(4),
            enable_checkpointing=True,
        )
    with open(path, "a") as file:
        file.write('{"step": 7, "loss"')  # the writer was killed in the middle of a line
    parity = LossParity(path, baseline=str(tmp_path / "base.jsonl"), on_divergence="raise")
    fit(tmp_path, parity, loader=SkipTo(4, skip=3), ckpt_path=str(tmp_path / "step=3.ckpt"))
    assert parity.report.ok and parity.report.compared == STEPS - 3
    lines = Path(path).read_text().splitlines()
    assert [json.loads(line).get("step") for line in lines] == [None, *range(1, STEPS + 1)]
    base, ours = read_run(tmp_path / "base.jsonl")[1], read_run(path)[1]
    assert base == ours


def test_resume_with_another_seed_is_refused(tmp_path):
    checkpoint = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=4, save_top_k=-1)
    fit(tmp_path, LossParity(), checkpoint, enable_checkpointing=True)
    with pytest.raises(ValueError, match=r"cannot resume .*losses\.jsonl: seed is 8"):
        fit(tmp_path, LossParity(), ckpt_path=str(tmp_path / "step=4.ckpt"), seed=8)


def test_a_new_run_keeps_the_old_file(tmp_path):
    for seed in (1, 2):
        fit(tmp_path, LossParity(), seed=seed)
    assert read_run(tmp_path / "losses.jsonl")[0]["seed"] == 2
    assert read_run(tmp_path / "losses.previous.jsonl")[0]["seed"] == 1


def test_the_baseline_is_never_overwritten(tmp_path):
    fit(tmp_path, LossParity())
    before = (tmp_path / "losses.jsonl").read_text()
    with pytest.raises(ValueError, match="would overwrite its baseline"):
        fit(tmp_path, LossParity(baseline=str(tmp_path / "losses.jsonl")))
    assert (tmp_path / "losses.jsonl").read_text() == before


def test_steps_without_loss_and_non_finite_ones(tmp_path):
    class Bad(Regression):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss * math.nan if batch_idx == 3 else loss

    fit(tmp_path, LossParity(), module=Bad(no_loss_at=(1,)))
    _, records = read_run(tmp_path / "losses.jsonl")
    assert records[2].loss is None and records[2].skipped and records[2].finite
    assert records[4].loss is None and not records[4].finite and records[4].grad_norm is None
    assert records[3].finite and not records[3].skipped


def test_steps_skipped_by_loss_scaling(tmp_path):
    """16-mixed on CPU is bf16 to Lightning, so the plugin is given: the scaler starts far too high and skips."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-10)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    fit(tmp_path, LossParity(), precision=None, plugins=[plugin], max_steps=20)
    _, records = read_run(tmp_path / "losses.jsonl")
    skipped = [record.skipped for record in records.values()]
    assert skipped[0] and not skipped[-1] and skipped == sorted(skipped, reverse=True)
    assert records[1].grad_norm is None and records[20].grad_norm > 0


def _two_ranks(root: str) -> tuple[dict, dict, list]:
    base = f"{root}/base.jsonl"
    options = {"devices": 2, "strategy": "ddp", "batch_size": 2}
    fit(root, LossParity(base), **options)
    found = []
    # Whichever rank's replica changes: all ranks see it at the same step and raise.
    for change in (1e-3, 0.0) if torch.distributed.get_rank() else (0.0, 1e-3):
        parity = LossParity(baseline=base, on_divergence="raise", flush_every=3)
        try:
            fit(root, parity, module=Regression(change_at=4, change=change), **options)
        except RuntimeError as error:
            found.append(str(error).split(":")[1])
    return *read_run(base), found


def test_two_ranks(tmp_path, baseline):
    """Mean over ranks: the same losses as one process with the whole batch; both ranks decide the same."""
    (header, records, found), (_, _, found_elsewhere) = run_distributed(_two_ranks, 2, str(tmp_path))
    assert found == found_elsewhere == [" diverged at step 5"] * 2
    assert header["world_size"] == 2 and header["global_batch_size"] == 4
    _, alone = read_run(baseline)
    for step, record in records.items():
        assert record.loss == pytest.approx(alone[step].loss, rel=1e-5)
        assert record.grad_norm == pytest.approx(alone[step].grad_norm, rel=1e-5)


def _bad_baseline(root: str) -> str:
    with pytest.raises(ValueError, match="line 1") as error:
        fit(root, LossParity(baseline=f"{root}/bad.jsonl"), devices=2, strategy="ddp")
    return str(error.value)


def test_a_bad_baseline_stops_all_ranks(tmp_path):
    (tmp_path / "bad.jsonl").write_text("hello\n")
    assert len(set(run_distributed(_bad_baseline, 2, str(tmp_path)))) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        ("[]\n", "line 1"),
        ('{"header": {}}\n{"step": 1}\n', "line 2"),
        (
            '{"header": {}}\n{"step": "1", "loss": 1, "lr": [], "grad_norm": 1, "skipped": false, "finite": true}\n',
            "line 2",
        ),
        ('{"header": {}}\n' + "x" * 70_000 + "\n", "line 2: longer than"),
        ('{"header": ' + "[" * 60_000 + "\n", "line 1"),
        ("\udcff\n", "not a recorded run"),
    ],
)
def test_foreign_files(tmp_path, text, message):
    path = tmp_path / "x.jsonl"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=message):
        read_run(path)
    with pytest.raises(ValueError, match="No such file"):
        read_run(tmp_path / "missing.jsonl")


@pytest.mark.parametrize("wrong", [{"on_divergence": "panic"}, {"flush_every": 0}])
def test_wrong_arguments(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        LossParity(**wrong)


def _experts(root: str) -> list:
    """A MoE model over two ranks, recorded without overlap, then with overlap and delayed weight gradients."""
    options = dict(accumulate_grad_batches=2, use_distributed_sampler=False, max_epochs=1, default_root_dir=root)
    reports, norms = [], []
    for name, overlap, clip in (("off", False, None), ("on", True, None), ("clipped", True, 1e9)):
        parity = LossParity(
            f"{root}/{name}.jsonl", None if name == "off" else f"{root}/off.jsonl", on_divergence="raise"
        )
        strategy = EPOverlapStrategy(2, overlap_moe_expert_parallel_comm=overlap, delay_wgrad_compute=overlap)
        trainer = quiet_trainer(
            strategy=strategy, callbacks=[parity], gradient_clip_val=clip, precision="bf16-mixed", **options
        )
        trainer.fit(CausalLM(tiny_model("qwen3_moe")), loader(4, 2))
        reports.append(parity.report)
        norms.append([record.grad_norm for record in read_run(f"{root}/{name}.jsonl")[1].values()])
    return [[(r.ok, r.compared, r.max_deviation) for r in reports[1:]], norms]


def test_overlap_compares_equal(tmp_path):
    for parity, norms in run_distributed(_experts, 2, str(tmp_path)):
        assert parity == [(True, 4, 0.0)] * 2
        assert norms[0] == norms[1] == norms[2], "the norm of all experts, whether clipping computed it or we did"
