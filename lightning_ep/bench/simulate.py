"""`lightning-ep simulate`: one GPU plays rank 0 of N on an emulated fabric and shows what overlap would give there."""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
import yaml
from jsonargparse import ArgumentParser
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader

from lightning_ep.bench.alternate import MODES, Alternate
from lightning_ep.dispatch.emulated import EmulatedFabric
from lightning_ep.facts import Facts
from lightning_ep.mesh import ExpertMesh
from lightning_ep.strategy import EPOverlapStrategy

# The strategy's options that mean the same here; what is compared and what makes the cluster are set by the command.
_KEPT = ("rms_norm_fusion", "cuda_graph_scope", "moe_permute_fusion", "moe_dispatch_dedup")


class EmulatedStrategy(EPOverlapStrategy):
    """The strategy in one process that plays rank 0 of `fabric.size`: its own experts only, tokens on the fabric."""

    def __init__(self, fabric: EmulatedFabric, **options: Any) -> None:
        super().__init__(expert_model_parallel_size=fabric.size, **options)
        self.fabric = fabric

    def _facts(self) -> Facts:
        return replace(super()._facts(), world_size=self.fabric.size)

    def _build_mesh(self) -> ExpertMesh:
        alone = dist.group.WORLD
        mesh = DeviceMesh.from_group(
            [alone, alone],
            self.root_device.type,
            mesh=torch.zeros(1, 1, dtype=torch.int),
            mesh_dim_names=("edp", "ep"),
        )
        return ExpertMesh(mesh, alone, alone, ep_size=self.fabric.size, ep_rank=0, edp_size=1, edp_rank=0, world_size=1)

    def _transport(self) -> EmulatedFabric:
        return self.fabric


def parse_quantity(text: str, units: dict[str, float]) -> float:
    """50GB/s is 50e9 with units {"GB/s": 1e9}; a bare number is in SI units. ValueError names the units."""
    match = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?\d+)?)\s*([A-Za-z/]*)\s*", text)
    if match is None or (match[2] and match[2] not in units):
        raise argparse.ArgumentTypeError(f"{text!r}: give a number with one of {', '.join(units)}")
    return float(match[1]) * units.get(match[2], 1.0)


def _bandwidth(text: str) -> float:
    return parse_quantity(text, {"GB/s": 1e9, "MB/s": 1e6, "Gb/s": 1e9 / 8, "GiB/s": 2**30, "TB/s": 1e12})


def _seconds(text: str) -> float:
    return parse_quantity(text, {"us": 1e-6, "ms": 1e-3, "s": 1.0, "ns": 1e-9})


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="lightning-ep simulate", description=__doc__)
    parser.add_argument("--config", required=True, help="LightningCLI config of the run that is planned")
    parser.add_argument(
        "--bandwidth", type=_bandwidth, default="50GB/s", help="out of a rank, e.g. 50GB/s (400 Gb/s NIC)"
    )
    parser.add_argument("--latency", type=_seconds, default="20us", help="of one exchange")
    parser.add_argument("--layers", type=int, help="cut the model to so many layers")
    parser.add_argument("--sequence", type=int, default=4096, help="tokens of a micro-batch of one sequence")
    parser.add_argument("--micro-batches", type=int, default=16, help="accumulate_grad_batches")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each mode")
    parser.add_argument("--sms", type=int, default=8, help="multiprocessors that an exchange occupies")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("no GPU here: the emulated fabric needs one, only the wire is emulated")
    return args


def build_module(config: dict[str, Any], layers: int | None) -> pl.LightningModule:
    """The config's LightningModule, optionally cut to `layers` layers (a Hugging Face `num_hidden_layers`)."""
    model = config["model"]
    if layers is not None:
        model.setdefault("init_args", {}).setdefault("config", {})["num_hidden_layers"] = layers
    parser = ArgumentParser()
    parser.add_subclass_arguments(pl.LightningModule, "model")
    return parser.instantiate_classes(parser.parse_object({"model": model})).model


