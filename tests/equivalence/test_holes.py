"""Faults of bundles that verify once accepted, or at which it failed: each is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from agreement import options
from onnx import NodeProto, helper, numpy_helper
from training.steps import MLP, write_step

import onnxpar
from onnxpar.planner import sharder
from onnxpar.training import grad

MODELS = Path(__file__).parents[2] / "models"


def refused(model: Path, par: Path) -> str:
    """The tensor at which verify refuses a bundle; the empty text if it is accepted."""
    result = onnxpar.verify(model, par)
    return "" if result.ok else result.failures[0].tensor


def sharded(model: Path, folder: Path, layout: str) -> Path:
    """A bundle that verify accepts."""
    sharder.shard(model, folder / "model.par", options(layout))
    assert not refused(model, folder / "model.par")
    return folder / "model.par"


def edit(par: Path, ranks: int, change: Callable[[onnx.GraphProto], None], end: str = "") -> None:
    for rank in range(ranks):
        path = par / f"rank_{rank:04d}.{end}onnx"
        model = onnx.load(path)
        change(model.graph)
        onnx.save(model, path)


def give(name: str, by: Callable[[np.ndarray], np.ndarray]) -> Callable[[onnx.GraphProto], None]:
    """Gives a constant another value."""

    def change(graph: onnx.GraphProto) -> None:
        tensor = next(t for t in graph.initializer if t.name == name)
        value = by(numpy_helper.to_array(tensor))
        tensor.CopyFrom(numpy_helper.from_array(np.asarray(value, value.dtype), name))

    return change


def axis(name: str, value: int) -> Callable[[onnx.GraphProto], None]:
    """Gives a node another axis."""

    def change(graph: onnx.GraphProto) -> None:
        node = next(n for n in graph.node if n.name == name)
        kept = [a for a in node.attribute if a.name != "axis"]
        del node.attribute[:]
        node.attribute.extend([*kept, helper.make_attribute("axis", value)])

    return change


def test_an_epsilon_of_zero(tmp_path: Path) -> None:
    """In float32, it is lost beside the square root."""
    step = write_step(MLP, tmp_path, optimizer="adamw")
    par = sharded(step, tmp_path, "tensor-parallel 2")
    edit(par, 2, give("update/w4/constant.15", np.zeros_like))
    assert refused(step, par) == "w4.next"


def test_exchanged_states(tmp_path: Path) -> None:
    """Their shapes and layouts are the same, but the step says which is which."""
    step = write_step(MLP, tmp_path, optimizer="adamw")
    par = sharded(step, tmp_path, "tensor-parallel 2")
    plan = json.loads((par / "plan.json").read_text())
    pairs = {pair["input"]: pair for pair in plan["states"]}
    one, two = pairs["w3"], pairs["w3.exp_avg"]
    one["output"], two["output"] = two["output"], one["output"]
    (par / "plan.json").write_text(json.dumps(plan))
    assert refused(step, par) in ("w3.next", "w3.exp_avg.next")


def test_an_axis_that_no_dimension_has(tmp_path: Path) -> None:
    """It must not be taken modulo the number of dimensions: such ranks do not run."""
    step = write_step(MLP, tmp_path, optimizer="adamw")
    par = sharded(step, tmp_path, "zero1 2")
    edit(par, 2, axis("AllGather_w4.next", 1))
    assert refused(step, par) == "w4.next"


def test_an_axis_of_a_reduction_that_no_dimension_has(tmp_path: Path) -> None:
    step = write_step(MLP, tmp_path, optimizer="adamw")
    par = sharded(step, tmp_path, "tensor-parallel 2")
    edit(par, 1, give("loss/constant.10", lambda value: value + 1), "evaluation.")
    assert refused(step, par) == "loss/ReduceMean.11"


def test_sizes_that_no_member_sends(tmp_path: Path) -> None:
    """An AllGather that is applied twice, of which a Gather takes the right positions."""
    model = MODELS / "bert.dynamo.static.onnx"
    par = sharded(model, tmp_path, "context-parallel 2")

    def change(graph: onnx.GraphProto) -> None:
        name = "AllGather_/bert/encoder/layer.0/attention/self/Transpose_2_output_0@1"
        at = next(i for i, n in enumerate(graph.node) if n.name == name)
        node, again = graph.node[at], NodeProto.FromString(graph.node[at].SerializeToString())
        token, tail = node.output[1], [*graph.node][at + 1 :]
        for reader in tail:
            for i, read in enumerate(reader.input):
                if read in (node.output[0], token):
                    reader.input[i] = f"{read}::again"
        again.name, again.input[0], again.input[-1] = f"{name}::again", node.output[0], token
        again.output[0], again.output[1] = f"{node.output[0]}::again", f"{token}::again"
        next(a for a in again.attribute if a.name == "tag").i = 1000
        graph.node.insert(at + 1, again)

    edit(par, 2, change)
    assert refused(model, par)


def test_a_step_that_is_zero(tmp_path: Path) -> None:
    """A Slice that onnxruntime does not run is refused, and is no traceback."""
    model = MODELS / "llama.dynamo.static.onnx"
    par = sharded(model, tmp_path, "tensor-parallel 2")
    name = "/model/layers.0/self_attn/Slice_1::input4"
    edit(par, 1, give(name, np.zeros_like))
    assert refused(model, par)


def test_a_row_that_two_ranks_have(tmp_path: Path) -> None:
    """Rank 1 adds its last row for the last index of rank 0. A table of two rows beside this one
    must not keep draws from that index."""
    model = MODELS / "bert.dynamo.static.onnx"
    par = sharded(model, tmp_path, "hybrid dp=2,tp=2")
    edit(par, 4, give("/bert/embeddings/word_embeddings/Gather::constant18", lambda v: v - 1))
    assert refused(model, par) == "embedding"


@pytest.mark.parametrize(("name", "value"), [("kernel_shape", [3]), ("group", 0)])
def test_an_attribute_that_a_convolution_cannot_have(
    name: str, value: object, tmp_path: Path
) -> None:
    """Its weight contradicts it: onnxruntime does not run such a rank."""
    model = MODELS / "resnet.dynamo.static.onnx"
    par = sharded(model, tmp_path, "tensor-parallel 2")

    def change(graph: onnx.GraphProto) -> None:
        node = next(n for n in graph.node if n.op_type == "Conv")
        kept = [a for a in node.attribute if a.name != name]
        del node.attribute[:]
        node.attribute.extend([*kept, helper.make_attribute(name, value)])

    edit(par, 1, change)
    assert refused(model, par)


def test_positions_that_no_rank_has(tmp_path: Path) -> None:
    """The failure names the Slice, and not what reads it first."""
    model = MODELS / "llama.dynamo.static.onnx"
    par = sharded(model, tmp_path, "data-parallel 2")
    edit(par, 2, give("/model/layers.1/self_attn/Slice_3::input2", lambda value: value - 1))
    assert refused(model, par) == "slice_8"


@pytest.mark.slow
def test_a_bit_of_a_stacked_weight(tmp_path: Path) -> None:
    """The loader wrote the weight in another order; a small change would pass for rounding."""
    model = MODELS / "mixtral.dynamo.static.onnx"
    par = sharded(model, tmp_path, "tensor-parallel 2")
    name = "/model/layers.0/mlp/experts/MatMul_1_output_0/experts/ReduceSum.13::pairs/Gather.15"

    def by(value: np.ndarray) -> np.ndarray:
        changed = value.copy()
        changed.reshape(-1).view(np.uint32)[7] ^= 1
        return changed

    edit(par, 1, give(name, by))
    assert refused(model, par)


@pytest.mark.slow
def test_a_residual_that_is_added_twice(tmp_path: Path) -> None:
    """On drawn values, the sum is much larger than the residual."""
    step = tmp_path / "step.onnx"
    grad(
        MODELS / "llama.legacy.training.onnx", step, loss="softmax-cross-entropy", optimizer="adamw"
    )
    par = sharded(step, tmp_path, "tensor-parallel 2")
    layer = "/network/model/layers.1"

    def change(graph: onnx.GraphProto) -> None:
        name = f"{layer}/mlp/down_proj/MatMul_output_0"
        at = next(i for i, n in enumerate(graph.node) if n.output[0] == f"{name}@1")
        reader = next(n for n in graph.node if f"{name}@1" in n.input)
        other = next(n for n in reader.input if n != f"{name}@1")
        graph.node[at].input[0] = f"{name}::biased"
        reader.op_type = "Identity"
        del reader.input[:]
        reader.input.append(f"{name}@1")
        graph.node.insert(at, helper.make_node("Add", [name, other], [f"{name}::biased"]))

    edit(par, 2, change)
    assert refused(step, par) == f"{layer}/Add_1_output_0"
