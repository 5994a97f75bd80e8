"""Strategies beside each other: each row is what `plan` says of that strategy alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from small_models import HEAD, write_text

from onnxpar.base.errors import StrategyError
from onnxpar.cli.command_line import main
from onnxpar.cost.topology import Topology
from onnxpar.layout.mesh import Mesh
from onnxpar.planner import sharder
from onnxpar.planner.loader import Loader
from onnxpar.planner.options import Options
from onnxpar.report.candidate_lines import candidate_lines
from onnxpar.report.compare_strategies import (
    MOST_HYBRIDS,
    ONE_RANK,
    Candidate,
    Candidates,
    Refused,
    choices,
    fastest_first,
    on_one_rank,
    try_candidate,
    try_each,
)
from onnxpar.search.objective import LATENCY, THROUGHPUT, Objective
from onnxpar.search.patience import Patience
from onnxpar.search.predict import Prediction
from onnxpar.strategy.training_presets import ZERO_STAGES

TEXT = """m (float[8,4,16] x, float[16,32] w1, float[32,16] w2) => (float[8,4,16] y)
{ a = MatMul(x, w1)  b = Relu(a)  c = MatMul(b, w2)  s = Add(c, x)
  d = MatMul(s, w1)  e = Relu(d)  f = MatMul(e, w2)  y = Add(f, s) }"""
TOPOLOGY = {
    "levels": [{"name": "host", "latency": "1 ms", "bandwidth": "1 MB/s"}],
    "device": {"flops": "1 MFLOP/s", "memory_bandwidth": "1 GB/s", "launch": "0 s", "row": "0 s"},
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model, and beside it a topology."""
    (tmp_path / "t.yaml").write_text(yaml.safe_dump(TOPOLOGY))
    return write_text(HEAD + TEXT, tmp_path / "m.onnx")


