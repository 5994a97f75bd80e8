"""`onnxpar generate` on two processes that mpirun starts."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from onnxpar.llm.generator import Generator


def check_one_rank_prints(par: str, folder: Path) -> None:
    """Checks that the text is printed once; `folder` is the current one of the processes."""
    command = shutil.which("mpirun")
    if command is None:
        pytest.skip("there is no mpirun")
    with Generator(par) as generator:
        (wanted,) = generator.generate("import os", max_new_tokens=8)
    options = ["--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable, "-m", "onnxpar"]
    done = subprocess.run(
        [command, *options, "generate", par, "import os", "--max-new-tokens", "8"],
        capture_output=True,
        timeout=60,
        cwd=folder,
        check=True,
    )
    assert done.stdout.decode() == wanted.text + "\n"
