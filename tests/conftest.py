from __future__ import annotations

import os

# Two cores: threads of several ranks would fight for them.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Runs the Triton kernels on CPU tensors; has to be set before anything imports triton.
os.environ.setdefault("TRITON_INTERPRET", "1")
