"""The kernel that stands for an all-to-all: a copy that takes as long as the wire would."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096  # int32 words a program copies at once


def copy_for(out: Tensor, inp: Tensor, seconds: float, num_sms: int) -> None:
    """Copy contiguous `inp` to `out` on `num_sms` multiprocessors and hold them until `seconds` have passed."""
    source, target = (t.view(torch.uint8).reshape(-1) if t.numel() else t for t in (inp, out))
    num_words = source.numel() // 4 if inp.numel() else 0
    emulated_all_to_all[(num_sms,)](
        source.view(torch.int32), target.view(torch.int32), num_words, int(seconds * 1e9), num_sms, _BLOCK, num_warps=16
    )


@triton.jit(do_not_specialize=["num_words", "nanoseconds"])
def emulated_all_to_all(source, target, num_words, nanoseconds, NUM_SMS: tl.constexpr, BLOCK: tl.constexpr):
    start = _nanoseconds()
    first = tl.program_id(0) * BLOCK
    for at in range(first, num_words, NUM_SMS * BLOCK):
        words = at + tl.arange(0, BLOCK)
        value = tl.load(source + words, mask=words < num_words)
        tl.store(target + words, value, mask=words < num_words)
    while _nanoseconds() - start < nanoseconds:
        pass


@triton.jit
def _nanoseconds():
    # The GPU's wall clock: SM clocks vary with load, the wire does not.
    return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
