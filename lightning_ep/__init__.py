"""Expert parallelism with hidden communication for PyTorch Lightning.

Importing the package needs no optional dependency, touches no GPU and prints nothing. Public names are
loaded on first use; the strategy registers itself for ``Trainer(strategy="ep_overlap")``.
"""

from lightning_ep.strategy import EPOverlapStrategy

__version__ = "0.1.0"
__all__ = ["EPOverlapStrategy"]
