"""A model and data for the configs in `configs/` and for the demo. Small on purpose: copy what you need.

The strategy needs none of this; it takes any LightningModule.
"""

from lightning_ep.recipes.causal_lm import CausalLMModule
from lightning_ep.recipes.data import RandomTokens, TextFolder
from lightning_ep.recipes.progress import LineProgress

__all__ = ["CausalLMModule", "LineProgress", "RandomTokens", "TextFolder"]
