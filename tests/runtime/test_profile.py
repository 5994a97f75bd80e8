"""What ranks record of their runs: traces, where nodes come from, and tables of them."""

from __future__ import annotations

import gc
import json
import os
import re
import subprocess
import sys
import tempfile
import weakref
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from runtime.bundles import Tensor, all_reduce, write_par
from small_models import write_text
from training.steps import MLP, shard, write_step
from watching import Watching

from onnxpar.base.errors import InputError
from onnxpar.cli.command_line import main
from onnxpar.compiler.pass_ import Pass, PassContext
from onnxpar.layout.mesh import Mesh
from onnxpar.load.load import Model
from onnxpar.planner import sharder
from onnxpar.planner.options import Options
from onnxpar.report.trace_lines import trace_lines
from onnxpar.runtime.profile.fused import Fused
from onnxpar.runtime.profile.merge_profiles import merge
from onnxpar.runtime.profile.profile import Record
from onnxpar.runtime.profile.trace import Event, Trace, read_trace, write_trace
from onnxpar.runtime.session.bundle import Bundle
from onnxpar.runtime.session.session import InferenceSession
from onnxpar.runtime.session.threads import ThreadSession
from onnxpar.strategy.strategy import Strategy

pytestmark = pytest.mark.processes

TEXT = """<ir_version: 10, opset_import: ["" : 18]>
m (float[12,5] x, float[5,6] w1, float[6] w2, float[1,8,6] w3, float[1,8,8] w4, float[8,9] w5)
=> (float[12,9] y, float[12,6] z) <int64[3] steps = {3, 4, 6}, int64[2] rows = {12, 8}>
{ a = MatMul(x, w1)  b = Add(a, w2)  c = Relu(b)  d = Reshape(c, steps)
  h = RNN<hidden_size = 8>(d, w3, w4)  e = Tanh(h)  f = Reshape(e, rows)
  g = MatMul(f, w5)  y = Softmax(g)  z = Neg(c) }
"""
STRATEGY = {
    "Relu_c": [[None, None]],
    "Neg_z": [["tp", None]],
    "Tanh_e": [[None, None, None, "tp"]],
    "Softmax_y": [[None, "tp"]],
}
"""Units of a recurrence, whose steps talk, what a Softmax is taken over, in uneven parts, and rows
of what is whole."""
RUNS = 3
MICROSECONDS = 5e-6
"""What the ends of onnxruntime's times are rounded by, and what we allow for."""


