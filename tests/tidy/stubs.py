"""Generates the stubs beside the .proto files: `python -m tests.tidy.stubs` writes them, the test compares."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROTO_ROOT = Path(__file__).resolve().parents[2] / "proto"


def generate(target: Path) -> list[Path]:
    """Writes the stubs of every .proto file under `target` and returns their paths relative to it."""
    sources = sorted(str(path.relative_to(PROTO_ROOT)) for path in PROTO_ROOT.glob("baton/v1/*.proto"))
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTO_ROOT}"]
    command += [f"--{kind}_out={target}" for kind in ("python", "mypy", "grpc_python", "mypy_grpc")]
    subprocess.run([*command, *sources], check=True, cwd=PROTO_ROOT, capture_output=True)
    return sorted(path.relative_to(target) for path in target.glob("baton/v1/*_pb2*.py*"))


if __name__ == "__main__":
    for path in generate(PROTO_ROOT):
        print(path)
