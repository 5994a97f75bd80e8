"""Repeats the passes at other bindings of a model's open sizes, with the same decisions."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_graphsurgeon as gs

from onnxpar.errors import StrategyError
from onnxpar.factors import GraphFactors, analyse
from onnxpar.model import Model
from onnxpar.open_sizes import OpenSizes
from onnxpar.passes.pass_ import Pass, PassContext
from onnxpar.sharding import Sharding


def replay(model: Model, ctx: PassContext, passes: Sequence[Pass]) -> None:
    """Runs passes behind propagation again at every other binding, as `ctx.replays`.

    `ctx` is the context in which they ran. Errors: StrategyError where the structure of the model
    depends on its sizes.
    """
    if model.sizes is None:
        return
    for i in range(1, len(model.sizes.bindings)):
        graph = model.sizes.graph(i)
        other = PassContext(model, _sharding(graph, model, ctx), choices=ctx.choices)
        for step in passes:
            step.run(graph, other)
        ctx.replays.append((graph, other))


def _sharding(graph: gs.Graph, model: Model, ctx: PassContext) -> Sharding:
    """What was decided, for the sizes of another graph."""
    mesh, decided = ctx.sharding.mesh, ctx.sharding
    factors = analyse(graph, model.states, in_bodies=False)
    for name, tensor in factors.tensors.items():
        have = decided.factors.tensors.get(name)
        if have is None or [x.atom for x in have.leaves] != [x.atom for x in tensor.leaves]:
            raise StrategyError(f"'{name}': what its dimensions consist of {remedy(model.sizes)}")
    _check_ops(decided.factors, factors, model.sizes)
    return Sharding(
        mesh,
        factors,
        {name: list(axes) for name, axes in decided.tensors.items()},
        {name: list(axes) for name, axes in decided.ops.items()},
        set(decided.pinned),
        dict(decided.parts),
    )


def _check_ops(have: GraphFactors, other: GraphFactors, sizes: OpenSizes | None) -> None:
    for a, b in zip(have.ops, other.ops, strict=True):
        if [(x.atom, x.factor) for x in a.leaves] != [(x.atom, x.factor) for x in b.leaves]:
            raise StrategyError(f"{a.node.op} '{a.node.name}': how it splits {remedy(sizes)}")


def remedy(sizes: OpenSizes | None) -> str:
    """The end of an error: what to give."""
    wanted = " ".join(f"--dim {s}=N" for s in (sizes.symbols if sizes else ()))
    return f"depends on sizes that are open; give {wanted}"
