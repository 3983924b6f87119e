"""Callbacks and metrics that show whether overlap helped, and that it changed nothing."""

from lightning_ep.callbacks.expert_load import ExpertLoad
from lightning_ep.callbacks.loss_parity import LossParity
from lightning_ep.callbacks.overlap_metrics import OverlapMetrics

__all__ = ["ExpertLoad", "LossParity", "OverlapMetrics"]
