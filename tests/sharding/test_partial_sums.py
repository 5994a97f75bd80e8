"""Sums that ranks keep partial until they are cheapest to reduce."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agreement import check_outputs, options, run_ranks, run_unsplit
from small_models import HEAD, write_text

from onnxpar.planner import sharder

ROWS = """rows (float[6,8] x, float[8,5] w) => (float[5] y)
<int64[1] first = {0}> { p = MatMul(x, w)  q = Neg(p)  y = ReduceSum<keepdims = 0>(q, first) }"""
SCALED = """scaled (float[6,8] x, float[8,5] w, float[6,1] r) => (float[5] y)
<int64[1] first = {0}>
{ p = MatMul(x, w)  q = Mul(p, r)  y = ReduceSum<keepdims = 0>(q, first) }"""
TWICE = """twice (float[6,8] x, float[8,4] w, float[4,5] v) => (float[6,5] y)
{ p = MatMul(x, w)  y = MatMul(p, v) }"""
ONCE = """once (float[6,8] x, float[8,4] w, float[4,5] v, float[5] b) => (float[6,5] y)
{ p = MatMul(x, w)  y = Gemm(p, v, b) }"""
CURVED = """curved (float[6,8] x, float[8,5] w) => (float[5] y)
<int64[1] first = {0}> { p = MatMul(x, w)  q = Exp(p)  y = ReduceSum<keepdims = 0>(q, first) }"""
LARGEST = """largest (float[6,8] x, float[8,5] w) => (float[5] y)
<int64[1] first = {0}> { p = MatMul(x, w)  y = ReduceMax<keepdims = 0>(p, first) }"""


def check(text: str, mesh: str, tensors: dict[str, Any], folder: Path) -> list[tuple[str, int]]:
    """Compares ranks with the unsplit model; returns collectives with the sizes of their groups."""
    path = write_text(HEAD + text, folder / "model.onnx")
    how = options(mesh, strategy={"mesh": mesh_of(mesh), "tensors": tensors})
    plan = sharder.shard(path, folder / "model.par", how)
    random = np.random.default_rng(0)
    feeds = {
        port.name: random.standard_normal(port.shape or ()).astype(np.float32)
        for port in plan.inputs
    }
    got = run_ranks(folder / "model.par", feeds)
    check_outputs(got, run_unsplit(path, feeds), [port.name for port in plan.outputs])
    return [(c.kind, len(c.group)) for c in plan.collectives]


def mesh_of(text: str) -> dict[str, int]:
    return {name: int(size) for name, _, size in (axis.partition("=") for axis in text.split(","))}


@pytest.mark.matrix
@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "dp=2,tp=3", "dp=5,tp=2"])
@pytest.mark.parametrize("text", [ROWS, SCALED])
def test_a_sum_passes_a_node_that_sums(text: str, mesh: str, tmp_path: Path) -> None:
    """One all-reduce of the short result, over all ranks, instead of one of the rows before."""
    ranks = np.prod(list(mesh_of(mesh).values()))
    made = check(text, mesh, {"x": ["dp", "tp"], "w": ["tp", None]}, tmp_path)
    assert made == [("AllReduce", ranks)]


def test_two_products_have_one_sum(tmp_path: Path) -> None:
    tensors = {"x": [None, "tp"], "w": ["tp", "dp"], "v": ["dp", None]}
    assert check(TWICE, "dp=2,tp=2", tensors, tmp_path) == [("AllReduce", 4)]


def test_an_operand_that_counts_once_forbids_it(tmp_path: Path) -> None:
    tensors = {"x": [None, "tp"], "w": ["tp", "dp"], "v": ["dp", None]}
    made = check(ONCE, "dp=2,tp=2", tensors, tmp_path)
    assert made == [("AllReduce", 2), ("AllReduce", 2)]


@pytest.mark.parametrize("text", [CURVED, LARGEST])
def test_what_is_not_linear_reads_whole_sums(text: str, tmp_path: Path) -> None:
    made = check(text, "dp=2,tp=2", {"x": ["dp", "tp"], "w": ["tp", None]}, tmp_path)
    assert made == [("AllReduce", 2), ("AllReduce", 2)]
