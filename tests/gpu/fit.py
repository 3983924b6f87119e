"""`lightning-ep` for ranks that share one GPU: on_one_gpu 2 tests/gpu/fit.py fit --config ...

To Lightning each rank is a node of one GPU: the config says devices 1 and as many nodes as ranks.
"""

from __future__ import annotations

import sys

from lightning_ep.cli import main
from tests.gpu.common import start

if __name__ == "__main__":
    start()
    raise SystemExit(main(sys.argv[1:]))
