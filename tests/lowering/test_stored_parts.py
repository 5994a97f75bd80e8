"""A rank's experts are nodes of its graph, which read their weights as stored matrices."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from agreement import check_outputs, options, run_ranks, run_unsplit

from onnxpar.graph.stored import nodes_of
from onnxpar.lowering import pair_program
from onnxpar.lowering.stored_parts import store_parts
from onnxpar.planner import sharder

MODELS = Path(__file__).parents[2] / "models" / "experts"
LOOP = MODELS / "mixtral.loop.dynamo.onnx"
IDS = np.arange(48).reshape(4, 12)


def ranks_of(path: Path, layout: str, folder: Path) -> list[onnx.GraphProto]:
    """The graphs of the ranks of a model that agrees with the unsplit one."""
    plan = sharder.shard(path, folder / "model.par", options(layout))
    feeds = {port.name: IDS if port.name == "input_ids" else IDS * 0 + 1 for port in plan.inputs}
    got = run_ranks(folder / "model.par", feeds)
    check_outputs(got, run_unsplit(path, feeds), [port.name for port in plan.outputs])
    files = sorted((folder / "model.par").glob("rank_*.onnx"))
    return [onnx.load(file, load_external_data=False).graph for file in files]


def matrices(graph: onnx.GraphProto) -> list[list[int]]:
    """The shapes of the stored matrices that products of experts read, also after a Transpose."""
    stored = {t.name: list(t.dims) for t in graph.initializer}
    for node in graph.node:
        if node.op_type == "Transpose" and node.input[0] in stored:
            stored[node.output[0]] = stored[node.input[0]][::-1]
    products = [n for n in graph.node if n.op_type == "MatMul" and "/experts/" in n.name]
    return [stored[node.input[1]] for node in products]


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("layout", "experts"),
    [("data-parallel 2", [4, 4]), ("expert-parallel 3", [2, 2, 2]), ("tensor-parallel 2", [4, 4])],
)
def test_ranks_read_stored_matrices(layout: str, experts: list[int], tmp_path: Path) -> None:
    graphs = ranks_of(LOOP, layout, tmp_path)
    columns = 12 if layout.startswith("tensor") else 24
    each = [[16, columns], [16, columns], [columns, 16]]
    assert [sorted(matrices(g)) for g in graphs] == [sorted(each * count) for count in experts]
    for graph in graphs:
        assert not [t.name for t in graph.initializer if t.name.endswith((".0.1", ".3.1", ".5.1"))]


@pytest.mark.parametrize("name", ["gpt_oss.batched_mm.legacy", "qwen3_moe.grouped_mm.hf"])
def test_stacks_that_are_one_weight(name: str, tmp_path: Path) -> None:
    graph, _ = ranks_of(MODELS / f"{name}.onnx", "data-parallel 2", tmp_path)
    assert matrices(graph)


@pytest.mark.parametrize("most", [3, 4])
def test_rows_of_many_experts_are_joined(
    most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair_program, "MOST_APART", most)
    graph, _ = ranks_of(LOOP, "data-parallel 2", tmp_path)
    assert len(matrices(graph)) == 4 * 3
    sigmoids = [n for n in graph.node if n.op_type == "Sigmoid" and "/experts/" in n.name]
    assert len(sigmoids) == (4 if most == 4 else 1)


def test_stacks_of_which_nodes_take_elements_by_number() -> None:
    """They are stored apart, also if a subgraph reads them. What stays: a stack that is also read
    whole, one of strings, and one without the element."""
    graph = onnx.parser.parse_graph(
        """m (bool c) => (float[2] y, float[2,2] all, string s, float[2] z)
        <float[2,2] a = {1, 2, 3, 4}, float[2,2] b = {5, 6, 7, 8}, string[2] n = {"p", "q"},
         float[3] v = {7, 8, 9}, float[2,2] d = {1, 2, 3, 4}, int64 one = {1}, int64 nine = {9}> {
          r = Gather(a, one)  f = Gather(v, one)  p = Mul(r, f)
          y = If(c) <then_branch = t () => (u) { g = Gather(a, one)  u = Neg(g) },
                     else_branch = e () => (w) { w = Identity(p) }>
          k = Gather(b, one)  all = Identity(b)  h = Gather(n, one)  s = Identity(h)
          i = Gather(d, nine)  z = Neg(i) }"""
    )
    store_parts(graph)
    values = {t.name: onnx.numpy_helper.to_array(t).tolist() for t in graph.initializer}
    assert values == {
        "r": [3, 4], "g": [3, 4], "f": 8, "one": 1, "nine": 9,
        "b": [[5, 6], [7, 8]], "n": ["p", "q"], "d": [[1, 2], [3, 4]],
    }  # fmt: skip
    assert [n.op_type for n in nodes_of(graph) if n.op_type == "Gather"] == ["Gather"] * 3
