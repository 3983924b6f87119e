from __future__ import annotations

import os

# Two cores: threads of several ranks would fight for them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
