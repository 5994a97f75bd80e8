"""A plan keeps what its user asks for, or refuses it: no entry is dropped in silence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
from agreement import check_agrees, options
from small_models import write_text

from onnxpar.base.errors import StrategyError
from onnxpar.graph.annotations import TensorSharding
from onnxpar.planner import sharder
from onnxpar.planner.options import Options

HEAD = '<ir_version: 11, opset_import: ["" : 17]>\n'

IMAGE = """image (float[2,3,{height},8] x, float[4,3,3,3] k) => (float[2,4,h,w] y)
{{ [conv] c = Conv <pads = [1, 1, 1, 1]> (x, k)  [act] y = Relu(c) }}"""
POOL = """pool (float[2,3,{height},8] x) => (float[2,3,h,w] y)
{{ [pool] c = AveragePool <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (x)  [act] y = Relu(c) }}"""
FC = """fc (float[8,6] x, float[6,8] w) => (float[8,8] y)
{ [fc] h = MatMul(x, w)  [act] y = Relu(h) }"""
SEGMENTS = """segments (float[4,6] x, float[4,6] z) => (float[4,1] y)
{ [cat] c = Concat <axis = 1> (x, z)  a = Constant <value = int64[1] {1}> ()
  [sum] y = ReduceSum(c, a) }"""
CACHE = """cache (float[2,8] past, float[2,8] x) => (float[2,8] present)
{ [add] present = Add(past, x) }"""

GROWING = """cache (float[2,8] past, float[2,1] x) => (float[2,9] present)
{ [cat] present = Concat <axis = 1> (past, x) }"""


def write(text: str, folder: Path) -> Path:
    return write_text(HEAD + text, folder / "model.onnx", "kw")


@pytest.mark.parametrize(
    "entry",
    [[[1, 1, "tp", 1]], [[1, 1, 2, 1]], {"h0": "tp"}, {"y0": "tp"}, {"h0": "tp", "y0": "tp"}],
)
def test_rows_after_a_convolution_go_with_those_before_it(entry: Any, tmp_path: Path) -> None:
    """The entry names one of both, which are split alike or not at all."""
    model = write(IMAGE.format(height=8), tmp_path)
    plan = check_agrees(model, tmp_path, options("tp=2", strategy={"shard": {"conv": entry}}))
    assert [(c.kind, c.tensor) for c in plan.collectives] == [("NeighborExchange", "in conv")]
    assert plan.outputs[0].layout.text(plan.mesh) == "[-, -, tp, -]"  # type: ignore[union-attr]


def test_so_do_those_of_an_annotation(tmp_path: Path) -> None:
    path = write(IMAGE.format(height=8), tmp_path)
    model = onnx.load(path)
    model.configuration.add(name="mine", num_devices=2)
    entry = model.graph.node[0].device_configurations.add(configuration_id="mine")
    entry.sharding_spec.append(TensorSharding("x", ((0,), (1,)), {2: ((None, 2),)}).to_proto())
    onnx.save(model, path)
    plan, _ = sharder.plan(path, Options(check_layouts=True))
    assert [(c.kind, c.tensor) for c in plan.collectives] == [("NeighborExchange", "in conv")]


REFUSED: Mapping[str, tuple[str, Mapping[str, Any], list[str]]] = {
    "tied factors apart": (
        IMAGE.format(height=8),
        {"shard": {"conv": {"h0": "tp", "y0": None}}},
        ["Conv 'conv'", "factor h0", "together with y0"],
    ),
    "one of two segments": (
        SEGMENTS,
        {"shard": {"sum": [[1, "tp+-"]]}},
        ["ReduceSum 'sum'", "over tp", "only some of its segments"],
    ),
    "two dimensions in two entries": (
        FC,
        {"shard": {"fc": [["tp", 1]], "w": [None, [1, "tp"]]}},
        ["MatMul 'fc'", "splits two of its dimensions"],
    ),
    "both ends of a state": (
        CACHE,
        {"tensors": {"past": ["tp", 1], "present": [1, "tp"]}},
        ["tensor 'present' dimension", "fed back to 'past'", "request it for both"],
    ),
    "what a state grows along": (
        GROWING,
        {"tensors": {"past": [1, "tp"]}},
        ["tensor 'past' dimension 1", "'present' is fed back to it", "--only-given-states"],
    ),
    "other sizes of the same elements": (
        FC,
        {"tensors": {"x": [{"tp": [5, 3]}, 1], "h": [{"tp": [4, 4]}, 1]}},
        ["tensor 'x'", "[5, 3]", "another entry gives [4, 4]"],
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_kept_is_refused(case: str, tmp_path: Path) -> None:
    text, strategy, words = REFUSED[case]
    how = Options(
        mesh=options("tp=2").mesh,
        strategy=options("tp=2", strategy=strategy).strategy,
        states=[("past", "present")] if text is CACHE else (),
    )
    with pytest.raises(StrategyError) as error:
        sharder.plan(write(text, tmp_path), how)
    assert all(word in str(error.value) for word in words), error.value


def test_the_last_entry_has_the_last_word(tmp_path: Path) -> None:
    """Of a node and of a tensor alike, so that an exception stands behind its rule."""
    strategy = {
        "shard": {"*": [["tp", 1]], "fc": [[1, 1], [1, "tp"]]},
        "tensors": {"*": [1, 1], "y": [1, "tp"]},
    }
    plan = check_agrees(write(FC, tmp_path), tmp_path, options("tp=2", strategy=strategy))
    assert [w.layout_text for w in plan.weights] == ["[-, -]"]
    assert plan.outputs[0].layout.text(plan.mesh) == "[-, tp]"  # type: ignore[union-attr]


@pytest.mark.parametrize("search", [None, "auto"])
@pytest.mark.parametrize("entry", [[[1, 1, "tp", 1]], {"h0": "tp"}, {"y0": "tp"}])
def test_what_stays_whole_while_sizes_are_open(
    entry: Any, search: str | None, tmp_path: Path
) -> None:
    """The error names the size to fix; with that, the entry is kept. Padding that a mean does not
    count is an attribute, which no run can change."""
    model = write(POOL.format(height="height"), tmp_path)
    asked = options("tp=2", strategy={"shard": {"pool": entry}})
    with pytest.raises(StrategyError) as error:
        sharder.plan(model, replace(asked, search=search))
    words = ["AveragePool 'pool'", "must stay whole", "the model has open sizes", "--dim"]
    assert all(word in str(error.value) for word in words), error.value
    plan, _ = sharder.plan(model, replace(asked, search=search, dims={"height": 8}))
    assert ("NeighborExchange", "in pool") in [(c.kind, c.tensor) for c in plan.collectives]


@pytest.mark.parametrize("tensor,is_open", [("x", True), ("w", False)])
def test_only_an_error_of_an_open_size_names_it(tensor: str, is_open: bool, tmp_path: Path) -> None:
    text = """open (float[batch,6] x, float[6,4] w) => (float[batch,4] y) { y = MatMul(x, w) }"""
    strategy = {"tensors": {tensor: [{"tp": [1, 2]}, None]}}
    with pytest.raises(StrategyError, match="must be 2 numbers that add up to") as error:
        sharder.plan(write(text, tmp_path), options("tp=2", strategy=strategy))
    assert ("--dim batch=N" in str(error.value)) == is_open


def test_fusion_says_what_it_leaves_out_while_sizes_are_open(tmp_path: Path) -> None:
    model = write(POOL.format(height="height"), tmp_path)
    how = replace(options("tp=2"), fusion="size")
    (note,) = (n for n in sharder.plan(model, how)[0].notes if "--fusion" in n)
    assert "fuses only all-reduces" in note and "--dim height=N" in note
    bound, _ = sharder.plan(model, replace(how, dims={"height": 8}))
    assert not any("--fusion" in n for n in bound.notes)


def test_an_annotation_of_a_folded_node_is_named(tmp_path: Path) -> None:
    path = write(
        """folded (float[8,6] x, float[8,6] w) => (float[8,6] y)
        { [sum] s = Add(w, w)  [mul] y = Mul(x, s) }""",
        tmp_path,
    )
    model = onnx.load(path)
    model.configuration.add(name="mine", num_devices=2)
    entry = model.graph.node[0].device_configurations.add(configuration_id="mine")
    entry.sharding_spec.append(TensorSharding("w", ((0,), (1,)), {0: ((None, 2),)}).to_proto())
    onnx.save(model, path)
    with pytest.warns(UserWarning, match=r"Add 'sum': its annotation has no effect"):
        sharder.plan(path, Options())
