"""What bench_peers.py does beside measuring: peers must agree, only quiet turns count, what is not
installed is named."""

from __future__ import annotations

import contextlib
import os
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from bench import language_model_report, peer_models
from bench.constant_peer import constant
from bench.peer_report import BEGIN, END, show, write_page, write_plot
from bench.peers import Figure, Peer, Running, Turn, measure, tree_seconds, watched

import onnxpar


@pytest.mark.slow
def test_figures_of_peers_that_agree() -> None:
    peers = [Peer("a", constant, (2.0,)), Peer("b", constant, (2.1,))]
    found = measure(peers, rounds=2, seconds=1e-4, results=1, tolerance=0.1)
    assert list(found) == ["a", "b"]
    assert found["a"].error == 0
    assert found["b"].error == pytest.approx(0.05)
    assert 0 < found["a"].low <= found["a"].median <= found["a"].high


@pytest.mark.slow
@pytest.mark.parametrize("value", [2.3, float("nan")])
def test_a_peer_that_disagrees_is_not_timed(value: float) -> None:
    peers = [Peer("a", constant, (2.0,)), Peer("b", constant, (value,))]
    with pytest.raises(SystemExit, match="b disagrees with a"):
        measure(peers, rounds=1, seconds=0.0, results=1, tolerance=0.1)


@pytest.mark.slow
def test_a_peer_whose_process_ends_is_named() -> None:
    with pytest.raises(RuntimeError, match="b has stopped"), contextlib.ExitStack() as stack:
        Running.start(Peer("b", constant, ()), stack).results(1)


def test_only_quiet_turns_count_or_the_quietest_quarter() -> None:
    turns = [Turn([float(i)], others) for i, others in enumerate((0.9, 0.05, 0.4, 0.08))]
    assert Figure.of(turns) == Figure(1.5, 2.0, 2.5, 2, 4, 0.0)
    loud = [Turn([float(i)], others) for i, others in enumerate((0.9, 0.5, 0.4, 0.8))]
    assert Figure.of(loud) == Figure(2.0, 2.0, 2.0, 0, 4, 0.0)


@pytest.mark.slow
def test_work_of_others_is_told_from_own() -> None:
    def spin() -> int:
        end = time.process_time() + 0.3
        while time.process_time() < end:
            pass
        return 1

    before = tree_seconds(os.getpid())
    result, others = watched(os.getpid(), spin)
    assert tree_seconds(os.getpid()) - before >= 0.2
    assert result == 1 and 0 <= others <= (os.cpu_count() or 1)


def test_what_is_not_installed_is_named_with_the_remedy() -> None:
    missing = Peer("JAX", constant, (), "no_such_module").missing
    assert missing == "JAX is left out: pip install 'onnxpar[peers]' installs no_such_module"
    assert not Peer("a", constant, (), "numpy").missing


@pytest.mark.slow
def test_tables_have_ratios_to_the_first_row(tmp_path: Path) -> None:
    table = {"a": Figure(1, 2, 3, 4, 5, 0), "b": Figure(0.5, 1, 2, 5, 5, 1e-6)}
    text = show({"date": "today"}, {"model": table})
    assert "| b | 1000 | 500 to 2000 | 2.00 | 5 of 5 | 1e-06 |" in text
    write_plot(tmp_path / "plot.svg", {"date": "today", "machine": "CPU"}, {"model": table})
    assert (tmp_path / "plot.svg").read_text().count("</svg>") == 1


def test_a_page_gets_new_tables(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nbehind\n")
    about = {"date": "today", "machine": "CPU", "python": "3"}
    for _ in range(2):
        write_page(page, about, {"model": {"a": Figure(1, 2, 3, 4, 5, 0)}})
        text = page.read_text()
        assert text.startswith("before\n") and text.endswith("\nbehind\n") and "old" not in text
        assert text.count("| a | 2000 | 1000 to 3000 | 1.00 | 4 of 5 | - |") == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_models_with_random_weights_run_over_ranks(kind: str, tmp_path: Path) -> None:
    case = peer_models.Case(kind, 2, 8, 1, 16, 4, 32, kv_heads=2, ffn=24)
    model = case.write(tmp_path / "model.onnx")
    weights = peer_models.weights_of(model)
    assert all(weight.std() > 0 for weight in weights.values() if weight.size > 1)
    onnxpar.shard(model, tmp_path / "model.par", devices=2, preset="tensor-parallel")
    with ExitStack() as stack:
        one = peer_models.onnxruntime(stack, model, case.feeds, 1)
        two = peer_models.sharded(stack, tmp_path / "model.par", case.feeds)
        np.testing.assert_allclose(two(), one(), rtol=1e-4, atol=1e-5)


def test_a_plot_of_language_models(tmp_path: Path) -> None:
    def rounds(first: float, each: float) -> list[dict[str, object]]:
        return [{"first": first * n, "each": each * n, "others": 0.0} for n in (1, 2, 3)]

    tables = {
        f"0.2B int4, {n} x 32": {"genai": rounds(1.0, 0.1), "onnxpar": rounds(2.0, 0.05 * n)}
        for n in (1, 4)
    }
    about = {"date": "today", "machine": "CPU"}
    language_model_report.write_plot(tmp_path / "plot.svg", about, tables)
    assert (tmp_path / "plot.svg").read_text().count("</svg>") == 1
