"""Compiles the native copy kernel: `python -m kv_transfer.build`. Needs a C++ compiler and takes a second or two.

The library's name carries a hash of the sources and flags, so that one built from other sources is never loaded.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE_DIR = Path(__file__).with_name("native")
BUILD_DIR = SOURCE_DIR / "build"
COMPILE_TIMEOUT_S = 120.0
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-fno-exceptions", "-Wall", "-Wextra")


class NativeBuildError(Exception):
    """There is no compiler, or it failed; the message holds what it printed."""


def library_path(output_dir: Path = BUILD_DIR) -> Path:
    """Where the library of the present sources, flags and machine type is, or would be."""
    digest = hashlib.blake2b(repr((FLAGS, platform.machine())).encode(), digest_size=8)
    for source in sorted(SOURCE_DIR.glob("*.cpp")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return output_dir / f"libbaton_copy-{digest.hexdigest()}.so"


def build(output_dir: Path = BUILD_DIR, compiler: str = "g++") -> Path:
    """Compiles the library unless it is there; returns its path. Raises: NativeBuildError."""
    target = library_path(output_dir)
    if target.is_file():
        return target
    if shutil.which(compiler) is None:
        raise NativeBuildError(f"no C++ compiler: {compiler} is not installed")
    output_dir.mkdir(parents=True, exist_ok=True)
    sources = [str(source) for source in sorted(SOURCE_DIR.glob("*.cpp"))]
    with tempfile.TemporaryDirectory(dir=output_dir) as scratch:
        linked = Path(scratch) / target.name
        command = [compiler, *FLAGS, *sources, "-o", str(linked)]
        try:
            result = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise NativeBuildError(f"{compiler} took longer than {COMPILE_TIMEOUT_S:.0f} s") from error
        if result.returncode != 0:
            raise NativeBuildError(f"{' '.join(command)} failed:\n{result.stderr}")
        linked.replace(target)  # at once, so that nobody loads half a library
    for library in output_dir.glob("libbaton_copy-*.so"):
        if library != target:
            library.unlink(missing_ok=True)
    return target


def main() -> int:
    try:
        print(build(compiler=os.environ.get("CXX", "g++")))
    except NativeBuildError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
