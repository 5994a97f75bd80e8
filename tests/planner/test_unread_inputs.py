"""A note tells of inputs that no node reads."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_models import HEAD, write_text

import onnxpar

TEXTS = {
    "one": (
        """m (float[8,6] x, float[3] extra) => (float[8,6] y) { y = Relu(x) }""",
        "no node reads the input 'extra', but runs need a value",
    ),
    "two": (
        """m (float[8,6] x, float[3] a, int64 b) => (float[8,6] y) { y = Relu(x) }""",
        "no node reads the inputs 'a', 'b', but runs need a value",
    ),
    "read by a body alone, or an output": (
        """m (float[8,6] x, bool c, float[8,6] z, float[3] o) => (float[8,6] y, float[3] o)
        { y = If(c) <then_branch = g () => (float[8,6] a) { a = Add(x, z) },
                     else_branch = h () => (float[8,6] b) { b = Identity(x) }> }""",
        None,
    ),
}


@pytest.mark.parametrize("case", TEXTS)
def test_notes(case: str, tmp_path: Path) -> None:
    text, expected = TEXTS[case]
    path = write_text(HEAD + text, tmp_path / "model.onnx")
    notes = onnxpar.plan(path, devices=2, preset="data-parallel").notes
    assert [note for note in notes if "no node reads" in note] == ([expected] if expected else [])
