"""Where Ray is not installed."""

from __future__ import annotations

import importlib
import sys

import pytest

from onnxpar.base.errors import OnnxparError


def test_the_package_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n == "onnxpar.ray" or n.startswith("onnxpar.ray.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(OnnxparError, match=r"pip install 'onnxpar\[ray\]'"):
        importlib.import_module("onnxpar.ray")
