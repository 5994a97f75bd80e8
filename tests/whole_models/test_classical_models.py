"""Models of scikit-learn, XGBoost and LightGBM, split over ranks, predict what the libraries
predict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import onnxpar
from onnxpar.runtime.session.values import arrays_in

FOLDER = Path(__file__).parents[2] / "models" / "ml"
NAMES = sorted(file.stem for file in FOLDER.glob("*.onnx"))
PARTS = {
    "forest_classifier": ("nodes_treeids", 11),
    "boosted_regressor": ("nodes_treeids", 14),
    "xgboost_regressor": ("nodes_treeids", 13),
    "xgboost_classifier": ("nodes_treeids", 15),
    "lightgbm_classifier": ("nodes_treeids", 12),
}
"""The attribute that numbers the trees of a forest, and their number."""
SPLITS: dict[str, dict[str, Any]] = {
    "dp=3": {"preset": "data-parallel"},
    "tp=3": {"preset": "tensor-parallel"},
    "dp=2,tp=2": {"preset": "hybrid"},
}


def committed(name: str, prefix: str) -> dict[str, Any]:
    with np.load(FOLDER / f"{name}.npz") as arrays:
        return {k.removeprefix(prefix): arrays[k] for k in arrays if k.startswith(prefix)}


def strings(feeds: dict[str, Any]) -> dict[str, Any]:
    return {k: v.astype(object) if v.dtype.kind == "U" else v for k, v in feeds.items()}


def flat(names: list[str], results: list[Any]) -> dict[str, Any]:
    pairs = zip(names, results, strict=True)
    return {key: array for name, value in pairs for key, array in arrays_in(name, value).items()}


@pytest.mark.matrix
@pytest.mark.parametrize("mesh", SPLITS)
@pytest.mark.parametrize("name", NAMES)
def test_predictions(name: str, mesh: str, tmp_path: Path) -> None:
    file = FOLDER / f"{name}.onnx"
    onnxpar.shard(file, tmp_path / "par", mesh=mesh, **SPLITS[mesh])
    reference = ort.InferenceSession(file, providers=["CPUExecutionProvider"])
    names = [port.name for port in reference.get_outputs()]
    feeds = strings(committed(name, "feed."))
    with onnxpar.InferenceSession(tmp_path / "par") as session:
        for rows in (23, 5, 1):
            few = {k: v[:rows] for k, v in feeds.items()}
            wanted, found = (flat(names, s.run(names, few)) for s in (reference, session))
            assert found.keys() == wanted.keys()
            for key, array in wanted.items():
                if array.dtype.kind == "f":
                    np.testing.assert_allclose(found[key], array, rtol=0, atol=1e-5)
                else:
                    np.testing.assert_array_equal(found[key], array)
            if rows == 23:
                check_library(name, found)


def check_library(name: str, found: dict[str, Any]) -> None:
    """The results are also what the library itself predicted when the model was exported."""
    for key, want in committed(name, "want.").items():
        (have,) = (v for k, v in found.items() if key[:4] in k and not k.endswith("keys"))
        if want.dtype.kind == "f":
            columns = next((v for k, v in found.items() if k.endswith("keys")), None)
            if columns is not None and columns.dtype.kind == "U":
                assert list(columns) == sorted(columns)  # as the library orders its classes
            np.testing.assert_allclose(have.reshape(want.shape), want, rtol=0, atol=2e-4)
        else:
            assert have.tolist() == want.tolist()


@pytest.mark.matrix
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", PARTS)
def test_a_rank_has_only_its_trees(name: str, ranks: int, tmp_path: Path) -> None:
    key, count = PARTS[name]
    plan = onnxpar.shard(
        FOLDER / f"{name}.onnx", tmp_path / "par", mesh=f"tp={ranks}", preset="tensor-parallel"
    )
    held: list[int] = []
    for rank in range(ranks):
        model = onnx.load(tmp_path / "par" / f"rank_{rank:04d}.onnx")
        (forest,) = [n for n in model.graph.node if n.op_type.startswith("TreeEnsemble")]
        assert len(forest.input) == 1
        trees = next({i for i in a.ints if i < count} for a in forest.attribute if a.name == key)
        assert len(trees) <= -(-count // ranks)  # besides one of base values
        held += trees
    assert len(held) == len(set(held)) == count
    assert [c.kind for c in plan.collectives] == ["AllReduce"]
    (weight,) = [w for w in plan.weights if w.name.endswith(".trees")]
    assert weight.bytes_per_rank <= -(-count // ranks) / count * weight.bytes + 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["svm_classifier", "svm_regressor"])
def test_a_rank_has_only_its_support_vectors(name: str, tmp_path: Path) -> None:
    plan = onnxpar.shard(
        FOLDER / f"{name}.onnx", tmp_path / "par", mesh="tp=4", preset="tensor-parallel"
    )
    (weight,) = [w for w in plan.weights if w.name.endswith(".vectors")]
    count = weight.shape[0]
    held = 0
    for rank in range(4):
        model = onnx.load(tmp_path / "par" / f"rank_{rank:04d}.onnx")
        (columns,) = [t.dims[1] for t in model.graph.initializer if t.dims[:1] == [6]] or [
            a.i for n in model.graph.node for a in n.attribute if a.name == "n_supports"
        ]
        assert columns <= -(-count // 4)
        held += columns
    assert held == count
    assert [c.kind for c in plan.collectives] == ["AllReduce"]
