"""What docs/reliability.md promises, over NCCL: a rank that raises, dies, is stopped or gets a signal ends all, in time.

bash tests/gpu/run.sh KIT faults            two ranks on one GPU; each case is a pair of processes with a time limit
python tests/gpu/check_faults.py --cpu      a rehearsal over gloo

Without MPS, under which a killed process may take the others with it.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.faults import ranks
from tests.faults.cases import LONG, Case, failed, loads, run
from tests.faults.ranks import Fault
from tests.faults.table import HEAD, Table

# NCCL's first exchange takes some seconds, and so may nobody be missed earlier.
SHORT = 20
WAITED = r"This rank was .* of MoE layer 0, in train batch 2"

CASES = (
    Case("exception", "exception in `training_step`", ranks.fit, {"fault": Fault("raise", "training_step"), "timeout": LONG},
        failed(1, "ValueError: boom"), (1, 1), within=15),
    Case("kill", "SIGKILL", ranks.fit, {"fault": Fault("kill", "training_step"), "timeout": LONG},
        rf"rank 1 died \(pid .*{WAITED}", (1, -9), within=15),
    Case("kill_host", "SIGKILL of rank 0, which hosts the rendezvous", ranks.fit,
        {"fault": Fault("kill", "training_step", ranks=(0,)), "timeout": LONG}, rf"rank 0 died \(pid .*{WAITED}", (-9, 1),
        innocent=(1,), within=15),
    Case("stop", "SIGSTOP", ranks.fit, {"fault": Fault("stop", "training_step"), "timeout": SHORT},
        rf"rank 1 did not answer for 16 s \(pid .*stopped\).*{WAITED}", (1, None), stopped=(1,), within=SHORT + 15),
    Case("hang", "a rank hangs in user code", ranks.fit, {"fault": Fault("hang", "training_step"), "timeout": SHORT},
        rf"rank 1 did not come within 16 s.*{WAITED}", (1, 1), within=SHORT + 15),
    Case("sigterm", "SIGTERM to one rank", ranks.fit,
        {"fault": Fault("terminate", "training_step"), "timeout": LONG, "saving": {"save_on_exception": True}}, "", (0, 0),
        check=loads("step=4.ckpt"), within=20, kept="a checkpoint of the step at which all ranks ended"),
)  # fmt: skip


def on_gpu(run: Any, options: dict[str, Any]) -> None:
    """In a rank: both ranks use GPU 0; to Lightning each is a node."""
    os.environ["LOCAL_RANK"] = "0"
    run(**options, accelerator="cuda", devices=1, num_nodes=ranks.world_size())


def main() -> int:
    from tests.gpu import check_faults  # under a name that other processes can import

    parser = argparse.ArgumentParser()
    parser.add_argument("--cpu", action="store_true")
    on_cpu = parser.parse_args().cpu
    # This process may be torchrun's; the pairs are not. Without the pipe's folder nobody finds the MPS daemon.
    for name in [n for n in os.environ if n.startswith("TORCHELASTIC_") or n == "CUDA_MPS_PIPE_DIRECTORY"]:
        del os.environ[name]
    table, lost = Table(), []
    for case in CASES:
        here = (
            case
            if on_cpu
            else replace(case, run=check_faults.on_gpu, options={"run": case.run, "options": case.options})
        )
        with tempfile.TemporaryDirectory() as folder:
            try:
                table.add(case, run(here, Path(folder)))
            except Exception as error:
                lost.append(case.id)
                print(f"FAILED {case.id}: {error}", flush=True)
            else:
                print(f"ok {case.id}", flush=True)
    print(HEAD, *table.rows.values(), sep="\n")
    print(f"lost: {', '.join(lost)}" if lost else "all held", flush=True)
    return bool(lost)


if __name__ == "__main__":
    sys.exit(main())