@pytest.fixture(scope="module")
def par(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sharded model, with inputs `in.npz` and its global nodes in `nodes.json` beside it."""
    folder = tmp_path_factory.mktemp("profile")
    model = write_text(TEXT, folder / "m.onnx")
    options = Options(mesh=Mesh.parse("tp=2"), strategy=Strategy.of({"shard": STRATEGY}))
    nodes: set[str] = set()

    def watch(step: Pass, model: Model, ctx: PassContext) -> None:
        if step.name == "insert-collectives":
            nodes.update(op.node.name for op in ctx.sharding.factors.ops)

    sharder.plan(model, options, Watching(watch))
    sharder.shard(model, folder / "m.par", options)
    (folder / "nodes.json").write_text(json.dumps(sorted(nodes)))
    x = np.random.default_rng(0).standard_normal((12, 5)).astype(np.float32)
    np.savez(folder / "in.npz", x=x)
    return folder / "m.par"


@pytest.fixture(scope="module")
def recorded(par: Path) -> Trace:
    """Runs of the model, but for the first; the results are those of runs without a profile."""
    x = np.load(par.parent / "in.npz")["x"]
    with InferenceSession(par, timeout=30) as session:
        expected = session.run(None, {"x": x})
        with pytest.raises(InputError, match="profile=True"):
            session.end_profile(par.parent / "nothing.json")
    with InferenceSession(par, timeout=30, profile=True) as session:
        for _ in range(RUNS):
            for found, whole in zip(session.run(None, {"x": x}), expected, strict=True):
                np.testing.assert_array_equal(found, whole)
        trace = session.end_profile(par.parent / "trace.json", warm_up=1)
        session.run(None, {"x": x})
    assert trace is not None
    assert not (par.parent / "nothing.json").exists()
    return trace


def plan_of(par: Path) -> dict[str, Any]:
    plan: dict[str, Any] = json.loads((par / "plan.json").read_text())
    return plan


@pytest.mark.slow
def test_all_collectives_of_all_runs_on_all_ranks(par: Path, recorded: Trace) -> None:
    assert (recorded.ranks, recorded.runs(), recorded.left_out) == (2, [1, 2], 1)
    planned = plan_of(par)["collectives"]
    assert Counter(c["kind"] for c in planned)["AllReduce"] >= 2
    in_steps = [c for c in planned if c["tensor"] == "in RNN_h"]
    assert in_steps
    for rank in range(2):
        for run in recorded.runs():
            events = [e for e in recorded.of(rank) if e.run == run and e.collective]
            calls = Counter(e.name for e in events)
            assert calls == {c["name"]: 3 if c in in_steps else 1 for c in planned}
            made = {e.name: e.collective for e in events}
            for entry in planned:
                own = made[entry["name"]]
                assert own is not None
                assert (own.kind, own.tensor) == (entry["kind"], entry["tensor"])
                assert own.group == (0, 1) == tuple(entry["group"])
                assert own.bytes == entry["bytes"] // calls[entry["name"]]


@pytest.mark.slow
def test_clocks_of_ranks_agree(recorded: Trace) -> None:
    """No member of an all-reduce is done before the last has begun."""
    calls: dict[tuple[str, int, int], list[Event]] = defaultdict(list)
    for rank in range(2):
        counts: Counter[tuple[str, int]] = Counter()
        for event in recorded.of(rank):
            if event.collective:
                calls[event.name, event.run, counts[event.name, event.run]].append(event)
                counts[event.name, event.run] += 1
    for events in calls.values():
        last = max(e.start for e in events)
        assert last <= min(e.start + e.seconds for e in events) + MICROSECONDS
        for event in events:
            assert event.wait <= event.seconds
            assert abs(event.start + event.wait - last) <= MICROSECONDS


@pytest.mark.slow
def test_nodes_lead_back_to_the_global_graph(par: Path, recorded: Trace) -> None:
    known = set(json.loads((par.parent / "nodes.json").read_text()))
    known |= {c["name"] for c in plan_of(par)["collectives"] if not c["tensor"].startswith("in ")}
    known.add("LocalSlice_c@1")
    assert {"MatMul_a", "Add_b", "RNN_h", "Softmax_y"} <= known
    for rank in range(2):
        found = {n.name: n.nodes for n in recorded.nodes(rank)}
        for name, nodes in found.items():
            assert nodes and known.issuperset(nodes), (name, nodes)
        assert {n for nodes in found.values() for n in nodes} >= {"MatMul_a", "Add_b", "Relu_c"}
        ops = {n.op for n in recorded.nodes(rank) if n.nodes == ("RNN_h",)}
        assert {"Scan", "AllGather", "Tanh"} <= ops
        fused = [nodes for nodes in found.values() if {"MatMul_a", "Add_b"} <= {*nodes}]
        assert fused


def test_the_file_is_what_chrome_shows(par: Path, recorded: Trace) -> None:
    data = json.loads((par.parent / "trace.json").read_text())
    names = {
        (e["pid"], e["args"]["name"]) for e in data["traceEvents"] if e["name"] == "process_name"
    }
    assert names == {(0, "rank 0"), (1, "rank 1")}
    threads = {e["args"]["name"] for e in data["traceEvents"] if e["name"] == "thread_name"}
    assert threads == {"runs", "compute", "communication"}
    lines = defaultdict(list)
    for event in data["traceEvents"]:
        if event["ph"] == "X":
            assert event["ts"] >= 0 and event["dur"] >= 0
            lines[event["pid"], event["tid"]].append(event)
    assert len(lines) == 6
    for events in lines.values():
        check_nested(events)
    for event in recorded.events:
        span = next(s for s in recorded.spans if (s.rank, s.run) == (event.rank, event.run))
        assert span.start <= event.start
        assert event.start + event.seconds <= span.start + span.seconds + MICROSECONDS
    again = read_trace(par.parent / "trace.json")
    assert [e.name for e in again.events] == [e.name for e in recorded.events]
    for one, other in zip(again.events, recorded.events, strict=True):
        assert one.start == pytest.approx(other.start, abs=1e-8)
        assert (one.rank, one.run, one.op, one.nodes) == (
            other.rank,
            other.run,
            other.op,
            other.nodes,
        )
        assert (one.collective is None) == (other.collective is None)
        assert one.own == pytest.approx(other.own, abs=1e-8)
        assert one.wait == pytest.approx(other.wait, abs=1e-8)


def check_nested(events: list[dict[str, Any]]) -> None:
    """Events of a thread lie within each other, or beside each other."""
    around: list[float] = []
    for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        while around and around[-1] <= event["ts"] + 0.01:
            around.pop()
        end = event["ts"] + event["dur"]
        assert not around or end <= around[-1] + 0.01
        around.append(end)


def run_command(par: Path, *more: str) -> list[str]:
    return ["run", str(par), "--inputs", str(par.parent / "in.npz"), "--timeout", "30", *more]


@pytest.mark.slow
def test_the_command(
    par: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    file = tmp_path / "out" / "t.json"
    assert main(run_command(par, "--repeat", "3", "--profile", str(file))) == 0
    out = capsys.readouterr().out
    assert "2 runs after 1 warm-up run, in milliseconds of each:" in out
    assert re.search(r"rank +compute +communication +waiting +idle +total", out)
    for rank in range(2):
        (row,) = re.findall(rf"^ +{rank}((?: +\d+\.\d{{3}}){{5}})$", out, re.MULTILINE)
        *parts, whole = map(float, row.split())
        assert sum(parts) == pytest.approx(whole, abs=0.01)
    rows = out.split("share\n")[1].split("\n\n")[0].splitlines()
    assert len(rows) == 10
    shares = [float(row.split()[-1].rstrip("%")) for row in rows]
    assert shares == sorted(shares, reverse=True)
    calls = {row.split()[1]: row.split()[2] for row in rows}  # of the nodes that take longest
    assert calls.get("AllReduce", "4") == "4"
    assert f"the trace is in {file}" in out
    assert read_trace(file).runs() == [1, 2]
    assert [p.name for p in file.parent.iterdir()] == ["t.json"]
    assert not list((tmp_path / "scratch").iterdir())


@pytest.mark.slow
def test_one_run_is_recorded(par: Path, tmp_path: Path) -> None:
    assert main(run_command(par, "--profile", str(tmp_path / "t.json"))) == 0
    trace = read_trace(tmp_path / "t.json")
    assert (trace.runs(), trace.left_out) == ([0], 0)
    assert next(iter(trace_lines(trace))) == "1 run, in milliseconds of each:"


@pytest.mark.parametrize("place", ["missing/t.json", "."])
def test_no_place_for_the_file(
    par: Path, tmp_path: Path, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(run_command(par, "--profile", str(tmp_path / place))) == 2
    captured = capsys.readouterr()
    assert str(tmp_path) in captured.err and "milliseconds" not in captured.out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_ranks_that_a_launcher_started(par: Path, tmp_path: Path) -> None:
    """Rank 0 writes what all have recorded, and prints it."""
    command = run_command(par, "--profile", "t.json", "--repeat", "2", "--log-dir", "../log")
    place = {"ONNXPAR_WORLD_SIZE": "2", "ONNXPAR_STORE": f"file:{tmp_path / 'store'}"}
    processes = []
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
        processes.append(
            subprocess.Popen(
                [sys.executable, "-m", "onnxpar", *command],
                cwd=tmp_path / str(rank),
                env={**os.environ, **place, "ONNXPAR_RANK": str(rank)},
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    printed = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert not list((tmp_path / "1").iterdir())
    trace = read_trace(tmp_path / "0" / "t.json")
    assert (trace.ranks, trace.runs()) == (2, [1])
    assert {e.name for e in trace.of(0) if e.collective} == {
        c["name"] for c in plan_of(par)["collectives"]
    }
    assert "1 run after 1 warm-up run" in printed[0] and not printed[1]
    assert "run" not in (tmp_path / "log/rank.1/stdout.log").read_text()


@pytest.mark.slow
def test_training_records_steps_and_evaluations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = write_step(MLP, tmp_path, optimizer="sgd")
    shard(step, "data-parallel 2")[0].rename(tmp_path / "step.par")
    x = np.random.default_rng(3).standard_normal((16, 6)).astype(np.float32)
    np.savez(tmp_path / "d.npz", x=x, labels=np.arange(16) % 5)
    files = ["--data", str(tmp_path / "d.npz"), "--eval", str(tmp_path / "d.npz")]
    folders = ["--log-dir", str(tmp_path / "log"), "--profile", str(tmp_path / "t.json")]
    command = ["train", str(tmp_path / "step.par"), *files, *folders, "--lr", "0.1"]
    assert main([*command, "--epochs", "2", "--timeout", "30"]) == 0
    trace = read_trace(tmp_path / "t.json")
    assert (trace.runs(), trace.runs("evaluation")) == ([1, 4, 5], [2, 3, 6, 7])
    out = capsys.readouterr().out
    assert "3 runs after 1" in out and "4 evaluations, in" in out


def test_a_closed_session_leaves_no_rank_behind(two: Bundle) -> None:
    """onnxruntime's sessions must end before the world that their kernels use."""
    gc.disable()
    try:
        session = ThreadSession(two.path)
        executor = weakref.ref(session._ranks._executors[0])  # type: ignore[attr-defined]
        session.close()
        assert executor() is None
    finally:
        gc.enable()


def record(host: str, runs: list[list[int]], events: list[list[int]]) -> Record:
    """What a rank might tell, of five nodes."""
    nodes = [
        {"name": "loop", "op": "Scan", "nodes": ["loop"]},
        {"name": "add", "op": "Add", "nodes": ["add"]},
        {"name": "r", "op": "AllReduce", "nodes": ["r"], "group": [], "root": 0},
        {"name": "b", "op": "Broadcast", "nodes": ["b"], "group": [1, 0], "root": 0},
        {
            "name": "p",
            "op": "CollectivePermute",
            "nodes": ["p"],
            "group": [1, 0],
            "sources": [1, 1],
        },
    ]
    told = {"runs": runs, "events": [[*each, None] for each in events], "dropped": 0}
    return {"host": host, "nodes": nodes, "programs": {"": told}}


@pytest.fixture
def two(tmp_path: Path) -> Bundle:
    """A bundle of two ranks."""
    return Bundle.load(
        write_par(
            tmp_path / "m.par",
            "tp=2",
            [Tensor("x", (4,))],
            [Tensor("y", (4,))],
            lambda rank: all_reduce("x", "y"),
        )
    )


def test_what_is_within_a_body_counts_once(two: Bundle) -> None:
    events = [[1, 7, 120, 10], [2, 7, 130, 21], [0, 7, 110, 40], [1, 7, 160, 5]]
    trace = merge(two, [record("h", [[100, 100]], events)] * 2)
    own = [(e.name, round(e.own * 1e6)) for e in trace.of(0)]
    assert own == [("loop", 10), ("add", 10), ("r", 20), ("add", 5)]
    (times,) = [n for n in trace.nodes(0) if n.name == "add"]
    assert (times.calls, round(times.seconds * 1e6)) == (2, 15)


def test_what_runs_beside_others(two: Bundle, tmp_path: Path) -> None:
    events = [[1, 7, 10, 20], [2, 9, 15, 30], [1, 9, 50, 5]]
    write_trace(merge(two, [record("h", [[0, 100]], events)] * 2), tmp_path / "t.json")
    data = json.loads((tmp_path / "t.json").read_text())
    names = {e["tid"]: e["args"]["name"] for e in data["traceEvents"] if e["name"] == "thread_name"}
    assert names == {0: "runs", 1: "compute", 3: "compute 1", 4: "communication 1"}
    found = [(e.name, e.lane) for e in read_trace(tmp_path / "t.json").of(1)]
    assert found == [("add", 0), ("r", 1), ("add", 1)]


def test_who_waits_for_whom(two: Bundle) -> None:
    one = record("h", [[0, 100]], [[2, 7, 10, 30], [3, 7, 50, 30]])
    other = record("h", [[0, 100]], [[2, 7, 30, 12], [3, 7, 60, 25]])
    trace = merge(two, [one, other])
    assert [round(e.wait * 1e6) for e in trace.of(0)] == [20, 10]
    assert [round(e.wait * 1e6) for e in trace.of(1)] == [0, 0]
    later = merge(two, [other, one])  # the root of a broadcast waits for nobody
    assert [round(e.wait * 1e6) for e in later.of(1)] == [20, 0]


def test_a_permute_waits_for_its_source_alone(two: Bundle) -> None:
    """Both ranks get what rank 0 has, the second member of the group."""
    one = record("h", [[0, 100]], [[4, 7, 10, 30]])
    other = record("h", [[0, 100]], [[4, 7, 30, 12]])
    for records in ([one, other], [other, one]):
        trace = merge(two, records)
        starts = [trace.of(rank)[0].start for rank in (0, 1)]
        expected = [0, max(round((starts[0] - starts[1]) * 1e6), 0)]
        assert [round(trace.of(rank)[0].wait * 1e6) for rank in (0, 1)] == expected


def test_hosts_have_clocks_of_their_own(two: Bundle) -> None:
    calls = [[2, 7, 10, 30], [2, 7, 60, 20], [2, 7, 90, 10]]
    ahead = [[n, t, begin + 5_000_002, length - 2] for n, t, begin, length in calls]
    records = [record("a", [[0, 100]], calls), record("b", [[5_000_000, 100]], ahead)]
    trace = merge(two, records)
    assert [round(e.start * 1e6) for e in trace.of(1)] == [12, 62, 92]
    same = [record("a", [[0, 100]], calls), record("a", [[5_000_000, 100]], ahead)]
    assert round(merge(two, same).of(1)[0].start * 1e6) == 5_000_012


def test_runs_that_a_rank_has_no_room_for(two: Bundle) -> None:
    runs = [[0, 10], [20, 10], [40, 10]]
    events = [[1, 7, 2, 1], [1, 7, 22, 1], [1, 7, 42, 1]]
    full = record("h", runs[:2], events)
    full["programs"][""]["dropped"] = 7
    trace = merge(two, [record("h", runs, events), full])
    assert (trace.runs(), trace.dropped) == ([0, 1], 7)
    assert len(trace.of(0)) == len(trace.of(1)) == 2
    assert "it dropped 7, so the last runs are missing" in list(trace_lines(trace))[-1]
    assert merge(two, [full, full], left_out=5).runs() == [1]


HEAD = '<ir_version: 10, opset_import: ["" : 18]>\n'


def test_what_onnxruntime_makes_of_nodes() -> None:
    """Results keep their names; what lies between them is fused, or in a blocked layout."""
    before = """g (float[4] x) => (float[4] y, float[4] z)
        { a = Neg(x)  b = Abs(a)  c = Relu(b)  d = Exp(c)  y = Sqrt(d)  z = Sign(d) }"""
    after = """g (float[4] x) => (float[4] y, float[4] z)
        { u = Identity(x)  v = Elu(u)  c = Identity(v)  w = Exp(c)  y = Sqrt(w)  z = Sign(w) }"""
    graph, run = (onnx.parser.parse_model(HEAD + text).graph for text in (before, after))
    for each in (graph, run):
        for node in each.node:
            node.name = f"{node.op_type}_{node.output[0]}"
    run.node[1].name = "b_nchwc"
    run.node[3].name = "Exp_d"
    found = {
        name: [n.op_type for n in nodes] for name, nodes in Fused(graph, run).members().items()
    }
    assert found == {
        "Identity_u": ["Abs", "Neg"],
        "b_nchwc": ["Abs", "Neg"],
        "Identity_c": ["Relu"],
        "Exp_d": ["Exp"],
        "Sqrt_y": ["Sqrt"],
        "Sign_z": ["Sign"],
    }


@pytest.mark.parametrize("text", ["no JSON", "[]", '{"traceEvents": []}'])
def test_files_that_are_no_traces(tmp_path: Path, text: str) -> None:
    (tmp_path / "t.json").write_text(text)
    with pytest.raises(InputError, match=r"t\.json is not a trace of onnxpar"):
        read_trace(tmp_path / "t.json")
    with pytest.raises(InputError, match=r"there is no file .*missing\.json"):
        read_trace(tmp_path / "missing.json")
