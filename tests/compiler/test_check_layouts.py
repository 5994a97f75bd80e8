"""The verifier notices a graph whose layouts break a rule, whoever chose them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import onnx_graphsurgeon as gs
import pytest
from agreement import options
from small_models import MODELS, write_small

from onnxpar.compiler.check_layouts import check_layouts
from onnxpar.compiler.pass_ import PassContext
from onnxpar.graph.collectives import DOMAIN
from onnxpar.graph.reshards import is_reshard, reshard_of, set_reshard
from onnxpar.layout.layout import Factor, Layout
from onnxpar.layout.mesh import Axis
from onnxpar.load.load import load
from onnxpar.passes.lower.fuse_all_reduces import FuseAllReduces
from onnxpar.passes.lower.insert_collectives import InsertCollectives
from onnxpar.passes.lower.order_collectives import OrderCollectives
from onnxpar.planner.context import make_context
from onnxpar.planner.default_passes import DEFAULT_PASSES
from onnxpar.planner.run_passes import run_passes

TP = Axis("tp", 2)


def placed(name: str, folder: Path, last: type = InsertCollectives) -> tuple[gs.Graph, PassContext]:
    """A small model behind the pass `last`."""
    model = load(write_small(name, folder))
    ctx = make_context(model, options(MODELS[name].layout, strategy={"shard": MODELS[name].shard}))
    passes = [p() for p in DEFAULT_PASSES if p is not FuseAllReduces]
    upto = next(i for i, p in enumerate(passes) if isinstance(p, last))
    run_passes(model, ctx, passes[: upto + 1], check=True)
    return model.graph, ctx


def reshard(graph: gs.Graph) -> gs.Node:
    """The only collective of a graph."""
    return next(node for node in graph.nodes if is_reshard(node))


def whole_operand(graph: gs.Graph, ctx: PassContext) -> None:
    ctx.layouts["w1"] = Layout.whole((6, 9))


def other_dimension(graph: gs.Graph, ctx: PassContext) -> None:
    ctx.layouts["w1"] = Layout((Factor(6, (TP,)), Factor(9)))


def other_parts_of_the_axis(graph: gs.Graph, ctx: PassContext) -> None:
    ctx.layouts["r"] = Layout((Factor(5, (TP,)), Factor(9)))


def forgotten_sum(graph: gs.Graph, ctx: PassContext) -> None:
    name = reshard(graph).inputs[0].name
    ctx.layouts[name] = ctx.layouts[name].reduced()


def maximum_for_the_sum(graph: gs.Graph, ctx: PassContext) -> None:
    name = reshard(graph).inputs[0].name
    ctx.layouts[name] = replace(ctx.layouts[name], reduce="max")


def sum_into_a_nonlinear_op(graph: gs.Graph, ctx: PassContext) -> None:
    for name in ("h", "r"):
        ctx.layouts[name] = Layout((Factor(5), Factor(9)), (TP,))


def bias_on_every_rank(graph: gs.Graph, ctx: PassContext) -> None:
    name = next(n.inputs[2].name for n in graph.nodes if n.name == "Gemm_y")
    ctx.layouts[name] = ctx.layouts[name].reduced()


def reshard_to_somewhere_else(graph: gs.Graph, ctx: PassContext) -> None:
    node = reshard(graph)
    after = Layout((Factor(5, (TP,)), Factor(6)))
    set_reshard(node, replace(reshard_of(node), members=((reshard_of(node).before, after),)))
    ctx.layouts[node.outputs[0].name] = after


def reshard_from_somewhere_else(graph: gs.Graph, ctx: PassContext) -> None:
    node = reshard(graph)
    before = Layout((Factor(5), Factor(6)), (TP,), "max")
    set_reshard(node, replace(reshard_of(node), members=((before, reshard_of(node).after),)))


def reshard_over_fewer_axes(graph: gs.Graph, ctx: PassContext) -> None:
    node = reshard(graph)
    set_reshard(node, replace(reshard_of(node), axes=()))


@pytest.mark.parametrize(
    "damage",
    [
        whole_operand,
        other_dimension,
        other_parts_of_the_axis,
        forgotten_sum,
        maximum_for_the_sum,
        sum_into_a_nonlinear_op,
        bias_on_every_rank,
        reshard_to_somewhere_else,
        reshard_from_somewhere_else,
        reshard_over_fewer_axes,
    ],
)
def test_damage_is_noticed(damage: Callable[[gs.Graph, PassContext], None], tmp_path: Path) -> None:
    graph, ctx = placed("mlp", tmp_path)
    check_layouts(graph, ctx)
    damage(graph, ctx)
    with pytest.raises(AssertionError):
        check_layouts(graph, ctx)


def test_a_permute_to_other_shards_is_noticed(tmp_path: Path) -> None:
    """Rows that rank 1 needs, and that no rank of its group holds."""
    graph, ctx = placed("axes change places", tmp_path)
    check_layouts(graph, ctx)
    node = reshard(graph)
    assert node.op == "CollectivePermute"
    set_reshard(node, replace(reshard_of(node), axes=(Axis("a", 2),)))
    with pytest.raises(AssertionError):
        check_layouts(graph, ctx)


def test_segments_of_a_sum_must_all_be_split(tmp_path: Path) -> None:
    graph, ctx = placed("gathered segments", tmp_path)
    check_layouts(graph, ctx)
    joined = reshard(graph).inputs[0].name
    dims = ctx.layouts[joined].dims
    assert len(dims[1].children) == 2  # type: ignore[union-attr]
    ctx.layouts[joined] = Layout.whole((3, 10))
    with pytest.raises(AssertionError):
        check_layouts(graph, ctx)


def test_collectives_out_of_order_are_noticed(tmp_path: Path) -> None:
    graph, ctx = placed("deadlock", tmp_path, OrderCollectives)
    check_layouts(graph, ctx)
    collectives = [i for i, node in enumerate(graph.nodes) if node.domain == DOMAIN]
    first, second = collectives
    graph.nodes[first], graph.nodes[second] = graph.nodes[second], graph.nodes[first]
    with pytest.raises(AssertionError, match="out of order"):
        check_layouts(graph, ctx)
