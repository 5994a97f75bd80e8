"""Training data from a program: sequences of samples, iterables of samples or batches."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from training.steps import MLP, ThreadTrainer, same, shard, states, write_step

from onnxpar.base.errors import InputError
from onnxpar.runtime.session.bundle import NodeArg
from onnxpar.trainer.checkpoint import Checkpoint
from onnxpar.trainer.data import Data, Rest
from onnxpar.trainer.loop import Record, Run, records
from onnxpar.trainer.rates import Rate, Schedule
from onnxpar.trainer.together import Together

Arrays = dict[str, np.ndarray[Any, Any]]
PORTS = [NodeArg("x", "tensor(float)", [8, 6]), NodeArg("labels", "tensor(int64)", [8])]
DIMS = {"x": 0, "labels": 0}


def arrays(count: int = 21) -> Arrays:
    draw = np.random.default_rng(4)
    x = draw.standard_normal((count, 6)).astype(np.float32)
    return {"x": x, "labels": draw.integers(0, 5, count)}


def samples() -> list[dict[str, Any]]:
    given = arrays()
    return [{name: array[i] for name, array in given.items()} for i in range(21)]


def in_lists() -> list[dict[str, Any]]:
    """Of Python's numbers, as JSON has them, with more than the step reads."""
    return [
        {"x": each["x"].tolist(), "labels": int(each["labels"]), "text": f"sample {i}"}
        for i, each in enumerate(samples())
    ]


def in_a_dataset() -> Any:
    return pytest.importorskip("datasets").Dataset.from_list(in_lists())


def in_a_torch_dataset() -> Any:
    torch = pytest.importorskip("torch")

    class Samples(torch.utils.data.Dataset):  # type: ignore[misc, name-defined]
        def __len__(self) -> int:
            return 21

        def __getitem__(self, i: int) -> dict[str, Any]:
            return {name: torch.from_numpy(array)[i] for name, array in arrays().items()}

    return Samples()


SEQUENCES = [samples, in_lists, in_a_dataset, in_a_torch_dataset]


def batches(size: int) -> list[Arrays]:
    return [{n: a[i : i + size] for n, a in arrays().items()} for i in range(0, 21, size)]


def one_by_one() -> Any:
    return lambda: iter(in_lists())


def in_batches_of_5() -> Any:
    return lambda: iter(batches(5))


def in_a_batch() -> Any:
    return batches(21)


def in_lists_of_batches() -> Any:
    return [{name: array.tolist() for name, array in batch.items()} for batch in batches(5)]


def in_a_loader() -> Any:
    torch = pytest.importorskip("torch")
    return torch.utils.data.DataLoader(samples(), batch_size=4)


def in_an_iterable_dataset() -> Any:
    torch = pytest.importorskip("torch")

    class Samples(torch.utils.data.IterableDataset):  # type: ignore[misc, name-defined]
        def __len__(self) -> int:
            return 21

        def __iter__(self) -> Iterator[Any]:
            return iter(samples())

    return Samples()


def in_a_streamed_dataset() -> Any:
    return in_a_dataset().to_iterable_dataset(num_shards=3)


STREAMS = [
    *(one_by_one, in_batches_of_5, in_a_batch, in_lists_of_batches),
    *(in_a_loader, in_an_iterable_dataset, in_a_streamed_dataset),
]


@pytest.fixture(scope="module")
def par(tmp_path_factory: Any) -> Path:
    return shard(write_step(MLP, tmp_path_factory.mktemp("m"), optimizer="adam"), "zero1 2")[0]


def train(
    par: Path, data: Any, run: Run, held_out: Any = None, most: int | None = None
) -> tuple[list[Record], Arrays]:
    """The records and the states of a run, or of its first steps."""
    with ThreadTrainer(par) as trainer:
        found = []
        evaluated = None if held_out is None else trainer.batches_of(held_out, trains=False)
        for record in records(trainer, trainer.batches_of(data), run, evaluated):
            found.append(record)
            if record.total == most:
                break
        return found, states(trainer)


def losses(found: list[Record]) -> list[float]:
    return [record.values["loss"] for record in found]


@pytest.fixture(scope="module")
def shuffled(par: Path) -> tuple[list[Record], Arrays]:
    """A run over arrays."""
    return train(par, arrays(), Run(2, 0.05))


@pytest.fixture(scope="module")
def straight(par: Path) -> tuple[list[Record], Arrays]:
    """A run over arrays in their order, with evaluations."""
    return train(par, arrays(), Run(2, 0.05, shuffle=False), arrays())


@pytest.mark.parametrize("make", SEQUENCES)
def test_samples_that_have_numbers(
    par: Path, make: Callable[[], Any], shuffled: tuple[list[Record], Arrays]
) -> None:
    """Are taken in the order in which those of arrays are."""
    found, left = train(par, make(), Run(2, 0.05))
    assert losses(found) == losses(shuffled[0]) and len(found) == 6
    same(left, shuffled[1])


