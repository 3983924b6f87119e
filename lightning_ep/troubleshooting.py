"""`python -m lightning_ep.troubleshooting > docs/troubleshooting.md`: the table of rules as a page.

Beside the rules stand the troubles that no rule can see, because every setting was allowed.
"""

from __future__ import annotations

from typing import NamedTuple

from lightning_ep.rule import Rule
from lightning_ep.rules.checkpoints import CHECKPOINTS
from lightning_ep.rules.dispatcher import DISPATCHER
from lightning_ep.rules.graphs import GRAPHS
from lightning_ep.rules.not_yet import NOT_YET
from lightning_ep.rules.overlap import OVERLAP
from lightning_ep.rules.wgrad import WGRAD


class Note(NamedTuple):
    symptom: str
    cause: str
    look: str
    fix: str


NOTES = (
    Note(
        "Throughput does not rise with flex",
        "the backend is not active: moe_flex_dispatcher_backend alone does not switch dispatchers, and on a GPU that "
        "does not run it apply_flex_dispatcher_backend falls back to alltoall",
        "the line at the start of fit that says which dispatcher and backend are effective; warnings of rank 0",
        "set moe_token_dispatcher_type='flex' and a backend; see `lightning-ep doctor` for why one is unusable",
    ),
    Note(
        "The sum of kernel times rises with overlap",
        "kernels that run at the same time share SMs and bandwidth, so each takes longer while the step gets shorter",
        "unprofiled step time of a steady window; `lightning-ep analyze` for the union of intervals",
        "judge by wall time; a step that got slower is a regression, a larger sum alone is not",
    ),
    Note(
        "DeepEP is silently skipped",
        "the GPU does not run it (GB200, GB300 and anything older than Ampere), and a fall back to alltoall was chosen",
        "the warning of rank 0 that names the GPU; `lightning-ep doctor`",
        "take HybridEP on GB200 and GB300, or alltoall; EPOverlapStrategy itself refuses instead of falling back",
    ),
    Note(
        "Training hangs",
        "PyTorch before 2.6.0; ranks with different numbers of batches, or that leave the loop at different steps; a "
        "rank that died; HybridEP with different token counts over ranks",
        "the time-out error, which names rank, layer and operation; `py-spy dump` on a waiting rank; "
        "TORCH_NCCL_TRACE_BUFFER_SIZE=2000 for the last collectives",
        "upgrade PyTorch; give every rank as many batches (docs/reliability.md); look at the first rank's error",
    ),
    Note(
        "Overlap brings nothing although every rule holds",
        "the exchange is short beside the compute, or the host cannot launch fast enough",
        "`lightning-ep analyze`: exposed communication against idle time; a GPU that idles waits for the host",
        "larger micro-batches or more of them, compiled dense parts, overlap off where communication is under 5%",
    ),
)


def page() -> str:
    """The page, in Markdown."""
    sections = (
        ("Overlap and expert parallelism", OVERLAP),
        ("Delayed weight gradients", WGRAD),
        ("Dispatchers", DISPATCHER),
        ("CUDA graphs", GRAPHS),
        ("Checkpoints", CHECKPOINTS),
        ("What lightning_ep does not have yet", NOT_YET),
    )
    lines = [
        "# Troubleshooting",
        "",
        "Written by `python -m lightning_ep.troubleshooting > docs/troubleshooting.md`; change the rows in "
        "`lightning_ep/rules/` instead.",
        "",
        "The first tables are the rules that `EPOverlapStrategy` and `lightning-ep validate` check before training: "
        "an error stops the run and lists every violated rule, a warning does not. The column *symptom* says what one "
        "would see without the check (messages print it after *otherwise*). The last table is for what no rule can see.",
    ]
    for title, rules in sections:
        lines += [
            "",
            f"## {title}",
            "",
            "| rule | severity | reads | symptom | cause | fix | source |",
            "|---" * 7 + "|",
        ]
        lines += [_row(rule) for rule in rules]
    lines += [
        "",
        "## Troubles without a rule",
        "",
        "| symptom | likely cause | where to look | fix |",
        "|---" * 4 + "|",
    ]
    lines += [_cells(*note) for note in NOTES]
    return "\n".join(lines) + "\n"


def _row(rule: Rule) -> str:
    reads = ", ".join(f"`{name}`" for name in rule.arguments)
    return _cells(f"`{rule.id}`", rule.severity, reads, rule.symptom, rule.cause, rule.fix, rule.source)


def _cells(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    print(page(), end="")
