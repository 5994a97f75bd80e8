"""Batches of training data, and learning rates over a run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from onnxpar.base.errors import InputError
from onnxpar.runtime.session.bundle import NodeArg
from onnxpar.trainer.data import Data, Rest

PORTS = [NodeArg("x", "tensor(float)", [4, 2]), NodeArg("labels", "tensor(int64)", [4])]
DIMS = {"x": 0, "labels": 0}


def arrays(count: int = 11) -> dict[str, np.ndarray]:
    x = np.arange(2 * count, dtype=np.float32).reshape(count, 2)
    return {"x": x, "labels": np.arange(count)}


def order(data: Data, epoch: int, seed: int | None, first: int = 0) -> list[int]:
    return [int(i) for batch in data.epoch(epoch, seed, first) for i in batch["labels"]]


def test_batches_are_whole_and_what_is_left_over_is_dropped() -> None:
    data = Data.of(arrays(), PORTS, DIMS)
    assert (data.batch, data.count, data.batches) == (4, 11, 2)
    assert order(data, 0, None) == list(range(8))
    for batch in data.epoch(3, 7):
        np.testing.assert_array_equal(batch["x"][:, 0], 2 * batch["labels"])
        assert batch["x"].dtype == np.float32 and batch["x"].shape == (4, 2)


def test_each_epoch_has_an_order_of_its_own_that_the_seed_decides() -> None:
    data = Data.of(arrays(), PORTS, DIMS)
    orders = [order(data, epoch, seed) for epoch in range(3) for seed in (0, 1)]
    assert len({tuple(o) for o in orders}) == 6
    assert all(len({*o}) == 8 for o in orders)
    assert order(data, 2, 1) == orders[5]
    assert order(data, 2, 1, first=4) == orders[5][4:]
    dropped = {i for epoch in range(20) for i in {*range(11)} - {*order(data, epoch, 0)}}
    assert dropped == {*range(11)}  # none is left out for good


@pytest.mark.parametrize("count", [11, 3])
def test_samples_that_fill_the_last_batch_do_not_count(count: int) -> None:
    data = Data.of(arrays(count), PORTS, DIMS, rest=Rest("labels", "samples"))
    assert data.batches == -(-count // 4) and not data.left_out()
    *whole, last = data.epoch(0, None)
    assert all("samples" not in batch for batch in whole)
    np.testing.assert_array_equal(last["labels"][3:], -100)
    np.testing.assert_array_equal(last["x"][:3, 0], 2 * last["labels"][:3])
    assert {*last["x"][:, 0]} == {*last["x"][:3, 0]} and last["samples"] == 3
    kept = [i for i in order(data, 0, 5) if i >= 0]
    assert sorted(kept) == list(range(count))


def test_what_has_no_samples_is_fed_as_it_is() -> None:
    mask = np.ones((3, 3), np.float32)
    ports = [NodeArg("mask", "tensor(float)", [3, 3]), *PORTS]
    data = Data.of({**arrays(), "mask": mask}, ports, DIMS)
    batches = list(data.epoch(0, 0))
    assert len(batches) == 2 and all(batch["mask"] is mask for batch in batches)


def test_samples_along_another_dimension() -> None:
    """In the array as in the input."""
    x, labels = np.arange(33).reshape(3, 11), np.arange(22).reshape(2, 11)
    ports = [NodeArg("x", "tensor(int64)", [3, 4]), NodeArg("labels", "tensor(int64)", [2, 4])]
    dims = {"x": 1, "labels": 1}
    data = Data.of({"x": x, "labels": labels}, ports, dims, rest=Rest("labels", None, 1))
    assert (data.batch, data.count, data.batches) == (4, 11, 3)
    first, _, last = data.epoch(0, None)
    np.testing.assert_array_equal(first["x"], x[:, :4])
    np.testing.assert_array_equal(last["x"][:, :3], x[:, 8:])
    np.testing.assert_array_equal(last["labels"][:, :3], labels[:, 8:])
    np.testing.assert_array_equal(last["labels"][:, 3], -100)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"x": arrays()["x"]}, "npz has no array for the input 'labels'; its arrays: x"),
        (arrays(3), "npz has 3 samples, but a batch has 4"),
        (
            {**arrays(), "labels": np.arange(10)},
            "numbers of samples, but have 11 of 'x', 10 of 'labels'",
        ),
        ({**arrays(), "x": np.zeros((11, 3))}, r"'x' .* \[11, 3\]; the step needs \[samples, 2\]"),
        ({**arrays(), "x": np.zeros(11)}, r"'x' .* \[11\]; the step needs \[samples, 2\]"),
    ],
)
def test_data_that_does_not_fit(given: dict[str, np.ndarray], message: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "train.npz", **given)
    with pytest.raises(InputError, match=message):
        Data.of(tmp_path / "train.npz", PORTS, DIMS)


def test_a_step_without_samples() -> None:
    with pytest.raises(InputError, match=r"no input of the step has samples; .* --batch-dim"):
        Data.of({"x": np.zeros((4, 2))}, PORTS[:1], {})


def test_files_that_are_no_data(tmp_path: Path) -> None:
    path = tmp_path / "train.npz"
    with pytest.raises(InputError, match=r"train\.npz"):
        Data.of(path, PORTS, DIMS)
    path.write_text("x, y")
    with pytest.raises(InputError, match=r"train\.npz"):
        Data.of(path, PORTS, DIMS)
    np.save(tmp_path / "one.npy", np.zeros(3))
    with pytest.raises(InputError, match=r"one\.npy"):
        Data.of(tmp_path / "one.npy", PORTS, DIMS)
