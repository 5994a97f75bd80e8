"""Samples that are shorter than those of the step are filled at their end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from training.steps import ThreadTrainer, same, shard, states, write_step

from onnxpar.base.errors import InputError
from onnxpar.cli.command_line import main
from onnxpar.runtime.session.bundle import NodeArg
from onnxpar.trainer.data import Data, Rest
from onnxpar.trainer.loop import Run, records

Array = np.ndarray[Any, Any]
WORDS = """words (int64[4,6] ids, float[4,6] mask, float[10,5] w1, float[5,7] w2)
=> (float[4,6,7] y) { axis = Constant<value_ints = [2]>()  h = Gather(w1, ids)
m = Unsqueeze(mask, axis)  k = Mul(h, m)  y = MatMul(k, w2) }"""
PAD = {"ids": 9.0, "mask": 0.0}
LENGTHS = [6, 2, 1, 5, 3, 6, 4, 4, 2, 1, 3]


def texts() -> list[dict[str, Array]]:
    """11 texts: their tokens, a mask, and labels of which one does not count."""
    draw = np.random.default_rng(8)
    found = []
    for length in LENGTHS:
        labels = draw.integers(0, 7, length)
        labels[length // 2 :][length > 4 :][:1] = -100
        mask = np.ones(length, np.float32)
        found.append({"ids": draw.integers(0, 9, length), "mask": mask, "labels": labels})
    return found


def filled() -> dict[str, Array]:
    """The same with all of the length of the step."""
    ids, mask = np.full((11, 6), 9), np.zeros((11, 6), np.float32)
    labels = np.full((11, 6), -100)
    for i, text in enumerate(texts()):
        size = LENGTHS[i]
        ids[i, :size], mask[i, :size], labels[i, :size] = text.values()
    return {"ids": ids, "mask": mask, "labels": labels}


def as_samples(folder: Path) -> Any:
    return texts()


def as_lists_of_numbers(folder: Path) -> Any:
    return [{name: array.tolist() for name, array in text.items()} for text in texts()]


def as_batches(folder: Path) -> Any:
    """Of which each is as long as its longest text, as loaders that fill them make them."""
    whole = filled()
    cut = [(at, max(LENGTHS[at : at + 3])) for at in range(0, 11, 3)]
    return [{n: a[at : at + 3, :size] for n, a in whole.items()} for at, size in cut]


def as_batches_of_lists(folder: Path) -> Any:
    return [
        {name: [text[name].tolist() for text in texts()[at : at + 5]] for name in texts()[0]}
        for at in range(0, 11, 5)
    ]


def as_columns_of_lists(folder: Path) -> Any:
    return {name: [text[name] for text in texts()] for name in texts()[0]}


def as_arrays_of_objects(folder: Path) -> Any:
    found = {}
    for name, column in as_columns_of_lists(folder).items():
        found[name] = np.empty(11, object)
        found[name][:] = column
    return found


def as_parquet(folder: Path) -> Any:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    file = folder / "texts.parquet"
    pq.write_table(pa.Table.from_pylist(as_lists_of_numbers(folder)), file, row_group_size=5)
    return file


def as_short_npy(folder: Path) -> Any:
    """The texts of up to four tokens are in files of their own, without what fills the rest."""
    for name, array in filled().items():
        (folder / name).mkdir()
        is_short = np.array(LENGTHS) <= 4
        np.save(folder / name / "a.npy", array[~is_short])
        np.save(folder / name / "b.npy", array[is_short][:, :4])
    return folder


GIVEN = [
    *(as_samples, as_lists_of_numbers, as_batches, as_batches_of_lists),
    *(as_columns_of_lists, as_arrays_of_objects, as_parquet, as_short_npy),
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: Any) -> Path:
    folder: Path = tmp_path_factory.mktemp("m")
    par, _ = shard(write_step(WORDS, folder, optimizer="adam"), "data-parallel 2")
    par.rename(folder / "step.par")
    return folder


def losses(data: Data, trainer: ThreadTrainer) -> list[float]:
    run = Run(2, 0.05, shuffle=False)
    return [record.values["loss"] for record in records(trainer, data, run)]


@pytest.mark.parametrize("given", GIVEN)
def test_short_samples(given: Callable[[Path], Any], made: Path, tmp_path: Path) -> None:
    """Are those that a user fills."""
    wanted = filled()
    if given is as_short_npy:  # which comes in another order
        order = np.argsort(np.array(LENGTHS) <= 4, kind="stable")
        wanted = {name: array[order] for name, array in wanted.items()}
    with ThreadTrainer(made / "step.par") as trainer:
        told = losses(trainer.batches_of(wanted), trainer)
        left = states(trainer)
    with ThreadTrainer(made / "step.par") as trainer:
        data = trainer.batches_of(given(tmp_path), pad=PAD)
        whole = trainer.batches_of(wanted)
        for found, batch in zip(data.epoch(0, None), whole.epoch(0, None), strict=True):
            same(found, batch)
        assert losses(data, trainer) == told
        same(states(trainer), left)


def test_what_fills_a_sample_does_not_count(made: Path) -> None:
    """The loss is that of the tokens alone, in float64."""
    with ThreadTrainer(made / "step.par") as trainer:
        w1, w2 = (trainer.session.states.read(n).astype(np.float64) for n in ("w1", "w2"))
        each = []
        for text in texts()[:4]:
            scores = w1[text["ids"]] @ w2
            counts = text["labels"] != -100
            logs = scores - np.log(np.exp(scores).sum(1, keepdims=True))
            each += list(-logs[counts, text["labels"][counts]])
        batch = next(trainer.batches_of(texts(), pad=PAD).epoch(0, None))
        assert trainer.step(batch, 0.1)["loss"] == pytest.approx(np.mean(each), rel=1e-6)
        assert (batch["labels"] != -100).sum() == len(each)


def test_torch_fills_as_much() -> None:
    torch = pytest.importorskip("torch")
    ports = [NodeArg("ids", "tensor(int64)", [11, 6])]
    (batch,) = Data.of(
        {"ids": [text["ids"] for text in texts()]}, ports, {"ids": 0}, pad={"ids": 9}
    ).epoch(0, None)
    each = [torch.from_numpy(text["ids"]) for text in texts()]
    wanted = torch.nn.utils.rnn.pad_sequence(each, batch_first=True, padding_value=9)
    np.testing.assert_array_equal(batch["ids"], wanted.numpy())


def test_several_dimensions(tmp_path: Path) -> None:
    """Also where another one numbers the samples, and a list has the lists of a row."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    ports = [NodeArg("x", "tensor(float)", [3, 2, 4]), NodeArg("n", "tensor(int32)", [2])]
    dims = {"x": 1, "n": 0}
    sizes = [(3, 4), (1, 2), (2, 3), (0, 0), (3, 1)]
    draw = np.random.default_rng(1)
    samples = [{"x": draw.random(size, np.float32), "n": i} for i, size in enumerate(sizes)]
    wanted = np.full((3, 5, 4), 0.5, np.float32)
    for i, (rows, columns) in enumerate(sizes):
        wanted[:rows, i, :columns] = samples[i]["x"]
    lists = [{"x": s["x"].tolist(), "n": s["n"]} for s in samples]
    pq.write_table(pa.Table.from_pylist(lists), tmp_path / "x.parquet")
    for given in (samples, tmp_path / "x.parquet"):
        data = Data.of(given, ports, dims, Rest(None, "counts"), {"x": 0.5})
        found = list(data.epoch(0, None))
        whole = np.concatenate([batch["x"] for batch in found], 1)
        np.testing.assert_array_equal(whole[:, :5], wanted)
        np.testing.assert_array_equal(np.concatenate([b["n"] for b in found])[:5], range(5))
        assert all(batch["x"].dtype == np.float32 for batch in found)