@pytest.mark.parametrize("make", STREAMS)
def test_samples_as_they_come(
    par: Path, make: Callable[[], Any], straight: tuple[list[Record], Arrays]
) -> None:
    """In batches of the step's size, whatever sizes they come in, for training and evaluation."""
    found, left = train(par, make(), Run(2, 0.05), make())
    assert losses(found) == losses(straight[0])
    told = [
        [(r.epoch, r.step, r.total, r.evaluation) for r in each] for each in (found, straight[0])
    ]
    assert told[0] == told[1]
    same(left, straight[1])


def test_an_epoch_is_told_its_number(par: Path) -> None:
    """As by the samplers of PyTorch, whose order depends on it."""
    told = []

    class Loader:
        def set_epoch(self, number: int) -> None:
            told.append(number)

        def __iter__(self) -> Iterator[Any]:
            return iter(batches(7))

    train(par, Loader(), Run(3, 0.05))
    assert told == [0, 1, 2]


@pytest.mark.matrix(2)
@pytest.mark.parametrize("kind", ["linear", "cosine", "polynomial", "wsd"])
def test_schedules_that_need_the_number_of_steps(par: Path, kind: str) -> None:
    schedule = Schedule(kind, decay_steps=2 if kind == "wsd" else None)
    with pytest.raises(InputError, match=f"--schedule {kind}: it depends on .*--max-steps"):
        train(par, one_by_one(), Run(2, 0.05, schedule))
    found, _ = train(par, one_by_one(), Run(None, 0.05, schedule, max_steps=5))
    rate = Rate(0.05, 5, schedule)
    assert [r.rate for r in found] == [rate.at(step) for step in range(5)]


@pytest.mark.parametrize("kind", ["constant", "inverse-sqrt", "step"])
def test_schedules_that_need_no_number_of_steps(par: Path, kind: str) -> None:
    schedule = Schedule(kind, warmup=2, step_size=3 if kind == "step" else None)
    wanted, _ = train(par, arrays(), Run(2, 0.05, schedule, shuffle=False))
    found, _ = train(par, one_by_one(), Run(2, 0.05, schedule))
    assert [r.rate for r in found] == [r.rate for r in wanted]


@pytest.mark.parametrize(("epochs", "most", "steps"), [(None, 4, 4), (3, 4, 4), (1, 4, 3)])
def test_the_number_of_steps_of_a_run(
    par: Path, epochs: int | None, most: int, steps: int, tmp_path: Path
) -> None:
    """An evaluation also follows the last step, in the middle of an epoch."""
    for data in (arrays(), one_by_one()):
        found, _ = train(par, data, Run(epochs, 0.05, max_steps=most), arrays(8))
        assert [(r.epoch, r.step) for r in found] == [(1, 1), (1, 2), (1, 3), (2, 1)][:steps]
        assert [r.total for r in found if r.evaluation] == [3, 4][: steps - 2]


def test_an_epoch_without_end(par: Path, straight: tuple[list[Record], Arrays]) -> None:
    found, _ = train(par, lambda: cycle(samples()), Run(None, 0.05, max_steps=5), arrays())
    assert losses(found)[:2] == losses(straight[0])[:2]
    assert [bool(r.evaluation) for r in found] == [False] * 4 + [True]


