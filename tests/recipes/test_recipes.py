"""The model and data that configs and demo use."""

from __future__ import annotations

import math
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch

from lightning_ep.recipes import CausalLMModule, LineProgress, RandomTokens, TextFolder
from lightning_ep.recipes.causal_lm import lr_factor, next_token_loss

CONFIG = {
    "vocab_size": 256, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "output_router_logits": True,
}  # fmt: skip


def write_files(folder: Path, count: int, size: int = 40) -> None:
    for i in range(count):
        (folder / f"{i:03}.txt").write_text(chr(ord("a") + i % 26) * size)


def test_text_folder_holds_whole_files_out(tmp_path: Path) -> None:
    write_files(tmp_path, 26)  # one letter a file: what is held out is letters 0 and 20
    (tmp_path / "picture.bin").write_bytes(b"\xff\xfe\x00\x01" * 100)
    data = TextFolder(str(tmp_path), seq_length=8, micro_batch_size=2, held_out_sequences=8)
    data.setup()
    separators = {0}
    seen = {part: set(getattr(data, part).windows.flatten().tolist()) - separators for part in ("train", "held_out")}
    assert seen["held_out"] == {ord("a"), ord("u")}
    assert seen["train"] == set(range(ord("a"), ord("z") + 1)) - seen["held_out"]
    batch = next(iter(data.train_dataloader()))
    assert batch.shape == (2, 8) and batch.dtype == torch.int64


def test_the_standard_library_is_the_default_text() -> None:
    data = TextFolder(seq_length=128, held_out_sequences=32)
    data.setup()
    assert data.train is not None and data.held_out is not None
    assert data.train.windows.numel() > 2_000_000 and len(data.held_out) == 32


def test_too_little_text_is_refused_with_numbers(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"0 files of text, which give 0 training sequences.*micro_batch_size=8"):
        TextFolder(str(tmp_path), seq_length=32).setup()
    write_files(tmp_path, 22)
    with pytest.raises(ValueError, match=r"22 files of text, which give 2 held-out sequences.*micro_batch_size=8"):
        TextFolder(str(tmp_path), seq_length=32).setup()
    with pytest.raises(ValueError, match="no folder"):
        TextFolder(str(tmp_path / "missing")).setup()


def test_a_tokenizer_counts_the_bytes_of_its_tokens(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<eos>": 0, "one": 1, "three": 2}, unk_token="<eos>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>").save_pretrained(tmp_path / "tokenizer")
    for i in range(20):
        (tmp_path / f"{i}.txt").write_text("one three\n")
    data = TextFolder(str(tmp_path), "*.txt", 3, 1, tokenizer=str(tmp_path / "tokenizer"))
    data.setup()
    assert data.train is not None and data.train[0].tolist() == [1, 2, 0]
    assert data.bytes_per_token == pytest.approx(10 / 3)


def test_random_tokens_are_the_same_for_the_same_index() -> None:
    data = RandomTokens(vocab_size=50, seq_length=12, micro_batch_size=3, num_sequences=9)
    batches = list(data.train_dataloader())
    assert [tuple(batch.shape) for batch in batches] == [(3, 12)] * 3
    assert torch.equal(torch.cat(batches), torch.cat(list(data.train_dataloader())))
    assert int(torch.cat(batches).max()) < 50 and not torch.equal(batches[0], batches[1])


def test_learning_rate_warms_up_and_falls_to_its_floor() -> None:
    factors = [lr_factor(step, total=100, warmup=10, floor=0.1) for step in range(101)]
    assert factors[0] == pytest.approx(1 / 11) and factors[10] == 1.0 and factors[100] == pytest.approx(0.1)
    assert factors[:11] == sorted(factors[:11]) and factors[10:] == sorted(factors[10:], reverse=True)


def test_one_of_model_type_and_pretrained() -> None:
    with pytest.raises(ValueError, match="give one of them"):
        CausalLMModule()
    with pytest.raises(ValueError, match="give one of them"):
        CausalLMModule("mixtral", pretrained="somewhere")


def test_evaluation_is_the_language_model_loss_alone_in_nats_and_bits(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    write_files(tmp_path, 40)
    pl.seed_everything(0, verbose=False)
    module = CausalLMModule("qwen3_moe", CONFIG, warmup_steps=1)
    data = TextFolder(str(tmp_path), seq_length=16, micro_batch_size=2, held_out_sequences=4)
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_steps=4, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, val_check_interval=2, check_val_every_n_epoch=None, num_sanity_val_steps=0,
        callbacks=[LineProgress(2)],
    )  # fmt: skip
    trainer.fit(module, data)
    lines = [line for line in capsys.readouterr().out.splitlines() if "step" in line or "held-out" in line]
    assert ["step" in line for line in lines] == [True, False, True, False]
    assert "train_loss" in lines[0] and "val_bits_per_byte" in lines[1]

    (logged,) = trainer.validate(module, data, verbose=False)
    assert module.model is not None
    ids = torch.stack(list(data.held_out))
    with torch.no_grad():
        out = module.model(input_ids=ids, labels=ids)
        assert next_token_loss(module(ids), ids).mean().item() == pytest.approx(logged["val_loss"], rel=1e-5)
    plain = out.loss - module.model.router_aux_loss_coef * out.aux_loss
    assert logged["val_loss"] == pytest.approx(plain.item(), rel=1e-5) != pytest.approx(out.loss.item(), rel=1e-6)
    assert logged["val_bits_per_byte"] == pytest.approx(logged["val_loss"] / math.log(2))


def test_norms_and_biases_do_not_decay() -> None:
    module = CausalLMModule("qwen3_moe", CONFIG | {"attention_bias": True})
    module.configure_model()
    module.trainer = pl.Trainer(max_steps=10, logger=False, enable_checkpointing=False, accelerator="cpu")
    decayed, others = module.configure_optimizers()["optimizer"].param_groups
    names = {p: n for n, p in module.named_parameters()}
    assert all(names[p].endswith(("bias", "norm.weight", "layernorm.weight")) for p in others["params"])
    assert len(decayed["params"]) + len(others["params"]) == len(names)
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.1, 0.0)
