"""`lightning-ep COMMAND ...`: each command is a module with `main(argv) -> int`, imported when it is called."""

from __future__ import annotations

import sys
from importlib import import_module

COMMANDS: dict[str, tuple[str, str]] = {
    "fit": ("lightning_ep.lightning_cli", "train from a LightningCLI config"),
    "test": ("lightning_ep.lightning_cli", "run the test loop from a LightningCLI config"),
    "predict": ("lightning_ep.lightning_cli", "run the predict loop from a LightningCLI config"),
    "validate": ("lightning_ep.validate", "check a config against every rule, without GPUs or weights"),
    "doctor": ("lightning_ep.doctor", "what this machine can do: versions, GPUs, usable dispatchers"),
    "analyze": ("lightning_ep.profiling.analyze", "overlap of communication and compute in profiler traces"),
    "ab": ("lightning_ep.bench.ab", "matched A/B runs of one config, alternated"),
    "simulate": ("lightning_ep.bench.simulate", "one GPU plays rank 0 of N: what overlap would give"),
}


def usage() -> str:
    rows = "\n".join(f"  {name:10s} {text}" for name, (_, text) in COMMANDS.items())
    return (
        f"usage: lightning-ep COMMAND [options]\n\n{rows}\n\n`lightning-ep COMMAND --help` lists a command's options."
    )


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        return 0
    if argv[0] not in COMMANDS:
        print(f"lightning-ep: unknown command {argv[0]!r}\n\n{usage()}", file=sys.stderr)
        return 2
    module = import_module(COMMANDS[argv[0]][0])
    # LightningCLI needs its own subcommand's name; the other commands take the rest.
    return module.main(argv if argv[0] in ("fit", "test", "predict") else argv[1:]) or 0
