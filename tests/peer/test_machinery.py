"""The peer runner counts what it should: wrong values, and runs that end or block a process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from peer.cases import PeerCase, runnable
from peer.faults import faulty_steps, silent_steps
from peer.forms import forms
from peer.missed import missed_splits
from peer.open_cases import SIZES, opened
from peer.outcome import CRASH, GATHERED, HANG, MISSED, REFUSED, SPLIT, WRONG
from peer.splits import Split
from peer.trial import Bench, Trials
from peer.workers import Worker


def case_of(text: str, feeds: dict[str, np.ndarray], *expected: np.ndarray) -> PeerCase:
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 18]>\n{text}')
    found = runnable(PeerCase("made", model, [(feeds, list(expected))], 1e-3, 1e-7))
    assert isinstance(found, PeerCase), found
    return found


def doubled() -> PeerCase:
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    return case_of("g (float[4, 3] x) => (float[4, 3] y) { y = Add(x, x) }", {"x": x}, x + x)


def summed(keep: int = 1) -> PeerCase:
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    axes = np.array([0])
    text = "g (float[4, 3] x, int64[1] axes) => (float[1, 3] y) { y = ReduceSum(x, axes) }"
    return case_of(text, {"x": x, "axes": axes}, x.sum(0, keepdims=True))


def test_a_run_on_parts_is_split(tmp_path: Path) -> None:
    trials = Trials(doubled(), Bench(tmp_path))
    outcomes = [trials.run(split) for split in trials.splits()]
    assert {o.kind for o in outcomes} == {SPLIT}
    assert [o.split for o in outcomes] == [
        "x.0 over 2",
        "x.0 over 2 as 1+3",
        "x.0 over 3",
        "x.0 over 3 as 1+1+2",
        "x.0 over 3 as 0+2+2",
        "x.1 over 2",
        "x.1 over 2 as 1+2",
        "x.1 over 3",
        "x.1 over 4",
    ]


def test_a_size_that_is_made_open_is_compared_at_others(tmp_path: Path) -> None:
    rows, columns = opened(doubled())
    assert rows.name == "made with open x.0" and columns.name == "made with open x.1"
    assert [feeds["x"].shape[0] for feeds, _ in rows.data] == [4, *SIZES]
    trials = Trials(rows, Bench(tmp_path))
    assert trials.run(Split(3, (("x", 0),))).kind == SPLIT
    (feeds, (expected,)), *others = rows.data[::-1]
    off = replace(rows, data=[*others[::-1], (feeds, [expected + 1])])
    wrong = Trials(off, Bench(tmp_path)).run(Split(3, (("x", 0),)))
    assert wrong.kind == WRONG and wrong.detail.startswith("x [100, 3]: ")


def test_other_values_are_wrong(tmp_path: Path) -> None:
    case = doubled()
    feeds, (expected,) = case.data[0]
    off = expected.copy()
    off[3, 1] += 0.1
    trials = Trials(replace(case, data=[(feeds, [off])]), Bench(tmp_path))
    assert trials.run(Split(2, (("x", 0),))).kind == WRONG


def test_what_is_made_whole_is_gathered(tmp_path: Path) -> None:
    x = np.array([[0, 1, 2], [3, 0, 0]], np.float32)
    text = "g (float[2, 3] x) => (int64[2, n] y) { y = NonZero(x) }"
    trials = Trials(case_of(text, {"x": x}, np.array(np.nonzero(x))), Bench(tmp_path))
    outcome = trials.run(Split(2, (("x", 0),)))
    assert outcome.kind == GATHERED and "data-dependent" in outcome.reason


def test_an_error_that_says_why_is_a_refusal(tmp_path: Path) -> None:
    outcome = Trials(doubled(), Bench(tmp_path)).run(Split(3, (("x", 1),), (2, 2)))
    assert outcome.kind == REFUSED and "add up to 3" in outcome.detail


def test_parameters_become_constants() -> None:
    whole, constant = forms(summed())
    assert [i.name for i in whole.model.graph.input] == ["x", "axes"]
    assert [i.name for i in constant.model.graph.input] == ["x"]
    assert list(constant.data[0][0]) == ["x"]


def test_a_split_without_a_rule_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(missed_splits(doubled())) == []
    monkeypatch.setattr("onnxpar.rules.rule._RULES", {})
    found = list(missed_splits(doubled()))
    assert {o.kind for o in found} == {MISSED}


@pytest.mark.slow
def test_a_process_that_ends_or_blocks_is_counted() -> None:
    worker = Worker(faulty_steps, patience=3.0)
    try:
        outcomes = worker.try_case(7)
    finally:
        worker.close()
    assert [(o.split, o.kind) for o in outcomes] == [
        ("first", SPLIT),
        ("dies", CRASH),
        ("blocks", HANG),
        ("last", SPLIT),
    ]


@pytest.mark.slow
def test_a_case_that_comes_to_no_step_is_given_up() -> None:
    worker = Worker(silent_steps, patience=2.0)
    try:
        assert [o.kind for o in worker.try_case(7)] == [HANG]
    finally:
        worker.close()