def told(model: Path, capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    """What a plan prints as JSON."""
    how = ["plan", str(model), "--topology", str(model.parent / "t.yaml"), "--json", *more]
    assert main(how) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_it_is_told_which_strategy_is_planned(model: Path) -> None:
    texts: list[str] = []
    objective = Objective(patience=Patience(tell=texts.append))
    each = choices(model, Options(devices=4, objective=objective))
    found = list(try_each(model, each, Loader(model)))
    told = [text.partition(": ")[0] for text in texts]
    names = list(dict.fromkeys(name for name in told if name))
    assert len(names) == len(found) == len(each) and texts[-1] == ""
    assert names[0] == f"1 of {len(each)}, data-parallel dp=4"
    assert names[-1] == f"{len(each)} of {len(each)}, auto"


def test_rows_are_those_of_the_plans(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = told(model, capsys, "--devices", "4", "--candidates")
    tried = {row["strategy"] for row in found["candidates"]}
    presets = {"data-parallel", "tensor-parallel", "hybrid", "sequence-parallel"}
    assert tried == {*presets, "context-parallel", "auto"}
    for row in found["candidates"]:
        mesh = ",".join(f"{name}={size}" for name, size in row["mesh"])
        flag = "--search" if row["strategy"] == "auto" else "--preset"
        plan = told(model, capsys, "--mesh", mesh, flag, row["strategy"])
        sent: dict[str, int] = {}
        for entry in plan["collectives"]:
            sent[entry["kind"]] = sent.get(entry["kind"], 0) + entry["bytes"]
        assert (row["bytes"], row["memory"]) == (sent, plan["memory"]), row["strategy"]
    reasons = {refused["strategy"]: refused["reason"] for refused in found["refused"]}
    assert reasons.keys() == {"expert-parallel", "table-parallel"}
    assert "matrix for each expert" in reasons["expert-parallel"]
    assert "no table whose rows" in reasons["table-parallel"]


def test_times_by_hand(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Products of 8x4x16 by 16x32 and back take 33 kFLOP each; Relu and Add move memory alone.
    Tensor parallelism reduces and scatters both sums, adds own samples, to which it slices x (2,048
    bytes), and gathers the first result."""
    found = told(model, capsys, "--devices", "4", "--candidates")
    rows = {row["strategy"]: row["predicted"] for row in found["candidates"]}
    split = 4 * (2 * 32 * 16 * 32) / 4 * 1e-6
    relu, add = 2 * (2 * 4 * 32 * 32 / 4) * 1e-9, 2 * (3 * 4 * 32 * 16) * 1e-9
    assert rows["data-parallel"]["compute"] == pytest.approx(split + relu + add / 4)
    assert rows["data-parallel"]["communication"] == 0
    assert rows["tensor-parallel"]["compute"] == pytest.approx(split + relu + add / 4 + 2048e-9)
    assert rows["tensor-parallel"]["communication"] == pytest.approx(3 * (1e-3 + 0.75 * 2048e-6))
    for row in rows.values():
        assert row["total"] == pytest.approx(row["compute"] + row["communication"])
    totals = [row["predicted"]["total"] for row in found["candidates"]]
    assert totals == sorted(totals)
    assert found["why"].startswith("data-parallel dp=4 wins")


def test_tables(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    topology = str(model.parent / "t.yaml")
    how = ["plan", str(model), "--devices", "4", "--topology", topology, "--candidates"]
    assert main(how) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert all(len(line) <= 100 for line in lines), out
    (marked,) = [line for line in lines if " * " in line]
    assert marked.startswith("data-parallel dp=4 *") and lines.index(marked) == 3
    assert any(line.startswith("tensor-parallel tp=4") and "3.1 kB" in line for line in lines)
    assert "  expert-parallel ep=4: expert-parallel over 4: the model has no weight" in out


@pytest.mark.slow
def test_thousands_of_ranks(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = told(model, capsys, "--devices", "4096", "--candidates")
    assert found["ranks"] == 4096


def test_an_axis_is_shared_by_leaves_apart() -> None:
    """Where 64 ranks are more than a dimension has, no leaf takes both shares of an axis."""
    model = Path(__file__).parents[2] / "models" / "dlrm.dynamo.static.onnx"
    found = try_candidate(model, Options(devices=64, search="auto"), Loader(model))
    assert isinstance(found, Candidate) and found.mesh.size == 64


def test_a_training_step_has_presets_of_its_own(model: Path, tmp_path: Path) -> None:
    step = tmp_path / "step.onnx"
    how = ["--loss", "mse", "--optimizer", "adam", "-o", str(step)]
    assert main(["grad", str(model), *how]) == 0
    names = [{o.preset or o.search for o in choices(m, Options(devices=2))} for m in (model, step)]
    assert names[1] - names[0] == {*ZERO_STAGES, "class-parallel"}


def test_hybrids_span_the_factorizations(model: Path) -> None:
    found = [o.mesh for o in choices(model, Options(devices=4096)) if o.preset == "hybrid"]
    sizes = [mesh.sizes["dp"] for mesh in found if mesh is not None]
    assert len(sizes) == MOST_HYBRIDS == len(set(sizes)) and (sizes[0], sizes[-1]) == (2, 2048)
    assert all(mesh is not None and mesh.size == 4096 for mesh in found)
    assert not [o for o in choices(model, Options(devices=7)) if o.preset == "hybrid"]


def test_a_mesh_that_is_given(model: Path) -> None:
    mesh = Mesh.parse("dp=2,tp=2")
    tried = choices(model, Options(mesh=mesh))
    assert {o.mesh for o in tried} == {mesh}
    assert [o.preset or o.search for o in tried] == [
        "data-parallel",
        "hybrid",
        "sequence-parallel",
        "expert-parallel",
        "table-parallel",
        "auto",
    ]


def test_errors(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    how = ["plan", str(model), "--candidates"]
    assert main(how) == 2
    assert "how many ranks?" in capsys.readouterr().err
    assert main([*how, "--devices", "2", "--preset", "data-parallel"]) == 2
    assert "leave --preset and --search out" in capsys.readouterr().err
    assert main([*how, "--devices", "2", "--search", "auto"]) == 2
    assert "leave --preset and --search out" in capsys.readouterr().err


def test_what_applies_nowhere() -> None:
    with pytest.raises(StrategyError, match="no strategy applies; zero1: none"):
        refused = [Refused("zero1", "dp=2", "none"), Refused("zero2", "dp=2", "some")]
        fastest_first("m", LATENCY, refused, ALONE)


def candidate(
    name: str, compute: float, talk: float, held: int = 1, objective: str = LATENCY
) -> Candidate:
    """One over two ranks; milliseconds."""
    predicted = Prediction(compute * 1e-3, talk * 1e-3)
    counts = Objective(objective).seconds(predicted.compute, predicted.communication)
    memory = {"weights_per_rank": held}
    return Candidate(name, Mesh.parse("dp=2"), predicted, counts, {}, memory)


ALONE = candidate(ONE_RANK, 9.0, 0.0)


def why(*found: Candidate) -> str:
    return fastest_first("m", LATENCY, found, ALONE).why


def test_why() -> None:
    a, b, c = candidate("a", 2.0, 0.5), candidate("b", 1.0, 2.0), candidate("c", 2.0, 0.5, 0)
    assert why(b, a) == (
        "a dp=2 wins, 0.500 ms ahead of b dp=2: 1.500 ms less communication, 1.000 ms more compute"
    )
    alone = "0.500 ms ahead of d dp=2: 0.500 ms less compute"
    assert why(candidate("d", 2.5, 0.5), a) == f"a dp=2 wins, {alone}"
    assert why(candidate("d", 2.5, 0.5), a, c) == f"c dp=2 wins (and as fast: a dp=2), {alone}"
    assert why(a, c) == "c dp=2 wins (and as fast: a dp=2): none is slower"
    assert why(a) == "a dp=2 wins: none is slower"


def test_throughput_counts_the_longer() -> None:
    talks, computes = (candidate(*c, 1, THROUGHPUT) for c in (("a", 2.0, 2.0), ("b", 3.0, 0.0)))
    found = fastest_first("m", THROUGHPUT, [computes, talks], ALONE)
    assert found.winner is talks
    assert "a dp=2 wins, 1.000 ms ahead of b dp=2" in found.why
    assert "the longer of compute and communication" in "\n".join(candidate_lines(found))


def test_no_collective_anywhere() -> None:
    found = Candidates("m", 2, LATENCY, [candidate("a", 1.0, 0.0)], [], ALONE)
    assert "kind of collective" not in "\n".join(candidate_lines(found))


def test_one_rank_stands_beside_them(tmp_path: Path) -> None:
    """Its time is that of the model as a plan over one rank has it, and it never wins."""
    path = write_text(HEAD + TEXT, tmp_path / "m.onnx")
    options = Options(devices=2, topology=Topology.of(TOPOLOGY))
    alone = on_one_rank(path, options, Loader(path))
    made, _ = sharder.plan(path, options)
    assert made.predicted is not None
    assert alone.seconds == pytest.approx(made.predicted.one_rank, rel=1e-9)
    slow = candidate("a", 999.0, 0.0)
    found = fastest_first("m", LATENCY, [slow], alone)
    assert found.winner is slow and found.rows == [alone, slow]
    assert "one rank alone takes no longer" in found.why
    lines = "\n".join(candidate_lines(found))
    assert f"\n{ONE_RANK} " in lines and found.to_json()["one_rank"]["seconds"] == alone.seconds
