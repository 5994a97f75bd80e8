"""Gradients of If, Loop and Scan: the same op again, whose bodies are differentiated."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_graphsurgeon as gs

from onnxpar.grad.bodies import (
    Replay,
    add_with_bodies,
    at_positions,
    hand_out,
    read_around,
    zeros_like,
)
from onnxpar.grad.steps import LoopSteps, ScanSteps
from onnxpar.grad.value import Builder, Value
from onnxpar.grad.vjp import Grads, Vjp, vjp


@vjp("If")
def if_(v: Vjp) -> Grads:
    """An If on the same condition."""
    around = read_around(v)
    keys = ("then_branch", "else_branch")
    branches = [_branch(v, keys[i], keys[1 - i], list(around.values())) for i in range(2)]
    found = dict(zip(around, zip(*(grads for _, grads in branches), strict=True), strict=True))
    used = [at for at in around if any(g is not None for g in found[at])]
    if not used:
        return []
    for i, (replay, _) in enumerate(branches):
        replay.close([found[at][i] or zeros_like(replay.builder, around[at]) for at in used])
    attrs = {key: replay.graph for key, (replay, _) in zip(keys, branches, strict=True)}
    made = add_with_bodies(v.builder, "If", [v.x.tensor], [around[at] for at in used], attrs)
    return at_positions(v, dict(zip(used, made, strict=True)))


def _branch(
    v: Vjp, key: str, other: str, wanted: Sequence[gs.Tensor]
) -> tuple[Replay, list[Value | None]]:
    """A branch computed anew, and its gradients."""
    body, none = v.node.attrs[key], v.node.attrs[other]
    replay = Replay(v.builder.fresh(key), body.opset)
    results = zip(body.outputs, v.dys, strict=False)
    seeds = {result.name: dy.tensor for result, dy in results if dy is not None}

    def drawn(tensor: gs.Tensor) -> gs.Tensor:
        """A result of the node, of which the other branch makes zeros."""
        outer = gs.Variable(v.builder.fresh("drawn"), tensor.dtype, tensor.shape)
        hand_out(body, tensor)
        none.outputs.append(zeros_like(Builder(none, f"{outer.name}/none"), tensor).tensor)
        v.node.outputs.append(outer)
        return outer

    replay.compute(body, {}, drawn)
    return replay, replay.differentiate(seeds, wanted)


@vjp("Scan")
def scan(v: Vjp) -> Grads:
    """A Scan over the same elements from the other end."""
    return ScanSteps(v, len(v.node.inputs) - v.node.attrs["num_scan_inputs"], 0, 0).gradients()


@vjp("Loop")
def loop(v: Vjp) -> Grads:
    """A Loop of as many turns as there were, backwards."""
    return LoopSteps(v, len(v.node.attrs["body"].inputs) - 2, 2, 1).gradients()
