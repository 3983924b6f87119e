"""`lightning-ep validate --config x.yaml [--fact NAME=VALUE ...] [--json]`: check a config against every rule.

Needs no GPU and builds no weights. Facts that the config and this machine do not show are unknown, and rules over them
hold; `--fact` states them, so that a laptop can check a cluster's config or a model that is only planned.

Exit codes: 0 when no rule with severity "error" is violated, 1 when one is, 2 for a wrong command line or an unreadable
file.
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import replace

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lightning_ep.config_file import RunConfig, config_facts_of, config_problems, number_of_devices, read_config
from lightning_ep.constraints import check
from lightning_ep.facts import FACT_NAMES, Facts, parse_fact, state_facts
from lightning_ep.flex import settle_dispatcher
from lightning_ep.rule import Violation
from lightning_ep.schedule.overlap import choose_schedule, effective

# Wide enough that no argument is broken over two lines in a log.
_LOG_WIDTH = 160


def main(argv: list[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    try:
        run = read_config(arguments.config)
        stated = parse_statements(arguments.fact)
        facts, violations, notes = validate(run, stated)
    except ValueError as error:
        print(f"lightning-ep validate: {error}", file=sys.stderr)
        return 2
    ok = not any(found.severity == "error" for found in violations)
    if arguments.json:
        print(json.dumps({"ok": ok, "violations": [found.as_dict() for found in violations]}, indent=2))
    else:
        _show(run.path, ok, violations)
        if ok and run.strategy is not None:
            print(_effective(facts))
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    return 0 if ok else 1


def validate(run: RunConfig, stated: Mapping[str, str]) -> tuple[Facts, list[Violation], list[str]]:
    """The facts of a config, with those that a person stated, all violations, and sentences about what stayed unknown.

    Raises:
        ValueError: for a statement that is no fact or no value of it.
    """
    # What a user's model prints while it is built must not get into --json.
    with redirect_stdout(sys.stderr):
        gathered, notes = config_facts_of(run)
    facts = state_facts(_make_room(gathered, run, stated), stated)
    if {"moe_flex_dispatcher_backend", "moe_token_dispatcher_type"} <= stated.keys():
        kind, backend, note = settle_dispatcher(facts.moe_token_dispatcher_type, facts.moe_flex_dispatcher_backend)
        facts = replace(facts, moe_token_dispatcher_type=kind, moe_flex_dispatcher_backend=backend)
        notes += [note] if note else []
    return facts, config_problems(run) + check(facts), notes


def _effective(facts: Facts) -> str:
    """The line that a fit begins with, as far as it is known without a model's weights and a world."""
    automatic = facts.automatic_optimization is not False
    schedule, reason = choose_schedule(facts, facts.accumulate_grad_batches or 1, automatic)
    return effective(facts, schedule, reason, facts.world_size)


def _make_room(facts: Facts, run: RunConfig, stated: Mapping[str, str]) -> Facts:
    """Forget what a statement makes untrue: stating another machine means that this one does not matter."""
    if stated.keys() & {"gpu_name", "gpu_capability"}:
        facts = replace(facts, gpu_name=None, gpu_capability=None)
    if stated.keys() & {"gpu_name", "gpu_capability", "precision"}:
        facts = replace(facts, accelerator=None)
    devices = number_of_devices(run.trainer.get("devices", "auto"))
    if "world_size" in stated:
        world = parse_fact("world_size", stated["world_size"])
        facts = replace(facts, num_nodes=world // devices if devices and world else None)
    return facts


def parse_statements(statements: list[str]) -> dict[str, str]:
    """`NAME=VALUE` strings as a mapping; a fact stated twice counts the last time.

    Raises:
        ValueError: for a string without "=" or a name that is no fact.
    """
    stated = {}
    for statement in statements:
        name, equals, value = statement.partition("=")
        name = name.strip()
        if not equals:
            raise ValueError(f"--fact {statement!r}: expected NAME=VALUE")
        if name not in FACT_NAMES:
            # "backend" is no near miss of moe_flex_dispatcher_backend, but a part of it.
            close = difflib.get_close_matches(name, FACT_NAMES) + [fact for fact in FACT_NAMES if name and name in fact]
            hint = (
                f"did you mean {' or '.join(map(repr, dict.fromkeys(close)))}? All facts: lightning-ep validate --help"
            )
            every = f"the facts are {', '.join(FACT_NAMES)}"
            raise ValueError(f"--fact {statement!r}: unknown fact {name!r}; {hint if close else every}")
        stated[name] = value
    return stated


def _show(path: str, ok: bool, violations: list[Violation]) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=_LOG_WIDTH)
    if violations:
        table = Table(title=f"{path}: violated rules", show_lines=True, title_justify="left")
        table.add_column("rule", no_wrap=True)
        table.add_column("severity", no_wrap=True)
        table.add_column("what, why, and what to do")
        for found in violations:
            text = f"{found.cause}\n[dim]fix:[/dim]       {escape(found.fix)}\n[dim]otherwise:[/dim] {escape(found.symptom)}"
            text = text.replace(found.cause, escape(found.cause), 1)
            style = "red" if found.severity == "error" else "yellow"
            table.add_row(found.id, f"[{style}]{found.severity}[/{style}]", text)
        console.print(table)
    errors = sum(found.severity == "error" for found in violations)
    verdict = "ok" if ok else f"{errors} error{'s' if errors != 1 else ''}"
    console.print(f"{path}: {verdict}", highlight=False, markup=False)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="lightning-ep validate",
        description="Check a LightningCLI config against every rule, without GPUs and without building weights.",
        epilog=f"facts: {', '.join(FACT_NAMES)}",
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="LightningCLI config (YAML or JSON)")
    parser.add_argument(
        "--fact",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="state or override a fact; lists comma-separated, None for unset or unknown; repeatable",
    )
    parser.add_argument(
        "--json", action="store_true", help="print {ok, violations: [{id, severity, symptom, cause, fix}]}"
    )
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
