"""Compiles the native CPU kernels: `python -m engine.attention.build`. Needs g++ and takes some ten seconds.

Each instruction set is a translation unit with its own flags; the library chooses among them when it runs. The
library's name carries a hash of the sources and flags, so that one built from other sources is never loaded.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCE_DIR = Path(__file__).with_name("native")
BUILD_DIR = SOURCE_DIR / "build"
COMPILE_TIMEOUT_S = 300.0

COMMON_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fno-strict-aliasing",
    "-ffp-contract=fast",
    "-Wall",
    "-Wno-psabi",
    "-Wno-ignored-attributes",
)
AVX2_FLAGS = ("-mavx2", "-mfma")
AVX512_FLAGS = (*AVX2_FLAGS, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512")
COMMON_UNITS: dict[str, tuple[str, ...]] = {
    "dispatch.cpp": (),
    "program.cpp": (),
    "thread_team.cpp": (),
    "kernels_generic.cpp": (),
}
X86_UNITS: dict[str, tuple[str, ...]] = {
    "kernels_avx2.cpp": AVX2_FLAGS,
    "kernels_avx512.cpp": AVX512_FLAGS,
    "kernels_avx512_bf16.cpp": (*AVX512_FLAGS, "-mavx512bf16"),
    "kernels_amx.cpp": (*AVX512_FLAGS, "-mavx512bf16"),
    "amx.cpp": (),
}


class KernelBuildError(Exception):
    """There is no compiler, or it failed; the message holds what it printed."""


def is_x86() -> bool:
    return platform.machine() in ("x86_64", "AMD64")


def library_name() -> str:
    """File name of the library that belongs to the present sources, flags and machine type."""
    digest = hashlib.blake2b(digest_size=8)
    for source in sorted(SOURCE_DIR.glob("*.[ch]*")):
        digest.update(source.name.encode())
        digest.update(source.read_bytes())
    digest.update(repr((COMMON_FLAGS, COMMON_UNITS, X86_UNITS, platform.machine())).encode())
    return f"libbaton_kernels-{digest.hexdigest()}.so"


def build(output_dir: Path = BUILD_DIR, compiler: str = "g++") -> Path:
    """Compile the library into `output_dir` unless it is there; returns its path.

    Raises:
        KernelBuildError: no C++ compiler, or it failed.
    """
    target = output_dir / library_name()
    if target.is_file():
        return target
    if shutil.which(compiler) is None:
        raise KernelBuildError(f"no C++ compiler: {compiler} is not installed")
    output_dir.mkdir(parents=True, exist_ok=True)
    units = {**COMMON_UNITS, **(X86_UNITS if is_x86() else {})}
    defines = ("-DBATON_HAVE_X86",) if is_x86() else ()
    with tempfile.TemporaryDirectory(dir=output_dir) as scratch:

        def compile_unit(unit: str) -> str:
            object_file = str(Path(scratch) / f"{unit}.o")
            _run([compiler, *COMMON_FLAGS, *units[unit], *defines, "-c", str(SOURCE_DIR / unit), "-o", object_file])
            return object_file

        with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
            objects = list(pool.map(compile_unit, units))
        linked = Path(scratch) / target.name
        _run([compiler, "-shared", "-pthread", "-Wl,-z,defs", *objects, "-o", str(linked)])
        linked.replace(target)
    _remove_older(target)
    return target


def _run(command: list[str]) -> None:
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise KernelBuildError(f"{command[0]} took longer than {COMPILE_TIMEOUT_S:.0f} s") from error
    if result.returncode != 0:
        raise KernelBuildError(f"{' '.join(command)} failed:\n{result.stderr}")


def _remove_older(target: Path) -> None:
    """Libraries of other sources; a process that has one loaded keeps it."""
    for library in target.parent.glob("libbaton_kernels-*.so"):
        if library != target:
            library.unlink(missing_ok=True)


def main() -> int:
    try:
        print(build(compiler=os.environ.get("CXX", "g++")))
    except KernelBuildError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
