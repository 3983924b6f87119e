"""Launching Triton kernels at little host cost. Imported only where Triton is used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
from torch import Tensor

# Before 3.3 a compiled kernel was not handed its constants again.
_TAKES_CONSTANTS = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 3)


class Kernel:
    """A Triton kernel that is looked up by what it was compiled for.

    Triton looks at every argument and option at every launch, which takes three times as long as the launch itself.
    Here the caller says which arguments are sizes, for which nothing is ever compiled, and which are constants.
    """

    def __init__(self, jit: Any) -> None:
        self.jit = jit
        self._compiled: dict[tuple, Any] = {}

    def __call__(
        self,
        grid: tuple[int, int],
        tensors: tuple[Tensor, ...],
        sizes: tuple[int, ...] = (),
        constants: tuple[Any, ...] = (),
        num_warps: int = 4,
    ) -> None:
        """Launch; the kernel's parameters are tensors, then sizes, then constants, all on the current device."""
        key = (
            num_warps,
            constants,
            tensors[0].device,
            *[tensor.dtype for tensor in tensors],
            *[tensor.data_ptr() & 15 for tensor in tensors],
        )
        compiled = self._compiled.get(key)
        if compiled is None:
            # Under Triton's interpreter this returns None, and every call comes here.
            self._compiled[key] = self.jit[(*grid, 1)](*tensors, *sizes, *constants, num_warps=num_warps)
        else:
            compiled[(*grid, 1)](*tensors, *sizes, *(constants if _TAKES_CONSTANTS else ()))


def kernel(sizes: tuple[str, ...] = (), scalar: tuple[str, ...] = ()) -> Callable[[Callable], Kernel]:
    """Decorator that makes a `Kernel`.

    Args:
        sizes: parameters that may have any value without a new compilation.
        scalar: tensors to access element by element, although 16 bytes at a time would do.
    """
    return lambda function: Kernel(
        triton.jit(function, do_not_specialize=list(sizes), do_not_specialize_on_alignment=list(scalar))
    )


# triton.cdiv and triton.next_power_of_2 may be called in kernels too, and take as long as a launch on the host.
def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length()
