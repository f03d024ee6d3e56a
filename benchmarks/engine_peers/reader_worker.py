"""The yardsticks: native loops that read memory, and that multiply, on as many threads as the engines have cores."""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.engine_peers.worker_loop import serve, take_stdout

SOURCE = Path(__file__).with_name("read_loop.cpp")
ALIGNMENT = 256
MULTIPLY_ROUNDS = 8_000_000
"""Some tens of milliseconds."""


def build(folder: Path) -> ctypes.CDLL:
    """Compiles the loop for this very machine. Raises CalledProcessError where it does not compile."""
    target = folder / "read_loop.so"
    compiler = os.environ.get("CXX", "g++")
    command = [compiler, "-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", str(SOURCE), "-o", str(target)]
    subprocess.run(command, check=True)
    library = ctypes.CDLL(str(target))
    library.read_loop_allocate.argtypes = (ctypes.c_size_t,)
    library.read_loop_allocate.restype = ctypes.c_void_p
    library.read_loop_run.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    library.read_loop_run.restype = ctypes.c_uint64
    for run in (library.multiply_pairs_run, library.multiply_floats_run):
        run.argtypes = (ctypes.c_uint64,)
        run.restype = ctypes.c_uint64
    return library


class Reader:
    """Memory of `size_bytes` at most, and one thread a core to read it, bound to it."""

    def __init__(self, library: ctypes.CDLL, size_bytes: int, cores: list[int]) -> None:
        self._library = library
        self._size_bytes = size_bytes
        self._data = library.read_loop_allocate(size_bytes)
        if self._data is None:
            raise MemoryError(f"no {size_bytes} bytes of memory to read")
        self._cores = cores

    def read(self, size_bytes: int, count: int) -> list[float]:
        """Seconds of each of `count` passes over so many bytes."""
        share = size_bytes // len(self._cores) // ALIGNMENT * ALIGNMENT
        assert len(self._cores) * share <= self._size_bytes
        run = self._library.read_loop_run
        return [self._time(lambda index: run(self._data + index * share, share)) for _ in range(count)]

    def multiply(self) -> float:
        """Products a second of the faster loop, of all cores; 0 where the machine has something faster than loops."""
        return max(map(self._multiply, (self._library.multiply_pairs_run, self._library.multiply_floats_run)))

    def _multiply(self, run: Callable[[int], int]) -> float:
        num_products: list[int] = []
        seconds = self._time(lambda index: num_products.append(run(MULTIPLY_ROUNDS)))
        return sum(num_products) / seconds

    def _time(self, run_share: Callable[[int], object]) -> float:
        """Seconds until all threads, started at once, have done their share."""
        barrier = threading.Barrier(len(self._cores))
        spans: list[tuple[float, float]] = []

        def run(index: int) -> None:
            os.sched_setaffinity(0, [self._cores[index]])  # of this thread
            barrier.wait()
            start_s = time.perf_counter()
            run_share(index)
            spans.append((start_s, time.perf_counter()))

        threads = [threading.Thread(target=run, args=(index,)) for index in range(len(self._cores))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return max(end for _, end in spans) - min(start for start, _ in spans)


def main() -> None:
    answers = take_stdout()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size-bytes", type=int, required=True)
    parser.add_argument("--num-threads", type=int, required=True)
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    assert len(cores) == args.num_threads
    with tempfile.TemporaryDirectory() as folder:
        reader = Reader(build(Path(folder)), args.size_bytes, cores)
    print('"ready"', file=answers, flush=True)
    serve(answers, {"read": reader.read, "multiply": reader.multiply})


if __name__ == "__main__":
    main()
