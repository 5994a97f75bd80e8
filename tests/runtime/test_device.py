"""The device of ranks' tensors, against onnxruntime's own profile and values."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from runtime.bundles import k_split

from onnxpar.runtime.session.device import HOST
from onnxpar.runtime.session.session import InferenceSession


def test_the_provider_of_collectives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is that which the plugin registers their kernels for."""
    monkeypatch.chdir(tmp_path)
    options = ort.SessionOptions()
    options.enable_profiling = True
    with InferenceSession(k_split(tmp_path / "m.par"), options) as session:
        session.run(None, {"x": np.ones((4, 7), np.float32)})
        file = session.end_profiling()
    events = [event.get("args", {}) for event in json.loads(Path(file).read_text())]
    ran = {a["provider"] for a in events if a.get("op_name") == "AllReduce" and "provider" in a}
    assert ran == {HOST.provider}


def test_memory_is_shared_with_arrays() -> None:
    array = np.zeros((2, 3), np.float32)
    value = HOST.wrap(array)
    array += 5
    np.testing.assert_array_equal(value.numpy(), np.full((2, 3), 5))
    assert HOST.has(value.device_name().upper())
    assert HOST.allocate((2, 3), np.float32).device_name() == HOST.name
    assert HOST.memory_info().name == HOST.memory
