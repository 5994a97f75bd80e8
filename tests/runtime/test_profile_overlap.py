"""Traces of collectives that a thread of each rank runs while the rank computes."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from small_models import HEAD, write_text

from onnxpar.cli.command_line import main
from onnxpar.runtime.trace import Trace, read_trace

pytestmark = pytest.mark.usefixtures("medium")

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


def check_file(file: Path, trace: Trace) -> None:
    """The viewer shows transfers in a lane of their own."""
    events = json.loads(file.read_text())["traceEvents"]
    lanes = [e for e in events if e["ph"] == "M" and e["args"].get("name") == "transfers [0, 1]"]
    assert sorted(e["pid"] for e in lanes) == [0, 1]
    shown = [e for e in events if e.get("cat") == "Transfer"]
    assert len(shown) == 2 * len(trace.runs())
    assert {(e["pid"], e["tid"]) for e in shown} == {(e["pid"], e["tid"]) for e in lanes}


def test_a_comparison_measures_the_transfer(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "m.par", "--inputs", "in.npz", "--profile", "trace.json"]) == 0
    capsys.readouterr()
    assert main(["plan", "m.onnx", *HOW, "--compare", "trace.json", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    text = json.dumps(data)
    (row,) = data["comparison"]["collectives"] if "comparison" in data else data["collectives"]
    assert row["kind"] == "AllReduce", text
    assert row["measured"] >= LATENCY
