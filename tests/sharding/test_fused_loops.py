"""What the nodes of a loop read and write in memory."""

from __future__ import annotations

from pathlib import Path

from small_models import HEAD, write_text

from onnxpar.load.load import load
from onnxpar.sharding.analysis import analyse
from onnxpar.sharding.fused_loops import InLoop, in_loops

CHAIN = """chain (float[8,4] x, float[8,4] y) => (float[8,4] z, float[8,4] d)
{ a = Mul(x, y)  b = Add(a, x)  d = Mul(b, b)  e = Sub(d, y)  z = Exp(e) }"""


def test_memory_of_a_loop(tmp_path: Path) -> None:
    """The first reader of an operand reads it from memory, and d is a result of the model."""
    found = analyse(load(write_text(HEAD + CHAIN, tmp_path / "m.onnx")).graph)
    made = {op.node.name: op.node.outputs[0].name for op in found.ops}
    loops = {made[name]: loop for name, loop in in_loops(found.ops, found.tensors).items()}
    nothing: frozenset[int] = frozenset()
    assert loops == {
        "a": InLoop(frozenset((0, 1)), nothing, True),
        "b": InLoop(nothing, nothing, False),
        "d": InLoop(nothing, frozenset((0,)), False),
        "e": InLoop(nothing, frozenset((0,)), False),
    }
