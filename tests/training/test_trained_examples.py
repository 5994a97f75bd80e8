"""The examples that train to an end, as a person runs them: what they reach."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(folder: Path, *arguments: str, before: tuple[str, ...] = ()) -> str:
    """What a script prints, run in a folder outside the checkout."""
    script, *rest = arguments
    command = [*before, sys.executable, str(EXAMPLES / script), *rest]
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=150)
    assert ran.returncode == 0, ran.stderr
    assert not ran.stderr
    return ran.stdout


def losses(text: str) -> list[float]:
    return [
        float(v) for v in re.findall(r"^epoch: \d+ step: \d+, loss is (\S+?),?(?: |$)", text, re.M)
    ]


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("network", "how"),
    [
        ("mlp", ["--epochs", "5"]),
        ("conv", ["--epochs", "3"]),
        ("mlp", ["--mesh", "dp=2,tp=2", "--preset", "zero3", "--epochs", "5"]),
    ],
)
def test_digits(network: str, how: list[str], tmp_path: Path) -> None:
    """Over 8 ranks, and over a mesh that a script is told."""
    told = run(tmp_path, "digits.py", "--network", network, *how)
    assert len(losses(told)) == int(how[-1])
    found = re.search(r"^held-out accuracy of the plain model: (\S+)% of 357$", told, re.M)
    assert found is not None and float(found[1]) >= 96


@pytest.mark.slow
def test_readme_gpt(tmp_path: Path) -> None:
    """Below what the frequencies of letters tell; the model goes on from the text's first ones."""
    told = run(tmp_path, "readme_gpt.py", "--devices", "2", "--epochs", "3")
    known = re.search(r"^letters by their frequency alone: loss is (\S+)$", told, re.M)
    assert known is not None
    assert losses(told)[-1] < float(known[1]) - 0.4
    written = told[told.index("# onnxpar") :]
    assert len(written) > 200 and len(set(written)) > 10


@pytest.mark.slow
def test_hvd_digits(tmp_path: Path) -> None:
    """Ranks in a loop of one's own, and what they leave."""
    mpirun = shutil.which("mpirun")
    if mpirun is None:
        pytest.skip("there is no mpirun")
    (tmp_path / "hosts").write_text("localhost slots=2\n")
    before = (mpirun, "--allow-run-as-root", "--hostfile", str(tmp_path / "hosts"), "-n", "2")
    told = run(tmp_path, "hvd_digits.py", str(tmp_path / "params.npz"), before=before)
    assert len(losses(told)) == 10
    found = re.search(r"^held-out accuracy: (\S+)%$", told, re.M)
    assert found is not None and float(found[1]) >= 96
    with np.load(tmp_path / "params.npz") as params:
        assert {name: params[name].shape for name in params.files} == {
            "w1": (64, 64),
            "b1": (64,),
            "w2": (64, 10),
            "b2": (10,),
        }