def test_a_run_with_steps_goes_on(
    par: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, left = train(par, arrays(), Run(None, 0.05, max_steps=8))
    how: dict[str, Any] = {"checkpoint": tmp_path / "c", "resume": True}
    for most in (2, 5, 8):
        found, states_then = train(par, arrays(), Run(None, 0.05, max_steps=most, **how))
        assert losses(found) == losses(whole)[found[0].total - 1 : most]
    same(states_then, left)
    assert train(par, arrays(), Run(None, 0.05, max_steps=8, **how))[0] == []
    assert "c has taken step 8 of --max-steps 8; raise --max-steps" in capsys.readouterr().err
    decays: dict[str, Any] = {"schedule": Schedule("linear"), "checkpoint": tmp_path / "d"}
    train(par, arrays(), Run(None, 0.05, max_steps=2, **decays))
    with pytest.raises(InputError, match=r"--max-steps 2, now 3; give"):
        train(par, arrays(), Run(None, 0.05, max_steps=3, resume=True, **decays))


@pytest.mark.matrix(3)
@pytest.mark.parametrize("make", [samples, one_by_one, in_batches_of_5])
@pytest.mark.parametrize("after", [1, 2, 3, 4])
def test_a_run_that_goes_on_takes_the_next_samples(
    par: Path,
    make: Callable[[], Any],
    after: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    whole, left = train(par, make(), Run(2, 0.05))
    how: dict[str, Any] = {"checkpoint": tmp_path / "c", "every": 1}
    train(par, make(), Run(2, 0.05, **how), most=after + 1)
    assert Checkpoint.load(tmp_path / "c").progress.step == after
    capsys.readouterr()
    rest, states_then = train(par, make(), Run(2, 0.05, resume=True, **how))
    assert losses(rest) == losses(whole)[after:]
    same(states_then, left)
    taken, epoch = 8 * (after % 3), after // 3 + 1
    told = f"the first {taken} samples of epoch {epoch} are read again and skipped, because"
    assert (told in capsys.readouterr().err) == (make is not samples and taken > 0)


def test_a_run_does_not_go_on_with_fewer_samples(par: Path, tmp_path: Path) -> None:
    train(par, samples(), Run(1, 0.05, checkpoint=tmp_path / "c"))
    again = Run(2, 0.05, checkpoint=tmp_path / "c", resume=True)
    with pytest.raises(InputError, match="21 samples, now 20; give"):
        train(par, samples()[:20], again)
    with pytest.raises(InputError, match="21 samples, now not given; give"):
        train(par, one_by_one(), again)


def test_samples_of_other_kinds(par: Path) -> None:
    x, labels = samples()[0].values()
    given: list[tuple[Any, str]] = [
        (iter(samples()), r"a list_iterator, which can be read only once; give the function that"),
        (7, r"data is a int; give a path, arrays by input name, or an iterable of dicts"),
        ([], r"data has no samples; its length is 0"),
        (
            np.zeros((9, 6)),
            r"sample 0 of the data is a ndarray; give a dict of arrays .*: x, labels",
        ),
        ([(x, labels)], r"sample 0 of the data is a tuple; give a dict of arrays by input name"),
        ([{"x": x}], r"sample 0 of the data has no array for the input 'labels'; its arrays: x"),
        (lambda: iter([{"x": x}]), r"item 0 of the data has no array for the input 'labels'"),
        (lambda: iter(()), r"epoch 1 of the data has no batch; give an iterable that each epoch"),
        ([*samples()[:9], {"x": x[:5], "labels": labels}], r"sample 9 of the data: the array 'x' "),
        ([*samples()[:9], {"x": x}], r"sample 9 of the data has no array for the input 'labels'"),
        ([{"x": list("abcdef"), "labels": 1}] * 9, r"sample \d of the data: 'x' has the type str"),
        ([{"x": [1, 2, [3]], "labels": 1}] * 9, r"sample \d of the data: 'x' is no array: "),
        ([{"x": [0] * 6, "labels": 1.5}] * 9, r"'labels' has numbers that int64 cannot hold"),
        ([{"x": x, "labels": 7}] * 9, r"input 'labels': label 7 at \[0\] is none of the 5"),
        (lambda: iter([{"x": np.zeros((9, 6)), "labels": np.zeros(8, int)}]), "equal numbers"),
    ]
    with ThreadTrainer(par) as trainer:
        for data, message in given:
            with pytest.raises(InputError, match=message):
                list(records(trainer, trainer.batches_of(data), Run(1, 0.05, shuffle=False)))


def test_an_iterable_that_is_empty_the_second_time(par: Path) -> None:
    with pytest.raises(InputError, match="--eval: the data has no batch; give an iterable with"):
        train(par, samples(), Run(1, 0.05), lambda: iter(()))
    once = iter(samples())
    with pytest.raises(InputError, match="epoch 2 of the data has no batch; give an iterable that"):
        train(par, lambda: once, Run(2, 0.05))


@pytest.mark.parametrize("make", [arrays, samples, one_by_one])
def test_ranks_that_are_given_other_samples(par: Path, make: Callable[[], Any]) -> None:
    """Of a launcher: here, the second one always says what the first does, until it does not."""
    told = 0

    def exchange(payload: bytes) -> list[bytes]:
        nonlocal told
        told += 1
        return [payload, payload if told < last else json.dumps("other").encode()]

    with ThreadTrainer(par) as trainer:
        trainer.together = Together(0, 2, exchange)
        for last in (1, 2, 5, 6):
            told = 0
            run = records(trainer, trainer.batches_of(make()), Run(1, 0.05))
            # They compare a digest; or that there is none, three batches, and the end.
            if last > (1 if make is arrays else 5):
                list(run)
                continue
            with pytest.raises(InputError, match="rank 1 reads other samples than rank 0; give ev"):
                list(run)


def test_in_memory_the_dtype_of_arrays_stays() -> None:
    """Ranks then say that it is another one, with the remedy; only lists have none."""
    given = arrays() | {"x": arrays()["x"].astype(np.float64)}
    (first, *_) = Data.of(given, PORTS, DIMS, rest=Rest("labels", None)).epoch(0, None)
    assert first["x"].dtype == np.float64
    lists = {name: array.tolist() for name, array in given.items()}
    (first, *_) = Data.of(lists, PORTS, DIMS, rest=Rest("labels", None)).epoch(0, None)
    assert first["x"].dtype == np.float32
