"""Find the last of some programs to arrive, with a word of memory that nobody sets beforehand.

The last one may read what the others stored before they arrived. A counter that has to begin at
zero would need a launch or a copy that outlives the call; with a copy for a device or a stream, two
graphs that run at one time would count in the same words. So the words are a part of a call's own
memory, and hold anything at first. A program reads its word early. If the word is no counter by
then, the program sets it to zero arrivals, unless another one has. The counter's upper 56 bits are
a pattern that nothing else writes, and the last program leaves a counter of zero behind.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BITS = tl.constexpr(8)  # that count
_PATTERN = tl.constexpr(0x5D2F91A7C3E46B)
NONE_ARRIVED = 0x5D2F91A7C3E46B << 8
_NONE = tl.constexpr(NONE_ARRIVED)


def words_of(count: int, device: torch.device) -> torch.Tensor:
    """Allocate ``count`` words, for one launch."""
    return torch.empty(count, dtype=torch.int64, device=device)


@triton.jit
def seen_early(word):
    """Read a word: after ``wait_for_inputs``, and long before ``is_last`` needs it."""
    return tl.load(word, volatile=True)


@triton.jit
def is_last(word, seen, COUNT: tl.constexpr):
    """Arrive at a word; whether this program is the last of COUNT, and sees what all stored.

    Args:
        word: Where the programs count.
        seen: What ``seen_early`` returned.
        COUNT: Number of programs, below 256.
    """
    tl.debug_barrier()  # the stores of all threads come before the arrival of one
    if (seen >> _BITS) != _PATTERN:
        tl.atomic_cas(word, seen, _NONE, sem="relaxed")
    arrived = tl.atomic_add(word, 1, sem="acq_rel", scope="gpu")
    return arrived == _NONE + COUNT - 1


@triton.jit
def leave(word):
    """Leave a counter of zero arrivals; the last program alone."""
    tl.store(word, _NONE)
