"""What is predicted beside what was measured: the sums, what belongs together, and other plans."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from agreement import options
from small_models import HEAD, write_text
from watching import Watching

from onnxpar.base.errors import InputError, StrategyError
from onnxpar.cli.command_line import main
from onnxpar.cli.compare_prediction import compare_prediction as sentence
from onnxpar.compiler.pass_ import Pass, PassContext
from onnxpar.compiler.plan import Plan, Predicted
from onnxpar.layout.mesh import Mesh
from onnxpar.load.load import Model
from onnxpar.passes.lower.insert_collectives import InsertCollectives
from onnxpar.planner import sharder
from onnxpar.report.compare_trace import PlannedNode, compare_trace, planned_nodes
from onnxpar.report.comparison_result import NOTHING_RAN, Comparison
from onnxpar.runtime.profile.trace import Collective, Event, Span, Trace, read_trace, write_trace
from onnxpar.search.predict import Prediction
from onnxpar.sharding.planned_collectives import Collective as Planned

TEXT = """m (float[N,4,6] x, float[6,8] w1, float[8] w2, float[8,6] w3) => (float[N,4,6] y)
{ a = MatMul(x, w1)  b = Add(a, w2)  c = Relu(b)  d = MatMul(c, w3)  e = Softmax(d)
  z = Transpose<perm = [1, 0, 2]>(e)  f = Transpose<perm = [1, 0, 2]>(z)  y = Add(f, x) }"""
STRATEGY: dict[str, Any] = {
    "mesh": {"tp": 2},
    "shard": {"Relu_c": [[None, None, "tp"]], "Softmax_e": [[None, None, "tp"]]},
}
TOPOLOGY = {
    "levels": [{"name": "host", "latency": "1 ms", "bandwidth": "1 MB/s"}],
    "device": {"flops": "1 MFLOP/s", "memory_bandwidth": "1 MB/s", "launch": "1 us", "row": "0 s"},
}
REPEAT = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, how to shard it, and a trace of its runs."""
    folder = tmp_path_factory.mktemp("compare")
    write_text(HEAD + TEXT, folder / "m.onnx")
    (folder / "s.yaml").write_text(yaml.safe_dump(STRATEGY))
    (folder / "t.yaml").write_text(yaml.safe_dump(TOPOLOGY))
    np.savez(folder / "in.npz", x=np.ones((5, 4, 6), np.float32))
    how = ["--strategy", str(folder / "s.yaml"), "--topology", str(folder / "t.yaml")]
    par, trace = str(folder / "m.par"), str(folder / "trace.json")
    assert main(["shard", str(folder / "m.onnx"), *how, "--dim", "N=5", "-o", par]) == 0
    run = ["run", par, "--inputs", str(folder / "in.npz"), "--timeout", "30"]
    assert main([*run, "--repeat", str(REPEAT), "--profile", trace]) == 0
    return folder


def command(folder: Path, *more: str) -> list[str]:
    model, trace = str(folder / "m.onnx"), str(folder / "trace.json")
    given = ["--strategy", str(folder / "s.yaml"), "--topology", str(folder / "t.yaml")]
    return ["plan", model, *given, "--compare", trace, *more]


