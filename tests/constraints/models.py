"""LightningModules that configs of these tests name."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
import transformers
from torch import nn


class TinyQwen(pl.LightningModule):
    """A Qwen2-MoE of a few thousand parameters, built in `__init__` or in `configure_model`."""

    def __init__(self, num_experts: int = 8, late: bool = False, recompute: bool = False, mtp_layers: int = 0) -> None:
        super().__init__()
        self.config = transformers.Qwen2MoeConfig(
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            vocab_size=64,
            num_experts=num_experts,
            moe_intermediate_size=8,
            shared_expert_intermediate_size=24,
            num_nextn_predict_layers=mtp_layers,
        )
        self.recompute = recompute
        print("a model that talks")
        if not late:
            self.build()

    def build(self) -> None:
        self.model = transformers.AutoModelForCausalLM.from_config(self.config)
        if self.recompute:
            self.model.activation_checkpointing_enable()

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            self.build()

    def training_step(self, batch: Any, index: int) -> Any:
        return self.model(input_ids=batch, labels=batch).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class NeedsTheTrainer(pl.LightningModule):
    """Cannot be built without a Trainer; what its arguments say is all that a check can know."""

    def __init__(self, num_experts: int = 8) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def configure_model(self) -> None:
        self.rank = self.trainer.global_rank
