"""How figures are written: rounded down, so that no report claims more than was measured."""

from __future__ import annotations

from decimal import ROUND_FLOOR, Decimal


def rounded_down(value: float, digits: int) -> str:
    """`value` with `digits` decimals, rounded towards minus infinity: a gain is never overstated, a loss never hidden.

    The value is taken to 12 significant digits first, so that 0.29 * 100 is 29 and not 28.99.
    """
    return str(Decimal(f"{value:.12g}").quantize(Decimal(1).scaleb(-digits), ROUND_FLOOR))


def percent(fraction: float | None, digits: int = 2) -> str:
    """A fraction as "36.55%"; "-" for None."""
    return "-" if fraction is None else f"{rounded_down(100 * fraction, digits)}%"


def milliseconds(value: float) -> str:
    """ "9.079 ms"."""
    return f"{value:,.3f} ms"