@pytest.fixture
def told(folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The comparison as JSON."""
    assert main(command(folder, "--dim", "N=5", "--json")) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_collectives_are_those_of_the_plan(folder: Path, told: dict[str, Any]) -> None:
    plan = json.loads((folder / "m.par" / "plan.json").read_text())
    sent: dict[str, int] = {}
    for entry in plan["collectives"]:
        name = entry["name"].split("::")[0]
        sent[name] = sent.get(name, 0) + entry["bytes"]
    assert {c["node"]: c["bytes"] for c in told["collectives"]} == sent
    by_tensor = {c["tensor"]: c for c in told["collectives"]}
    inner = by_tensor.pop("in Softmax_e")
    assert (inner["kind"], inner["calls"]) == ("AllReduce", 2) and inner["predicted"] > 2e-3
    scattered = by_tensor["d"]
    assert scattered["kind"] == "ReduceScatter" and scattered["calls"] == 1
    assert scattered["predicted"] == pytest.approx(1e-3 + 5 * 4 * 3 * 4 / 1e6)
    for entry in told["collectives"]:
        assert entry["ratio"] == entry["measured"] / entry["predicted"]


def test_what_is_fused_is_compared_as_one(told: dict[str, Any]) -> None:
    rows = [set(row["nodes"]) for row in told["nodes"]]
    assert {"MatMul_a", "Add_b"} in [row & {"MatMul_a", "Add_b"} for row in rows]
    (row,) = (row for row in told["nodes"] if "MatMul_a" in row["nodes"])
    flops, moved = 2 * 5 * 4 * 6 * 4, 4 * (5 * 4 * 6 + 6 * 4 + 5 * 4 * 4)
    assert row["predicted"] >= 1e-6 + max(flops, moved) / 1e6
    (row,) = (row for row in told["nodes"] if row["nodes"] == ["Softmax_e"])
    assert row["op"] == "Softmax" and row["calls"] > 2


def test_every_node_counts_once(folder: Path, told: dict[str, Any]) -> None:
    names = [name for row in told["nodes"] for name in row["nodes"]]
    assert len(names) == len(set(names))
    ops = {"MatMul_a", "Add_b", "Relu_c", "MatMul_d", "Softmax_e", "Transpose_z", "Transpose_f"}
    assert ops <= set(names)
    trace = read_trace(folder / "trace.json")
    runs = REPEAT - 1
    assert (told["runs"], told["recorded"]) == (runs, runs)
    own = [sum(e.own for e in trace.of(r) if not e.collective) / runs for r in range(2)]
    assert told["rank"] == own.index(max(own))
    assert told["compute"]["measured"] == pytest.approx(max(own), abs=1e-9)
    moving = sum(e.seconds - e.wait for e in trace.events if e.collective) / (2 * runs)
    assert told["communication"]["measured"] == pytest.approx(moving, abs=1e-9)
    for what, rows in (("compute", "nodes"), ("compute", "ops"), ("communication", "collectives")):
        for key in ("predicted", "measured"):
            total = sum(row[key] or 0 for row in told[rows])
            assert told[what][key] == pytest.approx(total, abs=1e-12), (what, rows, key)


def test_tables(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(folder, "--dim", "N=5")) == 0
    out = capsys.readouterr().out
    assert f"m.onnx over the mesh tp=2\nmilliseconds of a run, mean of {REPEAT - 1} runs:" in out
    assert re.search(r"^communication( +\d+\.\d+){3}$", out, re.MULTILINE)
    ops = out.split("computes longest:\n")[1].split("\n\n")[0].splitlines()[1:]
    seconds = [float(line.split()[-2]) for line in ops if NOTHING_RAN not in line]
    assert seconds == sorted(seconds, reverse=True)
    assert re.search(r"^d +ReduceScatter +1 +240 B( +\d+\.\d+){4}$", out, re.MULTILINE)
    assert "worst predictions:" in out and all(len(line) <= 100 for line in out.splitlines())
    assert "sizes are open" not in out


@pytest.mark.slow
def test_open_sizes(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    how = [str(folder / "m.onnx"), "--devices", "2", "--preset", "tensor-parallel"]
    par, trace = str(tmp_path / "m.par"), str(tmp_path / "trace.json")
    assert main(["shard", *how, "-o", par]) == 0
    run = ["run", par, "--inputs", str(folder / "in.npz"), "--timeout", "30"]
    assert main([*run, "--profile", trace]) == 0
    capsys.readouterr()
    assert main(["plan", *how, "--compare", trace]) == 0
    out = capsys.readouterr().out
    assert "mean of 1 run:" in out
    fed = np.load(folder / "in.npz")["x"].shape[0]
    assert main(["plan", *how, "--dim", f"N={fed}", "--json"]) == 0
    fixed = {c["name"]: c["bytes"] for c in json.loads(capsys.readouterr().out)["collectives"]}
    assert main(["plan", *how, "--json"]) == 0
    typical = {c["name"]: c["bytes"] for c in json.loads(capsys.readouterr().out)["collectives"]}
    assert main(["plan", *how, "--compare", trace, "--json"]) == 0
    compared = {c["node"]: c["bytes"] for c in json.loads(capsys.readouterr().out)["collectives"]}
    assert compared == fixed != typical and fixed
    assert out.strip().endswith(f"sizes are open: predictions are for N={fed}")


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"mesh": {"tp": 3}}, "of the mesh tp=2, the plan of tp=3"),
        ({"shard": {"Relu_c": [[None, "tp", None]]}}, "has the collective"),
        ({"shard": {}}, "has the collective"),
    ],
)
def test_another_plan(
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changed: dict[str, Any],
    what: str,
) -> None:
    (tmp_path / "other.yaml").write_text(yaml.safe_dump(STRATEGY | changed))
    assert main([*command(folder), "--strategy", str(tmp_path / "other.yaml")]) == 2
    captured = capsys.readouterr()
    assert what in captured.err and "options that shard was given" in captured.err
    assert captured.out == ""


def test_other_sizes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(folder, "--dim", "N=7")) == 2
    assert "bytes in the trace" in capsys.readouterr().err


def test_another_model_without_collectives(tmp_path: Path) -> None:
    model = write_text(
        HEAD + "m (float[4,6] x) => (float[4,6] y) { y = Relu(x) }", tmp_path / "m.onnx"
    )
    plan, _ = sharder.plan(model, options("data-parallel 2"))
    trace = Trace("n.onnx", (("dp", 2),), 2, spans(1), [event("Tanh_z", nodes=("Tanh_z",))])
    with pytest.raises(StrategyError, match=r"no node of m\.onnx; give the model"):
        compare_trace(trace, plan, {"Relu_y": PlannedNode("Relu", None, False, True)})


def test_no_trace(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command(folder), "--compare", str(tmp_path / "none.json")]) == 2
    assert "there is no file" in capsys.readouterr().err
    write_trace(Trace("m.onnx", (("tp", 2),), 2, [], []), tmp_path / "empty.json")
    assert main([*command(folder), "--compare", str(tmp_path / "empty.json")]) == 2
    assert "the trace has no run" in capsys.readouterr().err


def test_a_manual_program(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["plan", str(folder / "m.onnx"), "--devices", "2", "--preset", "manual"]
    assert main([*arguments, "--compare", str(folder / "trace.json")]) == 2
    assert "time of a manual program cannot be predicted" in capsys.readouterr().err


def spans(count: int, lengths: Sequence[float] = (1.0,), program: str = "") -> list[Span]:
    """Runs on two ranks."""
    return [
        Span(rank, run, program, float(run), lengths[run % len(lengths)])
        for rank in range(2)
        for run in range(count)
    ]


def event(
    name: str,
    own: float = 1.0,
    rank: int = 0,
    run: int = 0,
    op: str = "Op",
    nodes: tuple[str, ...] = (),
    wait: float | None = None,
) -> Event:
    """A call of a node, or of a collective of 8 bytes if it waits."""
    made = None if wait is None else Collective("AllReduce", (0, 1), 8, "t", wait)
    return Event(rank, run, name, op, nodes, float(run), own, own, 0, made)


def node(op: str, compute: float = 0.0, talk: float = 0.0, always: bool = True) -> PlannedNode:
    return PlannedNode(op, Prediction(compute, talk), op == "AllReduce", always)


def compared(
    nodes: dict[str, PlannedNode], events: list[Event], runs: list[Span] | None = None
) -> Comparison:
    """The comparison with a plan that has a collective `r`, if a node is one."""
    mesh = Mesh.parse("tp=2")
    planned = [
        Planned("AllReduce", name, (0, 1), 1, 8, "t", "", "")
        for name, each in nodes.items()
        if each.is_collective
    ]
    plan = Plan("m.onnx", mesh, None, [], [], [], planned, [], [])
    return compare_trace(Trace("m.onnx", mesh.shape, 2, runs or spans(1), events), plan, nodes)


def test_sets_are_joined_over_all_ranks() -> None:
    """What one rank fuses is one on the other, too; a node of onnxruntime's own stands alone."""
    nodes = {name: node("Add" if name < "c" else "Mul", 1.0) for name in "abcd"}
    events = [
        event("a", 1.0, nodes=("a", "b")),
        event("c", 2.0, nodes=("c",)),
        event("a", 0.5, 1, nodes=("a",)),
        event("b", 5.0, 1, op="Sum", nodes=("b", "c")),
        event("reorder", 7.0, 1, op="Reorder"),
    ]
    found = compared(nodes, events)
    assert found.rank == 1
    rows = {row.nodes: row for row in found.computed}
    assert rows.keys() == {("a", "b", "c"), ("d",), ()}
    joined = rows["a", "b", "c"]
    assert (joined.predicted, joined.measured, joined.calls) == (3.0, 5.5, 2)
    assert (joined.ops, joined.label) == (("Add", "Mul"), "Add + Mul")
    assert (rows[()].predicted, rows[()].measured, rows[()].label) == (None, 7.0, "Reorder")
    assert (rows["d",].measured, rows["d",].label) == (0.0, NOTHING_RAN)
    assert (found.predicted.compute, found.measured.compute) == (4.0, 12.5)
    assert [t.op for t in found.op_types()] == ["Reorder", "Add + Mul", NOTHING_RAN]
    assert found.worst()[0] is rows[()]


def test_waiting_is_apart() -> None:
    nodes = {"r": node("AllReduce", talk=3.0), "s": node("Softmax", 1.0, 2.0)}
    events = [
        event("r", 5.0, 0, nodes=("r",), wait=3.0),
        event("r", 4.0, 1, nodes=("r",), wait=0.0),
        event("r::Reshape", 1.0, 0, op="Reshape", nodes=("r",)),
    ]
    found = compared(nodes, events)
    row, inner = found.talked
    assert (row.node, row.calls, row.bytes, row.tensor) == ("r", 1, 8, "t")
    assert (row.predicted, row.measured, row.wait) == (3.0, 3.0, 1.5)
    assert (inner.tensor, inner.calls, inner.predicted, inner.measured) == ("in s", 0, 2.0, 0.0)
    assert (found.wait, found.measured.communication) == (1.5, 3.0)
    assert [(c.label, c.predicted) for c in found.computed] == [
        ("around AllReduce", 0.0),
        (NOTHING_RAN, 1.0),
    ]


def test_only_the_middle_half_of_runs_counts() -> None:
    lengths = (9.0, 2.0, 1.0, 3.0)
    events = [event("a", own, run=i, nodes=("a",)) for i, own in enumerate((90.0, 4.0, 0.0, 6.0))]
    evaluations = [Span(rank, 7, "evaluation", 50.0, 100.0) for rank in range(2)]
    runs = [*spans(4, lengths), *evaluations]
    found = compared({"a": node("Add", 5.0)}, [*events, event("a", 99.0, run=7)], runs)
    assert (found.runs, found.recorded, found.length) == (2, 4, 2.5)
    assert [row.measured for row in found.computed] == [5.0]


def test_the_session_has_a_row_of_its_own(tmp_path: Path) -> None:
    """What runs take beside the work of ranks is that of the runs that count, also read again."""
    mesh = Mesh.parse("tp=2")
    took = {0: 99.0, 1: 3.5, 2: 1.25, 3: 3.25}
    recorded = Trace("m.onnx", mesh.shape, 2, spans(4, (9.0, 3.0, 1.0, 3.0)), [], seconds=took)
    write_trace(recorded, tmp_path / "t.json")
    plan = Plan("m.onnx", mesh, None, [], [], [], [], [], [])
    plan.predicted = Predicted(1.0, 0.0, 1.0, session=0.5)
    found = compare_trace(read_trace(tmp_path / "t.json"), plan, {"a": node("Add", 1.0)})
    assert (found.length, found.session, found.predicted_session) == (3.0, 0.375, 0.5)
    assert re.search(r"session +500\.000 +375\.000 +0\.75", str(found))
    assert re.search(r"a run +1500\.000 +3375\.000 +2\.25", str(found))
    assert found.to_json()["session"] == {"predicted": 0.5, "measured": 0.375}


def test_a_run_that_takes_other_than_predicted_says_where() -> None:
    plan = {"total": 4.0, "compute": 2.0, "communication": 2.0, "session": 0.0}
    events = [event("a", own, rank, nodes=("a",)) for rank, own in ((0, 1.0), (1, 2.0))] + [
        event("r", 7.0, rank, nodes=("r",), wait=1.0) for rank in range(2)
    ]
    trace = Trace("m.onnx", (("tp", 2),), 2, spans(1, (10.0,)), events, seconds={0: 10.5})
    assert sentence(plan, 4.4, "run", trace).endswith("a run takes 1.10 times as long")
    far = sentence(plan, 10.5, "run", trace)
    assert far.endswith(
        "2.62 times as long, mostly in communication: 7000.000 ms, predicted 2000.000"
    )
    assert "--compare FILE" in sentence(plan, 10.5, "run")


def test_what_is_computed_apart_is_no_part_of_a_run(tmp_path: Path) -> None:
    text = "m (float[4,6] x) => (float[4,6] y, float[4,6] z) { a = Relu(x) y = Neg(a) z = Abs(a) }"
    found: list[set[str]] = []

    def watch(step: Pass, model: Model, ctx: PassContext) -> None:
        if isinstance(step, InsertCollectives):
            every = [planned_nodes(model.graph, ctx.sharding, apart) for apart in ((), ("z",))]
            found.extend(map(set, every))

    path = write_text(HEAD + text, tmp_path / "m.onnx")
    sharder.plan(path, options("data-parallel 2"), Watching(watch))
    assert found == [{"Relu_a", "Neg_y", "Abs_z"}, {"Relu_a", "Neg_y"}]


def test_a_collective_that_must_run() -> None:
    """One in a branch that was not taken is no sign of another plan."""
    nodes = {"r": node("AllReduce", talk=3.0), "a": node("Add", 1.0)}
    with pytest.raises(StrategyError, match="the plan has the collective 'r', the trace does not"):
        compared(nodes, [event("a", nodes=("a",))])
    nodes["r"] = node("AllReduce", talk=3.0, always=False)
    (row,) = compared(nodes, [event("a", nodes=("a",))]).talked
    assert (row.node, row.kind, row.calls, row.measured) == ("r", "AllReduce", 0, 0.0)
    with pytest.raises(InputError, match="has no run"):
        compared(nodes, [], [Span(0, 0, "evaluation", 0.0, 1.0)])
