"""Marks for tests of ops that older versions of onnx and onnxruntime do not have."""

from __future__ import annotations

import pytest

from onnxpar.graph.checker import newest_opset


def since(opset: int) -> pytest.MarkDecorator:
    """Skips a test if the installed onnx or onnxruntime does not load models of this opset."""
    return pytest.mark.skipif(newest_opset() < opset, reason=f"opset {opset} is not installed")
