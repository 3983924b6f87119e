"""The compatibility rules: one table, one row a rule. `check` looks, `enforce` refuses.

The rows are written down in `lightning_ep/rules/`; `docs/troubleshooting.md` shows them as a page. A row fires only
over facts that are known.
"""

from __future__ import annotations

from collections.abc import Sequence

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_ep.facts import Facts, gather_facts
from lightning_ep.rule import ConfigurationError, Rule, Violation, violation
from lightning_ep.rules.checkpoints import CHECKPOINTS
from lightning_ep.rules.dispatcher import DISPATCHER
from lightning_ep.rules.graphs import GRAPHS
from lightning_ep.rules.not_yet import NOT_YET
from lightning_ep.rules.overlap import OVERLAP
from lightning_ep.rules.wgrad import WGRAD

__all__ = ["RULES", "ConfigurationError", "Facts", "Rule", "Violation", "check", "enforce", "gather_facts"]

# The field's rules first, then what is not there yet.
RULES: tuple[Rule, ...] = (*OVERLAP, *WGRAD, *DISPATCHER, *GRAPHS, *CHECKPOINTS, *NOT_YET)


def check(facts: Facts, rules: Sequence[Rule] = RULES) -> list[Violation]:
    """Every rule that the known facts violate, in the table's order."""
    return [violation(rule, facts) for rule in rules if rule.violated(facts)]


def enforce(facts: Facts) -> None:
    """Refuse what cannot run and warn (on rank 0) of what may disappoint.

    Depends on nothing but `facts`, so that all ranks come to the same verdict without talking to each other.

    Raises:
        ConfigurationError: listing every violated rule at once.
    """
    violations = check(facts)
    if any(v.severity == "error" for v in violations):
        raise ConfigurationError(violations)
    for found in violations:
        rank_zero_warn(str(found))
