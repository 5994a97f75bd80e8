"""Models with If, Loop and Scan, and what it takes to hold their shardings against onnxruntime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from agreement import check_outputs, options, run_ranks, run_unsplit
from onnx import TensorProto, helper, numpy_helper

from onnxpar.compiler.plan import Plan
from onnxpar.planner import sharder

FLOAT, INT, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
Array = np.ndarray[Any, Any]
Port = tuple[str, int, Sequence[int] | None]
RANDOM = np.random.default_rng(11)

COLUMNS, ROWS = [[None, None], [None, "tp"]], [[None, "tp"], ["tp", None]]
"""How a product is split by what it makes, and by what it sums over."""

node = helper.make_node


def values(*shape: int) -> Array:
    """Random numbers of about one half."""
    return RANDOM.standard_normal(shape).astype(np.float32) / 2


def graph(
    name: str,
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[Port],
    outputs: Sequence[Port],
    weights: Mapping[str, Array] | None = None,
) -> onnx.GraphProto:
    """A graph; ports are (name, type, shape)."""
    stored = [numpy_helper.from_array(w, n) for n, w in (weights or {}).items()]
    given, made = ([helper.make_tensor_value_info(*p) for p in some] for some in (inputs, outputs))
    return helper.make_graph(list(nodes), name, given, made, stored)


def save(path: Path, main: onnx.GraphProto) -> Path:
    """Writes a valid model."""
    model = helper.make_model(main, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    onnx.checker.check_model(model)
    onnx.save(model, path)
    return path


def agree(
    model: Path, feeds: Sequence[Mapping[str, Array]], layout: str, strategy: Any = None
) -> Plan:
    """Shards once, and compares the outputs of each run."""
    par = model.with_suffix(".par")
    plan = sharder.shard(model, par, options(layout, strategy=strategy))
    for feed in feeds:
        wanted = run_unsplit(model, feed)
        check_outputs(run_ranks(par, feed), wanted, [p.name for p in plan.outputs])
    return plan


def kinds(plan: Plan) -> list[str]:
    """The collectives, in order."""
    return [c.kind for c in plan.collectives]


def axes_of(plan: Plan, weight: str) -> str:
    """The layout of a weight, as text."""
    return next(w.layout_text for w in plan.weights if w.name == weight)


def loop(body: onnx.GraphProto, inputs: Sequence[str], outputs: Sequence[str]) -> onnx.NodeProto:
    """A Loop."""
    return node("Loop", inputs, outputs, "loop", body=body)


def cell(hidden: int, batch: int, stop: bool) -> onnx.GraphProto:
    """h = tanh(h W + x U), each of which is also handed out; stops where h grows small."""
    nodes = [
        node("MatMul", ["h", "w"], ["hw"], "recur"),
        node("MatMul", ["x", "u"], ["xu"], "feed"),
        node("Add", ["hw", "xu"], ["sum"]),
        node("Tanh", ["sum"], ["h_next"]),
        node("ReduceSum", ["h_next"], ["total"], keepdims=0),
        node("Abs", ["total"], ["size"]),
        node("Greater", ["size", "limit"], ["more"]),
        node("Identity", ["more" if stop else "go"], ["go_on"]),
    ]
    given: list[Port] = [("i", INT, []), ("go", BOOL, []), ("h", FLOAT, [batch, hidden])]
    made: list[Port] = [("go_on", BOOL, []), ("h_next", FLOAT, [batch, hidden])]
    made += [("total", FLOAT, [])]
    return graph("cell", nodes, given, made, {"w": values(hidden, hidden), "u": values(8, hidden)})


def recurrent(path: Path, hidden: int = 10, batch: int = 6, stop: bool = False) -> Path:
    """A Loop over a cell; `n` turns, or until its sum is below `limit`."""
    body = cell(hidden, batch, stop)
    main = graph(
        "g",
        [loop(body, ["n", "keep", "h0"], ["h_last", "totals"])],
        [
            ("x", FLOAT, [batch, 8]),
            ("h0", FLOAT, [batch, hidden]),
            ("n", INT, []),
            ("keep", BOOL, []),
            ("limit", FLOAT, []),
        ],
        [("h_last", FLOAT, [batch, hidden]), ("totals", FLOAT, [None])],  # type: ignore[list-item]
    )
    return save(path, main)


def turns(*counts: int, hidden: int = 10, batch: int = 6, limit: float = 0.0) -> list[Any]:
    """Feeds for these numbers of turns."""
    fed = {"x": values(batch, 8), "h0": values(batch, hidden), "keep": np.array(True)}
    return [{**fed, "n": np.array(n), "limit": np.array(limit, np.float32)} for n in counts]


def lstm(path: Path, time: int, batch: int, hidden: int, backwards: bool = False) -> Path:
    """A sequence [batch, time, 6] goes through an LSTM's cell along its second axis."""
    gates = [
        node("MatMul", ["x", "wx"], ["gx"], "input"),
        node("MatMul", ["h", "wh"], ["gh"], "recur"),
        node("Add", ["gx", "gh"], ["sum"]),
        node("Add", ["sum", "bias"], ["gates"]),
        node("Split", ["gates"], ["i", "o", "f", "c"], axis=1, num_outputs=4),
    ]
    gates += [node("Sigmoid", [g], [f"{g}s"]) for g in "iof"]
    gates += [
        node("Tanh", ["c"], ["cs"]),
        node("Mul", ["fs", "s"], ["kept"]),
        node("Mul", ["is", "cs"], ["new"]),
        node("Add", ["kept", "new"], ["s_next"]),
        node("Tanh", ["s_next"], ["st"]),
        node("Mul", ["os", "st"], ["h_next"]),
        node("Identity", ["h_next"], ["y"]),
    ]
    state = [batch, hidden]
    weights = {
        "wx": values(6, 4 * hidden),
        "wh": values(hidden, 4 * hidden),
        "bias": values(4 * hidden),
    }
    body = graph(
        "lstm",
        gates,
        [("h", FLOAT, state), ("s", FLOAT, state), ("x", FLOAT, [batch, 6])],
        [("h_next", FLOAT, state), ("s_next", FLOAT, state), ("y", FLOAT, state)],
        weights,
    )
    scan = node(
        "Scan",
        ["h0", "s0", "xs"],
        ["h1", "s1", "ys"],
        "scan",
        body=body,
        num_scan_inputs=1,
        scan_input_axes=[1],
        scan_output_axes=[-2],
        scan_input_directions=[int(backwards)],
        scan_output_directions=[int(backwards)],
    )
    main = graph(
        "g",
        [scan, node("MatMul", ["ys", "out"], ["z"], "project")],
        [("xs", FLOAT, [batch, time, 6]), ("h0", FLOAT, state), ("s0", FLOAT, state)],
        [("z", FLOAT, [batch, time, 3]), ("h1", FLOAT, state), ("s1", FLOAT, state)],
        {"out": values(hidden, 3)},
    )
    return save(path, main)
