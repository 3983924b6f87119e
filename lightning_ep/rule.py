"""What a rule is, what a violated one looks like, and the error that lists them. The rules: `constraints.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from packaging.version import InvalidVersion, Version

from lightning_ep.facts import ABSENT, Facts

# Sources that many rows share.
BRIDGE = "Megatron Bridge, communication overlap"
CORE = "Megatron Core, transformer config"

DISPATCHERS = ("alltoall", "flex")

Severity = Literal["error", "warning"]


@dataclass(frozen=True)
class Rule:
    """One row of the table. `violated` is false where a fact that it needs is unknown."""

    id: str
    severity: Severity
    arguments: tuple[str, ...]  # the facts to name in the message, the one to change first
    violated: Callable[[Facts], bool]
    symptom: str  # what one would see without the check; printed as "otherwise"
    cause: str
    fix: str
    source: str


@dataclass(frozen=True)
class Given:
    """A fact that a violated rule blames: name, value, and where it came from ("" for an argument given in code)."""

    name: str
    value: Any
    origin: str = ""

    def __str__(self) -> str:
        value = list(self.value) if isinstance(self.value, tuple) else self.value
        return f"{self.name}={value!r}" + (f" ({self.origin})" if self.origin else "")


@dataclass(frozen=True)
class Violation:
    """A rule that does not hold, with the values that break it."""

    id: str
    severity: Severity
    symptom: str
    reason: str
    fix: str
    given: tuple[Given, ...] = ()

    @property
    def cause(self) -> str:
        """The values as the person wrote them, where they came from, and why they do not go together."""
        values = ", ".join(map(str, self.given))
        return f"{values}: {self.reason}" if values else self.reason

    def as_dict(self) -> dict[str, str]:
        return {name: getattr(self, name) for name in ("id", "severity", "symptom", "cause", "fix")}

    def located(self, origins: Mapping[str, str]) -> Violation:
        """The same, with `origins` (fact name to "file: key") for the facts that it blames."""
        given = tuple(replace(g, origin=origins.get(g.name, g.origin)) for g in self.given)
        return replace(self, given=given)

    def __str__(self) -> str:
        return f"[{self.id}] {self.cause}\n    fix:       {self.fix}\n    otherwise: {self.symptom}"


class ConfigurationError(ValueError):
    """A configuration that cannot train, with every violated rule.

    Attributes:
        violations: the errors and the warnings, in the table's order.
    """

    def __init__(self, violations: Iterable[Violation]) -> None:
        self.violations = tuple(violations)
        super().__init__(self.violations)

    def __str__(self) -> str:
        errors = [v for v in self.violations if v.severity == "error"]
        warnings = [v for v in self.violations if v.severity == "warning"]
        lines = [f"this configuration cannot run: {len(errors)} violated rule{'s' if len(errors) != 1 else ''}"]
        lines += [f"\n{number}. {violation}" for number, violation in enumerate(errors, 1)]
        lines += [f"\nwarning: {violation}" for violation in warnings]
        return "\n".join(lines)

    def located(self, origins: Mapping[str, str]) -> ConfigurationError:
        """The same error, naming the file and key that each argument came from (what a config file's reader knows)."""
        return ConfigurationError(v.located(origins) for v in self.violations)


def violation(rule: Rule, facts: Facts) -> Violation:
    given = tuple(Given(name, getattr(facts, name), facts.origins.get(name, "")) for name in rule.arguments)
    return Violation(rule.id, rule.severity, rule.symptom, rule.cause, rule.fix, given)


def older(version: str | None, minimum: str) -> bool:
    """Whether a known version is below `minimum`; a library known not to be installed is. Pre-releases count as the
    release that they lead to: NVIDIA's containers carry 2.6.0a0."""
    if version is None:
        return False
    if version == ABSENT:
        return True
    try:
        return Version(version).release < Version(minimum).release
    except InvalidVersion:
        return False


def below(value: int | None, minimum: int) -> bool:
    return value is not None and value < minimum


def divides(divisor: int | None, number: int | None) -> bool:
    """Whether `divisor` divides `number`; true where either is unknown."""
    return not divisor or number is None or number % divisor == 0


def te_experts(facts: Facts) -> bool:
    return facts.experts_implementation == "transformer_engine"
