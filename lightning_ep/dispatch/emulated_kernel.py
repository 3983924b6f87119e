"""The kernel that stands for an all-to-all: a copy that takes as long as the wire would."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from lightning_ep.triton_kernel import kernel

_BLOCK = 4096  # int32 words a program copies at once


def copy_for(out: Tensor, inp: Tensor, seconds: float, num_sms: int) -> None:
    """Copy contiguous `inp` to `out` on `num_sms` multiprocessors and hold them until `seconds` have passed."""
    assert inp.nbytes % 4 == 0, "copied in words of 4 bytes"
    emulated_all_to_all(
        (num_sms, 1), (inp, out), (inp.nbytes // 4, round(seconds * 1e6)), (num_sms, _BLOCK), num_warps=16
    )


@kernel(sizes=("num_words", "microseconds"))
def emulated_all_to_all(source, target, num_words, microseconds, NUM_SMS: tl.constexpr, BLOCK: tl.constexpr):
    start = _nanoseconds()
    for at in range(tl.program_id(0) * BLOCK, num_words, NUM_SMS * BLOCK):
        word = at + tl.arange(0, BLOCK)
        value = tl.load(source.to(tl.pointer_type(tl.int32)) + word, mask=word < num_words)
        tl.store(target.to(tl.pointer_type(tl.int32)) + word, value, mask=word < num_words)
    end = start + microseconds.to(tl.int64) * 1000
    while _nanoseconds() < end:
        pass


@triton.jit
def _nanoseconds():
    # The GPU's wall clock: SM clocks vary with load, the wire does not.
    return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
