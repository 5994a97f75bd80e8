"""The table of kinds agrees with what says the same elsewhere: plugin, verifier, docs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import onnxpar.training.gradients  # noqa: F401  (registers gradients)
from onnxpar.compiler import check_layouts
from onnxpar.graph.collectives import (
    AFTER,
    COMPLETE,
    DOMAIN,
    FUSED_ELEMENTWISE,
    KINDS,
    LOCAL_STEPS,
    RANK_CONSTANTS,
    START,
    Kind,
)
from onnxpar.training.gradients.vjp import registered

ROOT = Path(__file__).parents[2]
COMMUNICATING = [kind for kind in KINDS.values() if not kind.is_local]
AMOUNTS = {"whole": (0, 0), "split": (1, 0), "partial": (0, 1)}
"""How often axes are on factors, and in the partial reduction, by the state of a tensor."""


def test_the_plugin_has_these_ops_and_a_few_that_order_nodes() -> None:
    source = (ROOT / "onnxpar/native/op_registry.cc").read_text()
    (table,) = re.findall(r"kSchemas\[\] = \{(.*?)\n\};", source, re.DOTALL)
    ops = re.findall(r'\{"(\w+)"', table)
    started = {START + kind.name for kind in KINDS.values() if kind.is_started}
    others = {*RANK_CONSTANTS, COMPLETE, AFTER, "Gate", FUSED_ELEMENTWISE}
    assert set(ops) == {*(kind.name for kind in COMMUNICATING), *started, *others}


@pytest.mark.parametrize("kind", [k for k in KINDS.values() if k.change], ids=lambda k: k.name)
def test_the_verifier_says_the_same_of_reshards(kind: Kind) -> None:
    factors, pending = check_layouts._CHANGES[kind.name]
    assert kind.change is not None
    before, after = kind.change
    assert pending == AMOUNTS[after][1] - AMOUNTS[before][1]
    assert factors == {*[1] * AMOUNTS[after][0], *[-1] * AMOUNTS[before][0]}


def test_the_verifier_knows_no_other_kinds() -> None:
    assert set(check_layouts._CHANGES) == {kind.name for kind in KINDS.values() if kind.change}


def test_the_docs_list_every_collective_with_its_attributes() -> None:
    page = (ROOT / "docs/reference/plugin-ops.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", page, re.MULTILINE))
    for kind in COMMUNICATING:
        along = [a for a in (kind.joins, kind.cuts) if a]
        named = {name for a in along for name in (a.axis, a.sizes)}
        assert named <= set(re.findall(r"`(\w+)`", rows[kind.name])), kind.name
        assert ("`root`" in rows[kind.name]) == (kind.awaits == "root"), kind.name


def test_collectives_that_people_write_have_gradients() -> None:
    known = {op for domain, op in registered() if domain == DOMAIN}
    assert known == {kind.name for kind in COMMUNICATING if kind.by_hand}


def test_local_steps_are_no_ops_of_the_plugin() -> None:
    assert LOCAL_STEPS == ("LocalSlice", "Select")
