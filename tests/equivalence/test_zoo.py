"""Exports of models/, and ONNX's own cases split in every way, are shown where ranks are right."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from agreement import options
from peer.cases import PeerCase, all_cases
from peer.trial import Bench, Trials

import onnxpar
from onnxpar.base.errors import OnnxparError
from onnxpar.planner import sharder

MODELS = Path(__file__).parents[2] / "models"
LAYOUTS = (
    "2", "3", "4", "8", "data-parallel 3", "tensor-parallel 3", "tensor-parallel 8",
    "hybrid dp=1,tp=3", "hybrid dp=2,tp=2", "hybrid dp=2,tp=4", "sequence-parallel 3",
    "context-parallel 4", "expert-parallel 4",
)  # fmt: skip
NOT_SHOWN = ("bags/padded", "bags/offsets", "ml/svm", "llm/")
"""Exports of which some layouts are not shown: sequences that a Loop fills; support vectors, of
which ranks have parts; attention of a runtime over batches that may leave ranks without samples;
batches in parts, of which only the branch that is taken tells the size."""


def exports() -> list[str]:
    """The exports that are shown in all layouts."""
    paths = sorted(
        p.relative_to(MODELS) for p in MODELS.rglob("*.onnx") if "training" not in p.name
    )
    return [str(path) for path in paths if not str(path).startswith(NOT_SHOWN)]


@pytest.mark.slow
@pytest.mark.matrix(60)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", exports())
def test_exports(name: str, layout: str, tmp_path: Path) -> None:
    try:
        sharder.shard(MODELS / name, tmp_path / "model.par", options(layout))
    except OnnxparError as error:
        pytest.skip(f"it cannot be split so: {error}")
    result = onnxpar.verify(MODELS / name, tmp_path / "model.par")
    assert result.ok, result.text()


PARTS = 20
SHOWN = 0.97
"""The least share of splits of ONNX's cases that are shown. The others are ops that no runtime
computes alone, sizes inside of a model that its inputs decide, and draws without a seed."""


def shown(case: PeerCase, part: int, folder: Path) -> Counter[bool]:
    """How many of a part of a case's splits are shown."""
    found: Counter[bool] = Counter()
    trials = Trials(case, Bench(folder))
    try:
        splits = trials.splits()
    except OnnxparError:
        return found
    for number, split in enumerate(splits):
        if (number + len(case.name)) % PARTS == part:
            par = folder / f"{number}.par"
            par.mkdir()
            try:
                trials._shard(split, par)
            except OnnxparError:
                continue
            try:
                found[onnxpar.verify(trials.path, par).ok] += 1
            except OnnxparError:
                found[False] += 1
    return found


@pytest.mark.slow
@pytest.mark.matrix(PARTS)
@pytest.mark.parametrize("part", range(PARTS))
def test_cases_of_onnx(part: int, tmp_path: Path) -> None:
    found: Counter[bool] = Counter()
    for number, case in enumerate(all_cases()):
        folder = tmp_path / str(number)
        folder.mkdir()
        found += shown(case, part, folder)
    assert found[True] >= SHOWN * found.total() > 0, found
