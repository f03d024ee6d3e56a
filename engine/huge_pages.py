"""Host memory that the kernel is asked to back with huge pages.

A decode step reads hundreds of megabytes of weights and KV, each once. With pages of 4 KiB a fifth of the bandwidth is
lost to address translation.
"""

from __future__ import annotations

import contextlib
import mmap

HUGE_PAGE_SIZE_BYTES = 2 << 20


def map_huge(size_bytes: int) -> mmap.mmap:
    """Memory of zeros, which lives as long as something refers to it."""
    # Private, because huge pages of shared memory are another setting, which is commonly off.
    memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A kernel without huge pages refuses the advice: then the memory is as good as any other.
    with contextlib.suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
