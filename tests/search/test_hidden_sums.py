"""A search decides with sums of gradients in full, and as if compute hid them; the faster plan
wins."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from training.steps import ThreadTrainer, batches, write_step

import onnxpar
from onnxpar.cost.topology import Topology
from onnxpar.graph.collectives import KINDS
from onnxpar.planner import loader
from onnxpar.planner.attempt import Attempt
from onnxpar.planner.loader import Loader
from onnxpar.planner.observer import Observer
from onnxpar.planner.options import Options
from onnxpar.planner.planner import Planner
from onnxpar.report.compare_training import compare_training
from onnxpar.report.proof_text import proof_text

LAYERS = 12
WIDE = """wide (float[64,128] x, {}) => (float[64,128] y) {{ {} }}""".format(
    ", ".join(f"float[128,128] w{i}" for i in range(LAYERS)),
    "  ".join(
        f"{'y' if i == LAYERS - 1 else f'r{i}'} = MatMul({f't{i - 1}' if i else 'x'}, w{i})"
        + ("" if i == LAYERS - 1 else f"  t{i} = Tanh(r{i})")
        for i in range(LAYERS)
    ),
)
"""Weights have twice as many bytes as activations: sums of gradients take longer than those of
tensor parallelism."""
HOSTS: dict[str, Any] = {
    "levels": [
        {"name": "host", "size": 1, "latency": "5 us", "bandwidth": "8 GB/s"},
        {"name": "network", "latency": "20 us", "bandwidth": "100 MB/s"},
    ],
    "device": {"flops": "1 GFLOP/s", "memory_bandwidth": "8 GB/s", "launch": "1 us"},
}
"""Hosts of one rank, which compute for longer than they send gradients."""


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_step(WIDE, tmp_path_factory.mktemp("wide"), loss="mse")


def planned(step: Path, **options: Any) -> Any:
    return onnxpar.plan(step, devices=2, topology=Topology.of(HOSTS), **options)


@pytest.mark.slow
def test_what_is_faster_with_hidden_sums_is_chosen(step: Path) -> None:
    plan, alone = planned(step), planned(step, overlap="off")
    assert plan.proof is not None and plan.proof.hides_sums
    assert alone.proof is not None and not alone.proof.hides_sums
    assert plan.hidden > 0.0 and alone.hidden == 0.0
    assert plan.predicted.total < 0.98 * alone.predicted.total
    assert {e.kind for e in plan.collectives} != {e.kind for e in alone.collectives}


def test_the_step_is_read_once_and_the_plan_says_what_it_beat(
    step: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, read = loader.load_model, []

    def counted(*given: Any, **how: Any) -> Any:
        read.append(given[0])
        return load(*given, **how)

    monkeypatch.setattr(loader, "load_model", counted)
    (note,) = (n for n in planned(step).notes if "attempts" in n)
    assert read == [step]
    assert "best of 2 attempts" in note and "gradients counted in full in the search: " in note


@pytest.mark.slow
def test_it_is_never_slower_than_with_sums_in_full(step: Path) -> None:
    """Over a fast link, there is nothing to gain; over a very slow one, little can be hidden."""
    for bandwidth in ("10 GB/s", "1 MB/s"):
        network = {**HOSTS["levels"][1], "bandwidth": bandwidth}
        topology = Topology.of({**HOSTS, "levels": [HOSTS["levels"][0], network]})
        plan = onnxpar.plan(step, devices=2, topology=topology)
        options = Options(devices=2, topology=topology)
        once = Planner(Loader(step), options, Observer()).make(Attempt.first(options)).plan
        assert plan.predicted is not None and once.predicted is not None
        assert plan.predicted.total <= once.predicted.total


@pytest.mark.slow
def test_the_bound_holds_for_strategies_with_hidden_sums(step: Path) -> None:
    """Presets that send only sums of gradients take no less, even if all of these are hidden."""
    proof = planned(step).proof
    assert proof is not None and 0.0 < proof.bound <= proof.seconds
    preset = planned(step, preset="data-parallel")
    assert all(KINDS[e.kind].reduces for e in preset.collectives)
    assert proof.bound <= preset.predicted.compute + preset.predicted.communication
    assert "with sums of gradients between hosts hidden" in proof_text(proof.to_json())
    plain = proof_text(replace(proof, hides_sums=False).to_json())
    assert "hidden" not in plain


def test_it_trains_as_on_one_rank(step: Path, tmp_path: Path) -> None:
    """One step: so deep a model then multiplies rounding errors, under any strategy."""
    par = tmp_path / "wide.par"
    plan = onnxpar.shard(step, par, devices=2, topology=Topology.of(HOSTS))
    assert plan.proof is not None and plan.proof.hides_sums
    with ThreadTrainer(par) as trainer:
        report = compare_training(step, trainer, list(batches(plan, 1)), 0.05)
    assert report.ok, report.text()


@pytest.mark.slow
def test_dumps_are_of_the_plan_that_is_chosen(step: Path, tmp_path: Path) -> None:
    plan = planned(step, dump=tmp_path / "dump")
    assert plan.proof is not None and plan.proof.hides_sums
    files = sorted((tmp_path / "dump").glob("*.onnxtxt"))
    assert [int(file.name[:2]) for file in files] == list(range(1, len(files) + 1))
    (overlapped,) = (file for file in files if "overlap" in file.name)
    kinds = Counter(re.findall(r"onnxpar\.(?:Start)?(\w+)\(", overlapped.read_text()))
    sent = Counter(entry.kind for entry in plan.collectives)
    assert {kind: count for kind, count in kinds.items() if kind in KINDS} == sent
