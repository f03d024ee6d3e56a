"""`python -m cluster.live.model_check DIR`: whether a model can be loaded, as far as headers and small files tell.

Prints the reason why not, or nothing. In a process of its own because it needs torch: a command that has both torch and
Ray's library in it, and is interrupted while Ray connects, crashes as it ends.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CHECK_TIMEOUT_S = 120.0


def why_not_loadable(directory: Path) -> str | None:
    """What workers and fronts would find wrong; None if nothing. No weights are read.

    Raises: RuntimeError if the check itself fails.
    """
    command = [sys.executable, "-m", "cluster.live.model_check", str(directory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=CHECK_TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"the model could not be checked: {done.stderr.strip()}")
    return done.stdout.strip() or None


def fault_of(directory: Path) -> str:
    """As `why_not_loadable`, but in this process, and empty if nothing is wrong."""
    from cluster.front.tokenizer import TextTokenizer
    from engine.model.config import model_fingerprint
    from engine.model.safetensors_file import ModelWeightsError, check_files
    from engine.model.select import read_model
    from engine.model.transformers_config import TransformersConfig
    from engine.model.weights import check_weights

    try:
        shape = read_model(directory)
        model_fingerprint(directory)
        if isinstance(shape, TransformersConfig):
            check_files(directory)
        else:
            check_weights(directory, shape)
        TextTokenizer.from_directory(directory)
    except (ModelWeightsError, OSError, ValueError) as error:
        return str(error)
    return ""


if __name__ == "__main__":
    print(fault_of(Path(sys.argv[1])))
