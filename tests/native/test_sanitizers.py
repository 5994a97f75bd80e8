"""The plugin under sanitizers: with damaged frames, strangers and peers that lie, no report names
its code."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "sanitize.sh"
NEEDED = ("cmake", "gcc", "setarch")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not all(map(shutil.which, NEEDED)), reason=f"needs {', '.join(NEEDED)}")
@pytest.mark.parametrize("kind", ["address", "thread"])
def test_no_report_names_the_plugin(kind: str) -> None:
    command = ["bash", str(SCRIPT), kind, "-k", "not sanitizers"]
    environment = {**os.environ, "PYTHON": sys.executable}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-6000:] + ended.stderr[-2000:]
