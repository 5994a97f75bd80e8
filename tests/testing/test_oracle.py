"""The oracle goes red: each way to get a rule wrong is broken once."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy import array

from onnxpar.rules import rule as registry
from onnxpar.rules.rule import registered
from onnxpar.testing.case import Case, Cut
from onnxpar.testing.oracle import Oracle
from onnxpar.testing.proof import prove


def test_every_rule_has_a_case():
    named = {"If", "Loop", "Scan"}  # of graphs, not of nodes: whole_models/test_control_flow.py
    for path in (Path(__file__).parents[1] / "rules").glob("test_*.py"):
        tree = ast.walk(ast.parse(path.read_text()))
        named |= {n.value for n in tree if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    assert {op for _, op in registered()} - named == set()


@pytest.fixture
def broken(monkeypatch):
    """Proves a case with fields of its rule replaced."""

    def prove_broken(case: Case, **fields):
        right = registered()["", case.op]

        def wrong(node):
            ranks = {name: fields[name] for name in {"local", "lowered"} & fields.keys()}
            others = {name: value for name, value in fields.items() if name not in ranks}
            return replace(right(node), **others).with_op(**ranks)

        monkeypatch.setitem(registry._RULES, ("", case.op), wrong)
        return prove(case)

    return prove_broken


def test_a_whole_axis_that_is_let_through(broken):
    proof = broken(Case("DFT", [(3, 6, 1), None, array(1)]), whole={})
    assert any("values that differ" in problem for problem in proof.wrong)


def test_ranks_that_do_not_communicate_over_an_axis(broken):
    proof = broken(Case("Softmax", [(2, 4)]), lowered=frozenset())
    assert any("values that differ" in problem for problem in proof.wrong)


def test_a_sum_taken_for_a_maximum(broken):
    proof = broken(Case("ReduceSum", [(4, 6), array([1])]), reduce={"d1": "max"})
    assert any("does not reduce to the whole" in problem for problem in proof.wrong)


def test_a_reduction_that_is_forgotten(broken):
    proof = broken(Case("MatMul", [(4, 6), (6, 5)]), reduce={})
    assert proof.wrong


def test_a_bias_that_every_rank_adds(broken):
    proof = broken(Case("Gemm", [(4, 6), (6, 5), (5,)]), additive=frozenset())
    assert proof.wrong


def test_an_attribute_that_is_left_global(broken):
    case = Case("GroupNormalization", [(2, 6, 5), (6,), (6,)], {"num_groups": 3}, opset=21)
    with pytest.raises(Exception, match="Reshape"):
        broken(case, local={})


def test_a_shape_that_is_left_global(broken):
    with pytest.raises(Exception, match="Reshape"):
        broken(Case("Reshape", [(4, 6), array([2, 12])]), local={})


def test_a_mean_that_is_not_weighted(broken):
    proof = broken(Case("ReduceMean", [(4, 5), array([1])]), lowered=frozenset())
    assert proof.wrong


def test_a_lookup_of_rows_that_others_hold(broken):
    case = Case("Gather", [(7, 3), array([6, 0, 3])], fed=[1])
    with pytest.raises(Exception, match="indices element out of data bounds"):
        broken(case, lowered=frozenset())


def test_a_false_claim_of_linearity(broken):
    proof = broken(Case("Relu", [(4, 6)]), linear=(frozenset({0}),))
    assert proof.wrong == ["Relu is not jointly linear in [0]"]


def test_a_false_claim_of_one_group_for_two(broken):
    proof = broken(Case("Mul", [(4, 6), (4, 6)]), linear=(frozenset({0, 1}),))
    assert "Mul is not jointly linear in [0, 1]" in proof.wrong


def test_a_false_claim_of_monotony(broken):
    proof = broken(Case("Neg", [(4, 6)]), monotone=frozenset({0}))
    assert "no partial max passes Neg by operand 0" in proof.wrong


def test_integers_that_wrap_are_not_monotone(broken):
    proof = broken(
        Case("Add", [array([3, 1]), array([-1, -2])], fed=[0, 1]), monotone=frozenset({0})
    )
    assert "no partial max passes Add by operand 0" in proof.wrong


@pytest.mark.parametrize(
    ("case", "whole", "missed"),
    [
        (Case("MatMul", [(4, 6), (6, 5)]), "m", "x0.0 -> concat 0"),
        (Case("MatMul", [(4, 6), (6, 5)]), "k", "x0.1 x1.0 -> sum"),
        (Case("Add", [(4, 6), (6,)]), "d1", "x0.1 x1.0 -> concat 1"),
        (Case("ReduceMax", [(4, 6)]), "d0", "x0.0 -> max"),
    ],
)
def test_a_split_that_is_missed(broken, case, whole, missed):
    assert missed in broken(case, whole={whole: "not so"}).missed


def test_segments_of_a_sum_are_split_together_or_not_at_all():
    case = Case("MatMul", [(4, 6), (6, 5)])
    oracle = Oracle(case, Cut("k", "x0", 1, (2, 4), "concat"))
    assert [oracle.wrong(split) for split in oracle.splits()] == [None] * len([*oracle.splits()])
    assert [leaf.size for leaf in oracle.op.leaves if leaf.factor == "k"] == [2, 4]


def test_integers_are_compared_exactly(broken):
    case = Case("MatMulInteger", [np.full((2, 6), 9, np.uint8), np.full((6, 2), 9, np.uint8)])
    assert broken(replace(case, fed=[0, 1]), reduce={}).wrong
