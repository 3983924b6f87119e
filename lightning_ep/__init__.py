"""Expert parallelism with hidden communication for PyTorch Lightning.

Importing the package needs no optional dependency, touches no GPU and prints nothing. Public names are
loaded on first use; the strategy registers itself for ``Trainer(strategy="ep_overlap")``.
"""

import sys
from importlib import import_module
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

# Lightning takes seconds to import; the command `lightning-ep` waits for it only where it trains.
if TYPE_CHECKING or [PurePath(program).stem for program in sys.argv[:1]] != ["lightning-ep"]:
    from lightning_ep.strategy import EPOverlapStrategy

__version__ = "0.1.0"

_LAZY = {
    "ConfigurationError": "lightning_ep.rule",
    "ExpertsNotFoundError": "lightning_ep.experts.interface",
    "MoELayer": "lightning_ep.experts.layer",
    "apply_flex_dispatcher_backend": "lightning_ep.flex",
    "consolidate_checkpoint": "lightning_ep.checkpoint",
    "export_pretrained": "lightning_ep.export",
    "find_experts": "lightning_ep.experts.interface",
    "from_pretrained": "lightning_ep.pretrained",
    "load_full_state_dict": "lightning_ep.checkpoint",
    "validate_flex_dispatcher_backend": "lightning_ep.flex",
}
__all__ = ["EPOverlapStrategy", *_LAZY]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY.get(name, "lightning_ep.strategy")), name)