def main(argv: list[str]) -> int:
    args = parse(argv)
    config = yaml.safe_load(Path(args.config).read_text())
    strategy_args = config["trainer"]["strategy"].get("init_args", {})
    kept = {name: value for name, value in strategy_args.items() if name in _KEPT}
    fabric = EmulatedFabric(strategy_args["expert_model_parallel_size"], args.bandwidth, args.latency, args.sms)
    alternate = Alternate(args.micro_batches, args.rounds)
    module = build_module(config, args.layers)
    trainer = pl.Trainer(
        accelerator="cuda", devices=1, precision=config["trainer"].get("precision", "bf16-true"), max_epochs=1,
        strategy=EmulatedStrategy(fabric, **{**kept, "moe_router_force_load_balancing": True}),
        accumulate_grad_batches=args.micro_batches, callbacks=[alternate], logger=False, enable_checkpointing=False,
        enable_model_summary=False, use_distributed_sampler=False, log_every_n_steps=10**9,
    )  # fmt: skip
    vocab = config["model"].get("init_args", {}).get("config", {}).get("vocab_size", 1024)
    batches = torch.randint(0, vocab, (8, args.sequence))
    data = [batches[i % 8] for i in range(alternate.num_batches)]
    trainer.fit(module, DataLoader(data, batch_size=1))
    results = summarize(alternate)
    if args.json:
        print(
            json.dumps(
                {
                    "emulated": True,
                    "fabric": {"ranks": fabric.size, "bandwidth": fabric.bandwidth, "latency": fabric.latency},
                    "modes": results,
                }
            )
        )
    else:
        Console().print(table(fabric, results))
    return 0


def summarize(alternate: Alternate) -> list[dict[str, Any]]:
    """One row a mode; `limit` is what hiding everything would give: max(compute, communication) as step time."""
    base = alternate.measured[MODES[0].name]
    assert base.report is not None
    limit_ms = max(base.median_ms - base.report.exposed_ms, base.report.comm_ms)
    rows = []
    for name, measured in alternate.measured.items():
        report = measured.report
        assert report is not None
        rows.append({
            "mode": name, "step_ms": measured.median_ms, "spread_ms": max(measured.step_ms) - min(measured.step_ms),
            "host_ms": sorted(measured.host_ms)[len(measured.host_ms) // 2],
            "speedup": base.median_ms / measured.median_ms, "limit": base.median_ms / limit_ms,
            "comm_ms": report.comm_ms, "comm_share_of_base": base.report.comm_ms / base.median_ms,
            "hidden_ms": report.hidden_ms, "hidden_fraction": report.hidden_fraction, "idle_ms": report.idle_ms,
            "compute_ms": report.compute_ms, "kernels": report.kernel_count,
            "saved_of_comm": (base.median_ms - measured.median_ms) / max(base.report.comm_ms, 1e-9),
            "peak_gib": measured.peak_bytes / 2**30,
            "report": {k: v for k, v in asdict(report).items() if k in ("category_ms", "unknown_names")},
        })  # fmt: skip
    return rows


def table(fabric: EmulatedFabric, rows: list[dict[str, Any]]) -> Table:
    wire = f"{fabric.bandwidth / 1e9:g} GB/s + {fabric.latency * 1e6:g} us"
    view = Table(title=f"EMULATED fabric: rank 0 of {fabric.size}, {wire}; on {torch.cuda.get_device_name()}")
    for column in (
        "mode",
        "step ms",
        "±",
        "speed-up",
        "limit",
        "comm ms",
        "share",
        "hidden",
        "idle ms",
        "host ms",
        "peak GiB",
    ):
        view.add_column(column, justify="left" if column == "mode" else "right")
    for r in rows:
        view.add_row(
            r["mode"], f"{r['step_ms']:.1f}", f"{r['spread_ms']:.1f}", f"{r['speedup']:.3f}x", f"{r['limit']:.2f}x",
            f"{r['comm_ms']:.1f}", f"{r['comm_share_of_base']:.0%}", f"{r['hidden_fraction'] or 0:.1%}", f"{r['idle_ms']:.1f}",
            f"{r['host_ms']:.1f}", f"{r['peak_gib']:.1f}",
        )  # fmt: skip
    return view
