"""How much memory a piece of code takes at its peak, whichever allocator it comes from.

`tracemalloc` is not used in a process with other threads: in CPython before 3.12.9, `tracemalloc.stop()` crashes the
process if another thread allocates memory at that moment.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def _status(field: str) -> int:
    """Return a figure of this process in bytes: `VmRSS`, its memory now, or `VmHWM`, the most it has had."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) << 10
    raise KeyError(field)


@contextmanager
def peak_memory() -> Iterator[Callable[[], int]]:
    """Yield a function that returns how many bytes more than at the start the process has had since."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what is in use now
    before = _status("VmRSS")
    yield lambda: _status("VmHWM") - before
