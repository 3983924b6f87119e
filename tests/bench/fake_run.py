"""Stands in for `python -m lightning_ep fit`: leaves the records that a run would, with times and losses by setting."""

import json
import os
import sys
import time
from pathlib import Path

arguments = dict(a.removeprefix("--").split("=", 1) for a in sys.argv[2:])
steps = int(arguments["trainer.max_steps"])
folder = Path(arguments["trainer.default_root_dir"])
overlap = arguments.get("trainer.strategy.init_args.overlap_moe_expert_parallel_comm") == "true"
wgrad = arguments.get("trainer.strategy.init_args.delay_wgrad_compute") == "true"
if wgrad and not overlap:
    sys.exit("ConfigurationError: delay_wgrad_compute needs overlap_moe_expert_parallel_comm")
repeat = int(folder.name[-1]) if folder.name[-1].isdigit() else 0
(folder / "pid").write_text(str(os.getpid()))

seed = int(arguments["seed_everything"])
losses = (folder / "losses.jsonl").open("w")
header = {"seed": seed, "global_batch_size": 8, "steps": steps, "precision": "32-true"}
losses.write(json.dumps({"header": header}) + "\n")
bad = float(arguments.get("bad_at", 0))
for step in range(1, steps + 1):
    (folder / "steps.json.progress").write_text(f"{step}\n")
    loss = 1 / step + (1e-3 if wgrad and step == bad else 0)
    record = {"step": step, "loss": loss, "lr": [0.1], "grad_norm": 1.0, "skipped": False, "finite": True}
    losses.write(json.dumps(record) + "\n")
    losses.flush()
    time.sleep(float(arguments.get("sleep", 0)))

seconds = (1.0 if overlap else 1.5) + 0.01 * repeat - 0.001 * wgrad
record = {
    "step_seconds": [9.0, *[seconds] * (steps - 2)],
    "tokens_per_step": 4096,
    "flops_per_step": 4e14,
    "peak_memory_bytes": 3 << 30,
    "world_size": 2,
    "precision": "32-true",
    "device": "H200",
    "versions": {"torch": "2.13", "cuda": None},
}
(folder / "steps.json").write_text(json.dumps(record))
if "trainer.callbacks.dirpath" in arguments:
    report = {"hidden_fraction": 0.8 if overlap else 0.001, "source": "host", "hidden_gemm_attention_fraction": 0.5}
    (folder / "ep_overlap-rank0000.json").write_text(json.dumps(report))
