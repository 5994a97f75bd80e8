"""Random small faults of written bundles: none that changes a result is accepted, none crashes."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from agreement import run_unsplit

sys.path.insert(0, str(Path(__file__).parent))
from changes import KINDS
from mutants import CRASH, ELSEWHERE, HOLE, MODELS, RIGHT, judge, mutants, subjects
from subjects import Subject

BUNDLES = [
    ("llama.dynamo.static", "tensor-parallel 2"),
    ("resnet.dynamo.static", "hybrid dp=2,tp=2"),
    ("dlrm.dynamo.static", "tensor-parallel 2"),
]
MORE = [
    ("gpt2.dynamo.static", "sequence-parallel 2"),
    ("bert.dynamo.static", "context-parallel 2"),
    ("bert.dynamo.static", "hybrid dp=2,tp=2"),
    ("qdq", "tensor-parallel 2"),
    ("mlp.step", "zero3 3"),
]


def check(model: str, layout: str, count: int, folder: Path) -> None:
    """Asserts that of mutants of a bundle none is a hole, and most are refused at the tensor."""
    ((path, _, how),) = (each for each in subjects(folder, model, layout) if each[1] == layout)
    subject = Subject(path, layout, folder / "bundle", **how)
    found = [judge(mutant) for mutant in mutants(subject, count, 7, [*KINDS])]
    wrong = [f"{o.mutant.text}: {o.said} {o.differs}" for o in found if o.outcome in (HOLE, CRASH)]
    assert len(found) > count / 2 and not wrong, "\n".join(wrong)
    counts = Counter(outcome.outcome for outcome in found)
    assert counts[RIGHT] >= 0.9 * (counts[RIGHT] + counts[ELSEWHERE])


@pytest.mark.parametrize(("model", "layout"), BUNDLES)
def test_no_mutant_slips_through(model: str, layout: str, tmp_path: Path) -> None:
    check(model, layout, 16, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "layout"), BUNDLES + MORE)
def test_none_of_many_mutants_slips_through(model: str, layout: str, tmp_path: Path) -> None:
    check(model, layout, 120, tmp_path)


def test_the_oracle_agrees_with_onnxruntime(tmp_path: Path) -> None:
    """Of the unsplit model, in float64, but for rounding in float32."""
    subject = Subject(MODELS / "llama.dynamo.static.onnx", "tensor-parallel 2", tmp_path / "bundle")
    for number in range(4):
        found = run_unsplit(subject.model, subject.feeds(number))
        for got, wanted in zip(found, subject.wanted(number).values(), strict=True):
            np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
