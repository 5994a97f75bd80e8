"""Traces tell how many tokens each expert had, and how many bytes ranks really exchanged."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from agreement import options
from lowering.mixtures import SLOW, exchanging, feeds_of, mixture

import onnxpar
from onnxpar.planner import sharder
from onnxpar.planner.options import Options
from onnxpar.report.trace_lines import expert_lines
from onnxpar.runtime.profile.trace import ExpertLoad, Trace, read_trace
from onnxpar.runtime.session.session import InferenceSession

IDS = np.array([[0, 1], [3, 3], [4, 1], [1, 0], [1, 3], [4, 0], [1, 1], [0, 3]])
"""What a router chooses for 8 tokens; expert 2 gets none, and one expert may be chosen twice."""


def traced(folder: Path, how: Options, runs: int) -> Trace:
    onnx.save(mixture(5, 2, 8), folder / "model.onnx")
    sharder.shard(folder / "model.onnx", folder / "model.par", how)
    with InferenceSession(folder / "model.par", profile=True) as session:
        for _ in range(runs):
            session.run(None, feeds_of(IDS))
        return session.end_profile(folder / "trace.json")


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(
    "how",
    [
        exchanging("expert-parallel 2"),
        exchanging("expert-parallel dp=2,ep=3"),
        options("expert-parallel 2"),
        options("expert-parallel dp=2,ep=2"),
        options("expert-parallel ep=2,tp=2"),
        options("tensor-parallel 2"),
        options("data-parallel 3"),
    ],
    ids=[
        "exchange",
        "exchange beside dp",
        "gather",
        "gather beside dp",
        "gather beside tp",
        "columns",
        "rows",
    ],
)
def test_each_token_counts_once(how: Options, tmp_path: Path) -> None:
    pairs = {(row, expert) for row, chosen in enumerate(IDS.tolist()) for expert in chosen}
    expected = tuple(2 * sum(e == expert for _, e in pairs) for expert in range(5))
    trace = traced(tmp_path, how, runs=2)
    assert trace.experts == [ExpertLoad("y", expected, runs=2)]
    assert read_trace(tmp_path / "trace.json").experts == trace.experts


@pytest.mark.slow
def test_bytes_that_were_sent(tmp_path: Path) -> None:
    """Rank 0 holds the first four tokens, and experts 0 to 2."""
    trace = traced(tmp_path, exchanging("expert-parallel 2"), runs=1)
    found = {(e.rank, e.name): e.collective.bytes for e in trace.events if e.collective}
    held = [range(4), range(4, 8)]
    away = [{(t, e) for t in held[rank] for e in IDS[t] if (e > 2) != rank} for rank in (0, 1)]
    plan = json.loads((tmp_path / "model.par/plan.json").read_text())
    there, back = (c["name"] for c in plan["collectives"] if c["kind"] == "AllToAllV")
    for rank in (0, 1):
        assert found[rank, there] == 4 * 4 * len(away[rank])
        assert found[rank, back] == 4 * 3 * len(away[1 - rank])


def test_a_trace_compares_with_the_plan(tmp_path: Path) -> None:
    """Though data decided its bytes."""
    traced(tmp_path, exchanging("expert-parallel 2"), runs=2)
    shard = {"devices": 2, "preset": "expert-parallel", "topology": SLOW}
    found = onnxpar.compare_trace(tmp_path / "model.onnx", tmp_path / "trace.json", **shard)
    assert "AllToAllV" in str(found)


@pytest.mark.slow
def test_a_trace_without_experts_has_no_table(tmp_path: Path) -> None:
    trace = traced(tmp_path, options("expert-parallel 6"), runs=1)  # more ranks than experts
    assert trace.experts == []


def test_the_table_of_many_experts_shows_both_ends() -> None:
    lines = list(expert_lines(ExpertLoad("y", tuple(range(64)), runs=3)))
    assert lines[0] == "tokens per expert of y, 2,016 in 3 runs:"
    assert [int(line.split()[0]) for line in lines[2:-1]] == [*range(63, 55, -1), *range(7, -1, -1)]
    assert lines[-1] == "48 experts are between the two halves"
