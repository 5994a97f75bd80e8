"""MindSpore's attributes of operators as keys of `shard`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import pytest
from small_models import HEAD, write_text

import onnxpar
import onnxpar.training
from onnxpar.base.errors import StrategyError

LOOKUP = """m (int64[8,3] ids, float[20,6] w1, float[6,5] w2) => (float[8,3,5] y)
{ e = Gather(w1, ids)  y = MatMul(e, w2) }"""
MLP = """m (float[8,16] x, float[16,32] w1, float[32,16] w2, float[16,4] w3) => (float[8,4] y)
{ h = MatMul(x, w1)  r = Relu(h)  g = MatMul(r, w2)  s = Relu(g)  y = MatMul(s, w3) }"""


@pytest.fixture
def lookup(tmp_path: Path) -> Path:
    return write_text(HEAD + LOOKUP, tmp_path / "lookup.onnx")


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("step")
    path = folder / "step.onnx"
    net = write_text(HEAD + MLP, folder / "m.onnx")
    onnxpar.training.grad(net, path, loss="mse", optimizer="sgd")
    return path


@pytest.mark.matrix
@pytest.mark.parametrize("split", [[11, 6, 3], [[11, 0], [6, 11], [3, 17]], ((11,), (6,), (3,))])
def test_a_table_is_split_by_hand(lookup: Path, tmp_path: Path, split: Any) -> None:
    """Each id finds its row, on whichever rank; parts are as large as asked."""
    entry = {"mesh": {"tp": 3}, "shard": {"w1": {"manual_split": split, "primitive_target": "CPU"}}}
    plan = onnxpar.shard(lookup, tmp_path / "l.par", strategy=entry)
    (table,) = (w for w in plan.weights if w.name == "w1")
    assert table.layout_text == "[tp{11,6,3}, -]" and table.bytes_per_rank == 11 * 6 * 4
    ids = np.arange(24).reshape(8, 3) % 20
    (wanted,) = ort.InferenceSession(lookup).run(None, {"ids": ids})
    with onnxpar.InferenceSession(tmp_path / "l.par") as session:
        (found,) = session.run(None, {"ids": ids})
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_in_strategy_is_the_list_of_inputs(step: Path) -> None:
    plans = [
        onnxpar.plan(step, strategy={"mesh": {"dp": 2, "tp": 2}, "shard": {"MatMul_h": entry}})
        for entry in ([[2, 1], [1, 2]], {"in_strategy": ((2, 1), (1, 2)), "recompute": False})
    ]
    texts = [replace(plan, request=None).text() for plan in plans]  # that has the words of the user
    assert texts[0] == texts[1]
    (weight,) = (p for p in plans[1].inputs if p.name == "w1")
    assert weight.layout is not None and weight.layout.text(plans[1].mesh) == "[-, tp]"


@pytest.mark.parametrize("fusion", [None, "none"])
def test_gradients_are_fused_by_the_number_of_their_parameters(
    step: Path, fusion: str | None
) -> None:
    how: dict[str, Any] = {"devices": 2, "preset": "data-parallel", "fusion": fusion}

    def buckets(**numbers: int) -> list[set[str]]:
        shard = {name: {"comm_fusion": number} for name, number in numbers.items()}
        plan = onnxpar.plan(step, strategy={"shard": shard}, **how)
        names = {"MatMul_h": "w1", "MatMul_g": "w2", "MatMul_y": "w3"}
        sums = [c.tensor.split() for c in plan.collectives if ".grad" in c.tensor]
        return [{names[t.split(".grad")[0]] for t in tensors} for tensors in sums]

    def of(*each: set[str]) -> list[list[str]]:
        return sorted(sorted(one) for one in each)

    assert of(*buckets(w1=1, w3=1, w2=2)) == of({"w1", "w3"}, {"w2"})
    assert of(*buckets(w1=0, w2=3, w3=3)) == of({"w1"}, {"w2", "w3"})
    rest = [{"w2", "w3"}] if fusion is None else [{"w2"}, {"w3"}]
    assert of(*buckets(w1=0)) == of({"w1"}, *rest)


@pytest.mark.slow
def test_buckets_by_hand_leave_the_numbers_as_they_are(step: Path) -> None:
    shard = {"w*": {"comm_fusion": 1}, "w2": {"comm_fusion": 0}}
    rng = np.random.default_rng(0)
    data = onnxpar.plan(step, devices=2, preset="data-parallel").to_json()["step"]["data"]
    shapes = [(16, 16), (16, 4)]
    feeds = {
        n: rng.standard_normal(s).astype(np.float32) for n, s in zip(data, shapes, strict=True)
    }
    found = onnxpar.check(
        step,
        feeds,
        train=True,
        steps=3,
        devices=2,
        preset="data-parallel",
        strategy={"shard": shard},
    )
    assert found.ok


BAD: list[tuple[str, dict[str, Any], str]] = [
    ("w1", {"manual_split": "abc"}, "number of rows of each part"),
    ("w1", {"manual_split": []}, "number of rows of each part"),
    ("w1", {"manual_split": [[11, 0], [9, 0]]}, r"write \[\[11, 0\], \[9, 11\]\]"),
    ("w1", {"manual_split": [10, 5, 5]}, "no axis of the mesh tp=2 has 3 ranks"),
    ("w1", {"manual_split": [10, 9]}, "20"),
    ("w2", {"manual_split": [3, 3]}, "is for a Gather"),
    ("w1", {"primitive_target": "Ascend"}, "ranks run on CPUs"),
    ("w1", {"recompute": True}, "onnxpar grad --recompute-nodes"),
    ("w1", {"comm_fusion": -1}, "bucket from 1"),
    ("w1", {"comm_fusion": 1}, "parameters of a training step"),
    ("w1", {"manual_split": [10, 10], "in_strategy": [[2, 1], [1, 1]]}, "split the same node"),
    ("w1", {"manual_splits": [10, 10]}, "has no factor 'manual_splits'"),
]


@pytest.mark.parametrize("name,entry,words", BAD)
def test_what_cannot_be_followed_is_refused(
    lookup: Path, name: str, entry: dict[str, Any], words: str
) -> None:
    with pytest.raises(StrategyError, match=words):
        onnxpar.plan(lookup, strategy={"mesh": {"tp": 2}, "shard": {name: entry}})


@pytest.mark.parametrize("ranks", [{"mesh": "tp=2"}, {"devices": 2}])
def test_a_search_keeps_to_the_keys(lookup: Path, ranks: dict[str, Any]) -> None:
    """Names of targets are no axes."""
    shard = {"w1": {"manual_split": [12, 8], "primitive_target": "CPU"}}
    plan = onnxpar.plan(lookup, strategy={"shard": shard}, search="auto", **ranks)
    (table,) = (w for w in plan.weights if w.name == "w1")
    assert "{12,8}, -]" in table.layout_text and table.bytes_per_rank == 12 * 6 * 4