@pytest.mark.parametrize(
    ("pad", "message"),
    [
        ({"mask": 0.0}, "sample 1 of the data: the array 'ids' has the shape .*--pad ids=VALUE"),
        ({"idz": 0.0}, "--pad idz=0: the inputs whose samples have a length are ids, mask, labels"),
        ({"ids": 0.5}, "--pad ids=0.5 has numbers that int64 cannot hold"),
    ],
)
def test_what_cannot_be_filled(pad: dict[str, float], message: str, made: Path) -> None:
    with ThreadTrainer(made / "step.par") as trainer, pytest.raises(InputError, match=message):
        list(trainer.batches_of(texts(), pad=pad).epoch(0, None))


def test_longer_samples(made: Path) -> None:
    longer = [*texts(), {n: np.resize(array, 7) for n, array in texts()[0].items()}]
    with ThreadTrainer(made / "step.par") as trainer:
        message = r"sample 11 of the data: the array 'ids' has the shape \[1, 7\]; the step needs "
        with pytest.raises(InputError, match=message + r"\[samples, 6\]$"):
            list(trainer.batches_of(longer, pad=PAD).epoch(0, None))


def test_the_command(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Over files, with a checkpoint in the middle of an epoch."""
    file = as_parquet(tmp_path)
    how = ["train", str(made / "step.par"), "--data", str(file), "--eval", str(file), "--lr", "0.1"]
    how += ["--checkpoint", str(tmp_path / "c"), "--log-dir", str(tmp_path / "log")]
    pads = ["--pad", "ids=9", "--pad", "mask=0"]
    assert main([*how, *pads[:2]]) == 2
    error = capsys.readouterr().err
    assert "texts.parquet: the column 'mask' has a list of" in error and "--pad mask=VAL" in error
    assert not list(tmp_path.glob("c/step*"))
    assert main([*how, *pads, "--max-steps", "4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("epoch: 2 evaluation: loss is") for line in lines) == 1
    assert lines[-1] == f"the last checkpoint is {tmp_path / 'c' / 'step_00000004'}"
    assert main([*how, *pads, "--epochs", "2", "--resume"]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("epoch: 2 step: 2, loss is") and first.endswith("(step 5 of the run)")
    other = ["--pad", "ids=8", "--pad", "mask=0"]
    assert main([*how, *other, "--epochs", "3", "--resume"]) == 2
    assert "data of digest" in capsys.readouterr().err


BATCH_NORM = """norm (float[4,2,6] x, float[2] w1, float[2] w2, float[2] w3, float[2] w4)
=> (float[4,2,6] y) { y, m, v = BatchNormalization<training_mode = 1>(x, w1, w2, w3, w4) }"""


def test_labels_of_a_step_that_needs_full_batches(tmp_path: Path) -> None:
    """Are filled like those of any other."""
    step = write_step(BATCH_NORM, tmp_path, class_axis=1, batch_norm="biased")
    par, _ = shard(step, "data-parallel 2")
    x = np.zeros((9, 2, 6), np.float32)
    with ThreadTrainer(par) as trainer:
        assert trainer.spec.full_batches
        data = trainer.batches_of({"x": x, "labels": np.ones((9, 4), int)})
        assert data.left_out() == (
            "each epoch uses 8 of 9 samples, in 2 batches of 4; the other 1 do not fill a batch"
        )
        for batch in data.epoch(0, None):
            np.testing.assert_array_equal(batch["labels"], [[1] * 4 + [-100] * 2] * 4)


def test_lists_in_memory_name_the_sample() -> None:
    ports = [NodeArg("ids", "tensor(int64)", [4, 6])]
    message = r"data: sample 2: the array 'ids' has the shape \[1, 7\]; the step needs"
    with pytest.raises(InputError, match=message):
        Data.of({"ids": [[1] * 6, [1] * 6, [1] * 7]}, ports, {"ids": 0})
