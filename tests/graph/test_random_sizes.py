"""Random models that compute with open sizes: at any size, also far from those that they are
planned for, ranks give the unsplit results, or refuse the size by name."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from agreement import TIMEOUT, relative_error
from graph.random_sizes import random_model
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors

import onnxpar
from onnxpar.base.errors import InputError, OpenSizesError
from onnxpar.runtime.session.threads import ThreadSession

WAYS: list[dict[str, Any]] = [
    {"devices": 2, "preset": "data-parallel"},
    {"devices": 2},
    {"devices": 3},
    *(
        {"mesh": f"tp={ranks}", "strategy": {"tensors": {"x": split}}}
        for ranks in (2, 3, 4)
        for split in (["tp", None, None], [None, "tp", None], [None, None, "tp"])
    ),
]
RUNS = 8
CLOSE = 1e-4
"""Cumulative sums over a thousand numbers, one after the other."""


def compare_runs(seed: int, folder: Path) -> Counter[str]:
    """Shards a model in a random way, and compares runs at random sizes; returns how they went."""
    source = random.Random(seed)
    model, way = random_model(source), source.choice(WAYS)
    path, par = folder / "m.onnx", folder / f"{seed}.par"
    onnx.save(model, path)
    unsplit = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    try:
        onnxpar.shard(path, par, **way)
    except OpenSizesError:
        return Counter(["refused"])
    went: Counter[str] = Counter()
    with ThreadSession(par, timeout=TIMEOUT) as session:
        for _ in range(RUNS):
            batch, length = source.randint(1, 6), int(1.5 * 2 ** source.uniform(-0.5, 9.5))
            x = np.random.default_rng(length).standard_normal((batch, length, 6), np.float32)
            try:
                wanted = unsplit.run(None, {"x": x})
            except (ort_errors.Fail, ort_errors.InvalidArgument, ort_errors.RuntimeException):
                went["invalid"] += 1
                continue
            try:
                found = session.run(None, {"x": x})
            except InputError as error:
                assert "this sharded model needs" in str(error), (seed, x.shape)
                went["limited"] += 1
                continue
            went["right"] += 1
            (y,), (reference,) = found, wanted
            assert y.shape == reference.shape, (seed, x.shape, way, y.shape)
            assert relative_error(y, reference) < CLOSE, (seed, x.shape, way)
    return went


@pytest.mark.parametrize(
    "seed", [5, *(pytest.param(s, marks=pytest.mark.slow) for s in (3, 86, 152, 1087, 5110))]
)
def test_models_that_were_wrong(seed: int, tmp_path: Path) -> None:
    """Samples that grew in vain; a binding without elements; a slice from an open size on; a size
    that fitted by chance; an element that did; an operand that a shard has only sometimes."""
    assert set(compare_runs(seed, tmp_path)) <= {"right", "limited", "invalid"}


def test_random_models(request: pytest.FixtureRequest, tmp_path_factory: Any) -> None:
    went: Counter[str] = Counter()
    for seed in range(request.config.getoption("--random-graphs") // 40):
        went += compare_runs(seed, tmp_path_factory.mktemp("model"))
    assert went["right"] > 10 * went["limited"] and went["right"] > 50 * went["refused"], went
