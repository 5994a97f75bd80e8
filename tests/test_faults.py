"""Every seeded fault of `faults.py` is noticed by a handful of small cases."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from faults import FAULTS

import onnxpar
from onnxpar.runtime.compare import compare
from onnxpar.runtime.feeds import make_feeds
from onnxpar.runtime.threads import ThreadSession

HEAD = '<ir_version: 8, opset_import: ["" : 18]>\n'
GPT2 = Path(__file__).parents[1] / "models" / "gpt2.dynamo.static.onnx"

TEXTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "bias": (
        "g (float[4,6] x, float[6,5] w, float[5] b) => (float[4,5] y) { y = Gemm(x, w, b) }",
        {"mesh": "tp=2"},
        {"shard": {"Gemm_y": [[None, "tp"], ["tp", None]]}},
    ),
    "exchange": (
        "g (float[4,6] x) => (float[4,6] y) { h = Tanh(x)  y = Exp(h) }",
        {"mesh": "tp=2"},
        {"shard": {"Tanh_h": [["tp", None]], "Exp_y": [[None, "tp"]]}},
    ),
    "scatter": (
        "g (float[5,6] x, float[6,8] w) => (float[5,8] y) { h = MatMul(x, w)  y = Relu(h) }",
        {"mesh": "a=2,b=2"},
        {"shard": {"MatMul_h": [[None, "b"], ["b", None]], "Relu_y": [["b", "a"]]}},
    ),
    "lookup": (
        "g (int64[4,3] i, float[7,2] t) => (float[4,3,2] y) { y = Gather(t, i) }",
        {"mesh": "tp=3"},
        {"tensors": {"t": ["tp", None]}},
    ),
    "gather": (
        "g (float[5,7] x) => (float[5,7] y) { h = Tanh(x)  y = Softmax(h) }",
        {"mesh": "tp=2"},
        {"shard": {"Tanh_h": [[None, "tp"]]}},
    ),
    "slice": (
        "g (float[5,7] x) => (float[5,7] y) { h = Softmax(x)  y = Tanh(h) }",
        {"mesh": "tp=2"},
        {"shard": {"Tanh_y": [[None, "tp"]]}},
    ),
    "count-once": (
        "g (float[4,6] x, float[6,5] w, float[6,5] v, float[4,5] r) => (float[4,5] y)"
        "{ a = MatMul(x, w)  b = MatMul(x, v)  s = Tanh(r)  c = Add(s, a)  d = Add(c, b)"
        "  y = Exp(d) }",
        {"mesh": "tp=2"},
        {
            "shard": {
                "MatMul_a": [[None, "tp"], ["tp", None]],
                "MatMul_b": [[None, "tp"], ["tp", None]],
            }
        },
    ),
    "shrink": (
        "g (float[4,6] x, float[6,5000] w) => (float[4,20] y)"
        "<int64[1] s = {100}, int64[1] e = {120}, int64[1] a = {1}>"
        "{ h = MatMul(x, w)  r = Relu(h)  y = Slice(r, s, e, a) }",
        {"mesh": "tp=2"},
        {"shard": {"MatMul_h": [[None, "tp"], ["tp", None]]}},
    ),
    "segments": (
        "g (float[3,4] p, float[3,6] q, float[10,5] w) => (float[3,5] y)"
        "{ a = Tanh(p)  b = Softmax(q)  c = Concat<axis = 1>(a, b)  y = MatMul(c, w) }",
        {"mesh": "tp=2"},
        {"shard": {"Tanh_a": [[None, "tp"]]}},
    ),
}


def small_model(name: str, folder: Path) -> Path:
    path = folder / f"{name}.onnx"
    onnx.save(onnx.parser.parse_model(HEAD + TEXTS[name][0]), path)
    return path


def cases(folder: Path) -> Iterator[tuple[str, Path, dict[str, Any]]]:
    """(name, model, options of shard), the quickest first."""
    for name, (_, mesh, strategy) in TEXTS.items():
        yield name, small_model(name, folder), {**mesh, "strategy": strategy}
    yield "gpt2", GPT2, {"mesh": "dp=2,tp=3", "preset": "hybrid"}


def is_right(model: Path, options: dict[str, Any], folder: Path) -> bool:
    """Whether the sharded model agrees with the whole one; an error is a notice too."""
    par = folder / "model.par"
    shutil.rmtree(par, ignore_errors=True)
    try:
        plan = onnxpar.shard(model, par, verify=True, **options)
        ports = [(p.name, p.dtype, p.shape or ()) for p in plan.inputs]
        with ThreadSession(par, timeout=5) as session:
            return compare(model, session, make_feeds(ports, plan.ranges)).ok
    except (onnxpar.OnnxparError, AssertionError, ValueError, IndexError):
        return False


def test_all_cases_are_right_without_a_fault(tmp_path: Path) -> None:
    for name, model, options in cases(tmp_path):
        assert is_right(model, options, tmp_path), name


def test_there_are_twenty_faults() -> None:
    assert len(FAULTS) >= 20


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_noticed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    apply: Callable[[pytest.MonkeyPatch], None] = FAULTS[name]
    apply(monkeypatch)
    assert any(not is_right(model, options, tmp_path) for _, model, options in cases(tmp_path)), (
        f"no case notices that {name}"
    )


def test_lookup_feeds_reach_every_rank() -> None:
    """The lookup case draws rows of all parts, or it could not notice an offset."""
    feeds = make_feeds([("i", "int64", (4, 3))], {"i": (0, 7)})
    assert {int(np.searchsorted([3, 5], v, side="right")) for v in feeds["i"].flat} == {0, 1, 2}
