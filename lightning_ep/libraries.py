"""The optional libraries: what to look for, how to see whether it works, and how to get it.

`lightning-ep doctor` and the dispatchers say the same about a library that is missing or cannot be used.
"""

from __future__ import annotations

import importlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from lightning_ep import imports


@dataclass(frozen=True)
class Library:
    """An optional library. `probe` is code that sets `found` to its version; `needs` is what we use of its module."""

    name: str
    module: str
    needs: str
    probe: str
    get: str

    def advice(self, found: str) -> str:
        """What to do about a library that was looked for and `found` as the text says (an error, mostly)."""
        if "nvshmem" in found.lower():
            return "pip install nvidia-nvshmem-cu13 and add its lib folder to LD_LIBRARY_PATH"
        if "undefined symbol" in found or "crashed" in found:
            return f"it was built for another torch than {torch.__version__}; {self.get}"
        return self.get


class LibraryError(ImportError):
    """A library that a dispatcher needs is missing or cannot be used: what was looked for, what was found, the fix."""


TRANSFORMER_ENGINE = Library(
    "Transformer Engine",
    "transformer_engine",
    "pytorch",
    "import transformer_engine as te, transformer_engine.pytorch as tp; tp.GroupedLinear; found = te.__version__",
    "pip install 'lightning-ep[te]'",
)
DEEPEP = Library(
    "DeepEP",
    "deep_ep",
    "Buffer",
    "import torch, deep_ep; deep_ep.Buffer; found = getattr(deep_ep, '__version__', '')",
    "pip install 'lightning-ep[deepep]'",
)
HYBRIDEP = Library(
    "HybridEP",
    "deep_ep",
    "HybridEPBuffer",
    "import torch, deep_ep; deep_ep.HybridEPBuffer; found = getattr(deep_ep, '__version__', '')",
    "build the branch hybrid-ep of github.com/deepseek-ai/DeepEP for this torch and GPU",
)
TRITON = Library("Triton", "triton", "jit", "import triton; found = triton.__version__", "pip install triton")

LIBRARIES = (TRANSFORMER_ENGINE, DEEPEP, HYBRIDEP, TRITON)


def absent(library: Library) -> str:
    """The words for a library whose module does not exist here."""
    return f"no module {library.module} in this environment"


def load(library: Library) -> ModuleType:
    """Import what a dispatcher needs.

    Raises:
        LibraryError: no such module, one that does not import (another ABI, NVSHMEM absent), or one without the class
            that is needed; says which, and how to get it.
    """
    if not imports.is_available(library.module):
        raise _error(library, absent(library))
    try:
        module = importlib.import_module(library.module)
    except Exception as error:  # a library that is broken may raise anything on import
        raise _error(library, f"{library.module} does not import: {type(error).__name__}: {error}") from error
    if not hasattr(module, library.needs):
        where = getattr(module, "__file__", "unknown file")
        raise _error(library, f"{library.module} {installed(library)} ({where}) without {library.needs}")
    return module


def installed(library: Library) -> str:
    """Its version as its distribution states it."""
    return imports.version_of_module(library.module) or "of unknown version"


def _error(library: Library, found: str) -> LibraryError:
    return LibraryError(
        f"{library.name} cannot be used. Looked for: {library.module}.{library.needs}. Found: {found}. "
        f"Fix: {library.advice(found)}, check with `lightning-ep doctor`, or set moe_token_dispatcher_type='alltoall'"
    )


def ibgda(parameters: Path = Path("/proc/driver/nvidia/params")) -> str:
    """Whether the driver lets GPUs ring the network card's doorbell (IBGDA), in words: "on", "off; ...", "unknown ..."."""
    try:
        text = parameters.read_text()
    except OSError:
        return "unknown (no NVIDIA driver)"
    on = re.search(r"EnableStreamMemOPs: 1", text) and re.search(r"PeerMappingOverride=1", text)
    return "on" if on else "off; the driver options EnableStreamMemOPs and PeerMappingOverride are not both 1"


def require_ibgda() -> None:
    """DeepEP 1.2 across nodes: refuse a driver that is known not to allow it.

    Raises:
        LibraryError: IBGDA is off, and NVSHMEM was not told to let the CPU ring the doorbell instead.
    """
    found = ibgda()
    if found.startswith("off") and os.environ.get("NVSHMEM_IBGDA_NIC_HANDLER", "gpu") == "gpu":
        raise LibraryError(
            f"DeepEP cannot be used across nodes. Looked for: IBGDA in the NVIDIA driver of this node. Found: {found}. Fix: "
            'set both (options nvidia NVreg_EnableStreamMemOPs=1 NVreg_RegistryDwords="PeerMappingOverride=1;") and '
            "reboot, or set NVSHMEM_IBGDA_NIC_HANDLER=cpu, keep expert_model_parallel_size within a node, or set "
            "moe_token_dispatcher_type='alltoall'"
        )


def nvcc_missing() -> str:
    """Why HybridEP cannot compile its kernels, which it does in the first step, or ""."""
    home = os.environ.get("CUDA_HOME")
    if os.access(f"{home or ''}/bin/nvcc", os.X_OK):
        return ""
    return f"CUDA_HOME={home} has no bin/nvcc"


def require_nvcc() -> None:
    """HybridEP: refuse an environment without the compiler for its kernels.

    Raises:
        LibraryError: `$CUDA_HOME/bin/nvcc`, the only one that it looks for, is none.
    """
    if missing := nvcc_missing():
        raise LibraryError(
            "HybridEP cannot be used. Looked for: $CUDA_HOME/bin/nvcc, with which it compiles its kernels in the first "
            f"step. Found: {missing}. Fix: set CUDA_HOME to the folder of CUDA {torch.version.cuda} (often "
            "/usr/local/cuda), or set moe_token_dispatcher_type='alltoall'"
        )
