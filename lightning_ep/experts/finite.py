"""NaN and infinity: noticed without a wait of the host, reported with the layer where they came in.

A router that meets NaN gives weights of NaN. Slots with such weights get an id of no expert, and those are counted in
what the hosts read before every exchange anyway, so the EP group learns of it before the experts compute. Where it came
from is looked up only then: in the parameters, and in the last output of every layer, of which the GPU keeps a sum.
"""

from __future__ import annotations

import math
from os import PathLike

import torch
from torch import Tensor, nn

# At most so many parameters in one message.
_SHOWN = 3


class NotFiniteError(ValueError):
    """Parameters hold NaN, so they are not worth saving."""


class FiniteCheck:
    """What is known about the numbers of `model`."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._sums: dict[int, Tensor] = {}

    def note(self, layer: int, out_TD: Tensor) -> None:
        """Keep the sum of what this layer's experts gave: it is finite if they are. One kernel; nobody waits."""
        total = self._sums.get(layer)
        if total is None or total.device != out_TD.device:
            total = self._sums[layer] = torch.zeros((), dtype=torch.float32, device=out_TD.device)
        torch.sum(out_TD.detach(), (0, 1), dtype=torch.float32, out=total)

    def cause(self, layer: int) -> str:
        """Where NaN came from that the router of `layer` met, as far as this rank can tell; "" if it cannot.

        Waits for the GPU, so only for errors.
        """
        wrong = [i for i, total in sorted(self._sums.items()) if not math.isfinite(total.item())]
        before = [i for i in wrong if i < layer]  # of this pass; the other layers' sums are of the pass before
        parts = []
        if before:
            parts.append(f"the output of MoE layer {before[0]} was not finite")
        elif wrong:
            parts.append(f"in the batch before, the output of MoE layer {wrong[0]} was not finite")
        if holders := self.parameters_with_nan():
            parts.append(f"this rank has NaN in {_listed(holders)}")
        return "; ".join(parts)

    def refuse_nan(self, path: str | PathLike) -> None:
        """Raise NotFiniteError when a parameter of this rank holds NaN, instead of saving it at `path`."""
        if holders := self.parameters_with_nan():
            raise NotFiniteError(
                f"{path} is not saved: there is NaN in {_listed(holders)}. What was saved before is unchanged."
            )

    def parameters_with_nan(self) -> list[str]:
        """Names of this rank's parameters. Reads them all once, and the host waits."""
        named = [(name, p.detach()) for name, p in self.model.named_parameters() if p.is_floating_point()]
        if not named:
            return []
        # A sum is NaN if a part is, and needs no mask as large as the parameter.
        flags = torch.stack([p.sum(dtype=torch.float32).isnan() for _, p in named]).tolist()
        return [name for (name, _), flag in zip(named, flags, strict=True) if flag]


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more parameters" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
