"""Random small faults of written bundles: none that changes a result is accepted, none crashes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from changes import KINDS
from mutants import CRASH, HOLE, MODELS, judge, mutants
from subjects import Subject

BUNDLES = [
    ("llama.dynamo.static.onnx", "tensor-parallel 2"),
    ("resnet.dynamo.static.onnx", "hybrid dp=2,tp=2"),
    ("dlrm.dynamo.static.onnx", "tensor-parallel 2"),
]


@pytest.mark.parametrize(("model", "layout"), BUNDLES)
def test_no_mutant_slips_through(model: str, layout: str, tmp_path: Path) -> None:
    subject = Subject(MODELS / model, layout, tmp_path / "bundle")
    found = [judge(mutant) for mutant in mutants(subject, 16, 7, [*KINDS])]
    wrong = [f"{o.mutant.text}: {o.said} {o.differs}" for o in found if o.outcome in (HOLE, CRASH)]
    assert len(found) > 8 and not wrong, "\n".join(wrong)
