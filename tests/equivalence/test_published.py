"""Published bugs of other systems are refused at the tensor that is wrong; the same ranks without
the bug are accepted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from equivalence.hand_split import Values, computed, parsed, simulated, verified
from equivalence.published import BUGS, Bug, page
from onnx.helper import tensor_dtype_to_np_dtype


@pytest.mark.parametrize("name", BUGS)
def test_a_published_bug(name: str, tmp_path: Path) -> None:
    bug = BUGS[name]()
    right = verified(tmp_path / "right", bug.model, bug.right, bug.ports)
    assert right.ok, right.text()
    wrong = verified(tmp_path / "wrong", bug.model, bug.wrong, bug.ports)
    assert not wrong.ok
    assert [failure.tensor for failure in wrong.failures] == [bug.tensor], wrong.text()


@pytest.mark.parametrize("name", BUGS)
def test_the_bug_changes_what_ranks_compute(name: str) -> None:
    """By the reference evaluator of ONNX, on drawn inputs."""
    bug = BUGS[name]()
    differences = {"right": 0.0, "wrong": 0.0}
    for seed in range(40):
        feeds = _drawn(bug, seed)
        whole = computed(bug.model, feeds)
        for kind, ranks in (("right", bug.right), ("wrong", bug.wrong)):
            parts = [_parts(bug, "inputs", feeds, rank) for rank in range(len(ranks))]
            for rank, own in enumerate(simulated(ranks, parts)):
                wanted = _parts(bug, "outputs", whole, rank)
                worst = max(_difference(own[name], wanted[name]) for name in wanted)
                differences[kind] = max(differences[kind], worst)
    assert differences["right"] < 1e-5 < 1e-3 < differences["wrong"]


def test_the_page_lists_them() -> None:
    text = (Path(__file__).parents[2] / "docs/reference/verification.md").read_text()
    assert page() in text and f"these {len(BUGS)} bugs" in text


def _difference(a: np.ndarray, b: np.ndarray) -> float:
    assert a.shape == b.shape
    scale = np.abs(b).max(initial=1)
    return float(np.abs(a.astype(np.float64) - b).max(initial=0) / scale)


def _drawn(bug: Bug, seed: int) -> Values:
    random = np.random.default_rng(seed)
    feeds: Values = {}
    for port in _inputs(bug.model[0]):
        shape = [dim.dim_value for dim in port.type.tensor_type.shape.dim]
        dtype = tensor_dtype_to_np_dtype(port.type.tensor_type.elem_type)
        is_whole = np.dtype(dtype).kind in "iu"
        value = random.integers(0, 8, shape) if is_whole else random.standard_normal(shape)
        feeds[port.name] = value.astype(dtype)
    return feeds


def _inputs(text: str) -> Sequence[onnx.ValueInfoProto]:
    return parsed((text, {}), 1).graph.input


def _parts(bug: Bug, key: str, values: Values, rank: int) -> Values:
    """What a rank holds of inputs or outputs, by another reading of ports.json."""
    mesh: dict[str, int] = bug.ports["mesh"]  # type: ignore[assignment]
    at, left = {}, math.prod(mesh.values())
    for axis, size in mesh.items():
        left //= size
        at[axis] = rank // left % size
    found = dict(values)
    for name, dims in bug.ports.get(key, {}).items():  # type: ignore[attr-defined]
        for dim, division in dims.items():
            value = found[name]
            if isinstance(division, list) and isinstance(division[0], list):
                found[name] = value.take(range(*division[rank]), int(dim))
                continue
            for axis in [division] if isinstance(division, str) else division:
                found[name] = np.split(found[name], mesh[axis], int(dim))[at[axis]]
    return found
