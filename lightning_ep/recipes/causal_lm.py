"""A causal language model of Hugging Face transformers as a LightningModule."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from lightning_ep.pretrained import from_pretrained
from lightning_ep.strategy import EPOverlapStrategy


class CausalLMModule(LightningModule):
    """Trains any causal language model that transformers builds, from scratch or from a checkpoint.

    Batches are token ids, int64 `[B, S]`. Logs `train_loss` (with the router's auxiliary loss where the model adds it),
    `val_loss`/`test_loss` (nats a token, without it) and `val_bits_per_byte`/`test_bits_per_byte` where the data module
    says how many bytes a token stands for (`bytes_per_token`).

    Args:
        model_type: a model type of transformers, such as "qwen3_moe" or "mixtral".
        config: what differs from that type's default configuration, such as `num_hidden_layers`.
        pretrained: folder or Hub name of a Hugging Face checkpoint: configuration (`config` overrides it) and weights,
            of which each rank reads the dense ones and its own experts.
        attn_implementation: "sdpa", "eager", "flash_attention_2", ...
        lr: peak learning rate of AdamW, reached after `warmup_steps`, then a cosine down to `min_lr_ratio` of it.
        weight_decay: for matrices; norms and biases have none.
    """

    def __init__(
        self,
        model_type: str | None = None,
        config: dict[str, Any] | None = None,
        pretrained: str | None = None,
        attn_implementation: str = "sdpa",
        lr: float = 3e-4,
        min_lr_ratio: float = 0.1,
        warmup_steps: int = 100,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.1,
    ) -> None:
        super().__init__()
        if (model_type is None) == (pretrained is None):
            raise ValueError(
                f"model_type={model_type!r} and pretrained={pretrained!r}: give one of them, a type to train from scratch "
                "or the folder of a checkpoint"
            )
        self.save_hyperparameters()
        self.model: nn.Module | None = None

    def configure_model(self) -> None:
        if self.model is not None:
            return
        # Weights on the meta device: the strategy allocates a rank's own experts only.
        spread = isinstance(getattr(self._trainer, "strategy", None), EPOverlapStrategy)
        with torch.device("meta") if spread else nullcontext():
            self.model = build_model(self.hparams)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits `[B, S, V]`."""
        assert self.model is not None, "configure_model builds the model"
        return self.model(input_ids=ids).logits

    def training_step(self, ids: Tensor, batch_idx: int) -> Tensor:
        assert self.model is not None
        loss = self.model(input_ids=ids, labels=ids).loss
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, ids: Tensor, batch_idx: int) -> None:
        self._evaluate("val", ids)

    def test_step(self, ids: Tensor, batch_idx: int) -> None:
        self._evaluate("test", ids)

    def predict_step(self, ids: Tensor, batch_idx: int) -> Tensor:
        """Nats of each sequence, `[B]`."""
        return next_token_loss(self(ids), ids).mean(1)

    def _evaluate(self, stage: str, ids: Tensor) -> None:
        loss = next_token_loss(self(ids), ids).mean()
        self.log(f"{stage}_loss", loss, batch_size=len(ids), sync_dist=True, prog_bar=True)
        bytes_per_token = getattr(getattr(self._trainer, "datamodule", None), "bytes_per_token", None)
        if bytes_per_token:
            bits = loss / math.log(2) / bytes_per_token
            self.log(f"{stage}_bits_per_byte", bits, batch_size=len(ids), sync_dist=True, prog_bar=True)

    def configure_optimizers(self) -> dict[str, Any]:
        hp = self.hparams
        decayed = [p for n, p in self.named_parameters() if p.dim() > 1 and not n.endswith("bias")]
        others = [p for n, p in self.named_parameters() if p.dim() <= 1 or n.endswith("bias")]
        groups = [{"params": decayed, "weight_decay": hp.weight_decay}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=hp.lr, betas=hp.betas)
        total = self.trainer.estimated_stepping_batches
        schedule = LambdaLR(optimizer, lambda step: lr_factor(step, total, hp.warmup_steps, hp.min_lr_ratio))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def build_model(hparams: Any) -> nn.Module:
    """The transformers model of a `CausalLMModule`'s hyperparameters, on the default device and in the default dtype."""
    from transformers import AutoConfig, AutoModelForCausalLM

    changes = {"use_cache": False, **(hparams.config or {})}
    how = {"attn_implementation": hparams.attn_implementation, "dtype": torch.get_default_dtype()}
    if hparams.pretrained:
        return from_pretrained(hparams.pretrained, **how, **changes).train()
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(hparams.model_type, **changes), **how)


def next_token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    """Nats `[B, S - 1]` of each token after the first, in float32."""
    return F.cross_entropy(logits[:, :-1].float().transpose(1, 2), ids[:, 1:], reduction="none")


def lr_factor(step: int, total: float, warmup: int, floor: float) -> float:
    """Share of the peak learning rate at `step`: linear warm-up, then a cosine down to `floor`."""
    if step < warmup:
        return (step + 1) / (warmup + 1)
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))
