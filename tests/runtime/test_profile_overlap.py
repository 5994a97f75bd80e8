"""Traces of collectives that a thread of each rank runs while the rank computes."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
from lowering.mixtures import beside_shared_expert, between_hosts, feeds_of, mixture
from small_models import HEAD, write_text

from onnxpar.cli.command_line import main
from onnxpar.planner import sharder
from onnxpar.runtime.profile.trace import Trace, read_trace
from onnxpar.runtime.session.session import InferenceSession

pytestmark = [pytest.mark.usefixtures("medium"), pytest.mark.processes]

LATENCY = 0.03
BRANCHES = """branches (float[4,6] x, float[6,3] w1, float[4,4] b, float[4,3] w2) => (float[4,3] z)
{ y = MatMul(x, w1)  c = Exp(b)  d = MatMul(c, w2)  e = Tanh(d)  z = Max(y, e) }"""
HOW = ["--mesh", "tp=2", "--strategy", "s.yaml", "--overlap", "on"]


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a sharded model whose sum one of its branches hides, and its inputs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ONNXPAR_LINK", f"latency={LATENCY}s")
    write_text(HEAD + BRANCHES, tmp_path / "m.onnx")
    (tmp_path / "s.yaml").write_text("tensors: {x: [null, tp]}\n")
    draw = np.random.default_rng(0)
    x, b = (draw.standard_normal((4, n)).astype(np.float32) for n in (6, 4))
    np.savez(tmp_path / "in.npz", x=x, b=b)
    assert main(["shard", "m.onnx", *HOW]) == 0
    return tmp_path


def test_transfers_are_part_of_the_trace(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ["run", "m.par", "--inputs", "in.npz", "--profile", "trace.json", "--repeat", "2"]
    assert main(run) == 0
    assert "a thread of each rank communicated for" in capsys.readouterr().out
    trace = read_trace(made / "trace.json")
    (planned,) = json.loads((made / "m.par" / "plan.json").read_text())["collectives"]
    for rank in range(2):
        ops = Counter(event.op for event in trace.of(rank))
        assert ops["StartAllReduce"] == ops["Complete"] == ops["After"] == len(trace.runs())
    sent = [event for event in trace.events if event.collective]
    assert len(sent) == 2 * len(trace.runs())
    for event in sent:
        own = event.collective
        assert own is not None and own.transfer is not None
        assert (event.name, own.kind, own.bytes) == (planned["name"], "AllReduce", planned["bytes"])
        assert (own.group, own.wait) == ((0, 1), None)
        start, seconds = own.transfer
        assert seconds >= LATENCY
        assert start + seconds <= event.start + event.seconds + 1e-3
        assert 0 <= event.hidden <= seconds
        spans = [s for s in trace.spans if (s.rank, s.run) == (event.rank, event.run)]
        assert spans[0].start - 1e-3 <= start
    check_file(made / "trace.json", trace)


@pytest.mark.slow
def test_transfers_of_tokens_have_the_bytes_that_data_decided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 holds the first half of the tokens, and experts 0 to 2; the last quarter of that half
    goes nowhere else."""
    monkeypatch.setenv("ONNXPAR_LINK", f"latency={LATENCY}s")
    each = [[0, 1], [3, 3], [4, 1], [1, 0], [1, 3], [4, 0], [1, 1], [0, 3]]
    ids = np.repeat(each, 8, axis=0)
    onnx.save(beside_shared_expert(mixture(5, 2, 64), first=False), tmp_path / "m.onnx")
    how = between_hosts("expert-parallel 2")
    plan = sharder.shard(tmp_path / "m.onnx", tmp_path / "m.par", how)
    with InferenceSession(tmp_path / "m.par", profile=True) as session:
        for _ in range(2):
            session.run(None, feeds_of(ids))
        session.end_profile(tmp_path / "trace.json")
    trace = read_trace(tmp_path / "trace.json")
    held = [range(32), range(32, 64)]
    away = [{(t, e) for t in held[rank] for e in ids[t] if (e > 2) != rank} for rank in (0, 1)]
    there, back = (c.name for c in plan.collectives if c.kind == "AllToAllV")
    sent = {
        (rank, name): 4 * width * len(away[rank if name == there else 1 - rank])
        for rank in (0, 1)
        for name, width in ((there, 4), (back, 3))
    }
    found = [e for e in trace.events if e.collective and e.collective.kind == "AllToAllV"]
    assert len(found) == 4 * len(trace.runs())
    for event in found:
        own = event.collective
        assert own is not None and own.transfer is not None and event.op == "Complete"
        assert own.bytes == sent[event.rank, event.name]
        assert own.transfer[1] >= LATENCY
        assert 0 <= event.hidden <= own.transfer[1]


def check_file(file: Path, trace: Trace) -> None:
    """The viewer shows transfers in a lane of their own."""
    events = json.loads(file.read_text())["traceEvents"]
    lanes = [e for e in events if e["ph"] == "M" and e["args"].get("name") == "transfers [0, 1]"]
    assert sorted(e["pid"] for e in lanes) == [0, 1]
    shown = [e for e in events if e.get("cat") == "Transfer"]
    assert len(shown) == 2 * len(trace.runs())
    assert {(e["pid"], e["tid"]) for e in shown} == {(e["pid"], e["tid"]) for e in lanes}


@pytest.mark.slow
def test_a_comparison_measures_the_transfer(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "m.par", "--inputs", "in.npz", "--profile", "trace.json"]) == 0
    capsys.readouterr()
    assert main(["plan", "m.onnx", *HOW, "--compare", "trace.json", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    text = json.dumps(data)
    (row,) = data["comparison"]["collectives"] if "comparison" in data else data["collectives"]
    assert row["kind"] == "AllReduce", text
    assert row["measured"] >= LATENCY
