"""Splits that the unchanged op allows and its rule does not, found by trying."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from peer.cases import PeerCase
from peer.outcome import EXPLAINED, MISSED, Outcome
from peer.readers import whole_reason

from onnxpar.graph.subgraphs import subgraphs
from onnxpar.load.upgrade import NEWEST, upgrade
from onnxpar.rules.rule import is_lack
from onnxpar.testing.case import Case
from onnxpar.testing.oracle import Oracle
from onnxpar.testing.proof import REFUSED, Cut, halved, missed_cuts

_UNEXPLAINED = "its dimensions do not line up here"


def missed_splits(case: PeerCase) -> Iterator[Outcome]:
    """Every way to halve operands of a case of one node that its rule leaves out, as missed, or
    as explained where the rule says why of a dimension that it keeps whole."""
    made = as_rule_case(case)
    if made is None:
        return
    oracle = Oracle(made)
    try:
        shuffled = Oracle(_shuffled(made))
    except REFUSED:  # an operand is no data, but scales or the like
        shuffled = oracle
    for cut, results in missed_cuts(oracle).items():
        if halved(shuffled, cut) is None:
            continue
        reasons = _reasons(oracle, cut)
        where = " ".join(f"{i}.{d}" for i, d in enumerate(cut) if d is not None)
        yield Outcome(
            case.name,
            f"operands {where}",
            made.op,
            EXPLAINED if reasons else MISSED,
            f"halves give {' '.join(results)}",
            "; ".join(reasons),
        )


def _reasons(oracle: Oracle, cut: Cut) -> list[str]:
    found = (whole_reason(oracle.op, i, dim) for i, dim in enumerate(cut) if dim is not None)
    return list(dict.fromkeys(r for r in found if r and not is_lack(r) and r != _UNEXPLAINED))


def as_rule_case(case: PeerCase) -> Case | None:
    """The one node of a case with its operands; None for what the oracle does not run, and
    for other domains than ONNX's own."""
    feeds = case.data[0][0]
    if any(o.version < NEWEST for o in case.model.opset_import if not o.domain):
        model = onnx.ModelProto.FromString(case.model.SerializeToString())
        case = replace(case, model=upgrade(model, case.name))  # as passes see it
    graph = gs.import_onnx(case.model)
    if len(graph.nodes) != 1 or case.model.functions or any(subgraphs(graph.nodes[0])):
        return None
    (node,) = graph.nodes
    if node.domain not in (None, "", "ai.onnx"):
        return None
    operands: list[np.ndarray | None] = []
    for tensor in node.inputs:
        value = tensor.values if isinstance(tensor, gs.Constant) else feeds.get(tensor.name)
        if tensor.name and not _is_number(value):
            return None
        operands.append(value if tensor.name else None)
    if not all(_is_number(value) for value in case.data[0][1]) or not all(
        tensor.name for tensor in node.outputs
    ):
        return None
    fed = [i for i, t in enumerate(node.inputs) if isinstance(t, gs.Variable) and t.name]
    return Case(node.op, operands, dict(node.attrs), fed, len(node.outputs), graph.opset)


def _is_number(value: object) -> bool:
    return isinstance(value, np.ndarray) and value.dtype.isbuiltin == 1 and value.dtype != object


def _shuffled(case: Case) -> Case:
    """The case with the elements of its floats in another order: what holds there too is no
    coincidence of its values."""
    rng = np.random.default_rng(0)
    operands = [
        rng.permutation(v.reshape(-1)).reshape(v.shape)
        if isinstance(v, np.ndarray) and v.dtype.kind == "f" and i in case.fed
        else v
        for i, v in enumerate(case.operands)
    ]
    return replace(case, operands=operands)
