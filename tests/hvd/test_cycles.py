"""Cycles: what ranks have started runs in the order of the calls, fused, with the results of
separate calls; join; and the search for the best threshold and cycle time."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxpar import hvd
from onnxpar.base.errors import InputError, RankError
from onnxpar.hvd.autotune import MEBIBYTE, Autotune, gaussian_process
from onnxpar.hvd.communicator import current
from onnxpar.hvd.cycles import Cycles

pytestmark = pytest.mark.usefixtures("medium")

Array = np.ndarray


def draw(rank: int, *shape: int) -> Array:
    return np.random.default_rng([rank, *shape]).standard_normal(shape)


def cycles() -> Cycles:
    found = current().cycles
    assert found is not None
    return found


def every_call() -> list[Any]:
    """The results of all kinds of calls, some of them in the background."""
    x, y = draw(hvd.rank(), 4, 3), draw(hvd.rank(), 7).astype("f4")
    begun = [hvd.allreduce_async(x * i, name=f"x{i}") for i in range(5)]
    begun += [hvd.allreduce_async(y, name="y", op=hvd.Max, prescale_factor=0.5)]
    begun += [hvd.allgather_async(x, name="rows"), hvd.allreduce_async(y, name="z", op=hvd.Sum)]
    grouped = hvd.grouped_allreduce_async([x, y, x[0]], name="g")
    own = x.copy()
    assert hvd.allreduce_(own, name="own", op=hvd.Sum) is own
    adasum = hvd.grouped_allreduce([x, x[1]], op=hvd.Adasum)
    half = hvd.allreduce(x, compression=hvd.Compression.fp16, name="half")
    params = {"w": np.ones((4, 3)), "b": np.ones(7, "f4")}
    optimizer = hvd.DistributedOptimizer(hvd.SGD(0.5), gc_type="bfloat16")
    optimizer.step(params, {"w": x, "b": y})
    hvd.barrier()
    results = [hvd.synchronize(handle) for handle in begun]
    state = hvd.broadcast_object({"a": 1}, 1)
    return [*results, *hvd.synchronize(grouped), own, *adasum, half, *params.values(), state]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("milliseconds", [0.0, 5.0])
def test_the_results_are_those_without_cycles(ranks: int, milliseconds: float) -> None:
    def body() -> list[Any]:
        hvd.init(cycle_time_ms=milliseconds)
        found = every_call()
        assert cycles().count > 0
        return found

    expected = hvd.run_on_threads(every_call, ranks)
    for found, wanted in zip(hvd.run_on_threads(body, ranks), expected, strict=True):
        for one, other in zip(found, wanted, strict=True):
            if isinstance(one, Array):
                assert one.dtype == other.dtype and one.tobytes() == other.tobytes()
            else:
                assert one == other


@pytest.mark.matrix
@pytest.mark.parametrize("threshold,buffers", [(str(1 << 20), 2), ("800", 5), ("0", 10)])
def test_allreduces_of_a_cycle_share_buffers(
    threshold: str, buffers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten arrays of 400 bytes, of two dtypes, begun at once."""
    monkeypatch.setenv("HOROVOD_FUSION_THRESHOLD", threshold)
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "200")

    def body() -> int:
        hvd.init()
        hvd.barrier()
        arrays = [np.ones(100, "f4") for _ in range(8)] + [np.ones(50) for _ in range(2)]
        assert hvd.grouped_allreduce(arrays)[0].tolist() == [1.0] * 100
        return cycles().buffers

    assert hvd.run_on_threads(body, 2) == [buffers] * 2


def test_a_slow_rank_gets_what_it_has_started() -> None:
    """The other has started more; what only it has started waits."""

    def body() -> list[float]:
        hvd.init(cycle_time_ms=1)
        handles = []
        for index in range(30):
            handles.append(hvd.allreduce_async(np.float64(index), name=str(index), op=hvd.Sum))
            time.sleep(0.002 * hvd.rank())
        return [float(hvd.synchronize(handle)) for handle in handles]

    assert hvd.run_on_threads(body, 2) == [[2.0 * i for i in range(30)]] * 2


def test_ranks_that_start_different_things() -> None:
    def body() -> str:
        hvd.init(cycle_time_ms=1)
        with pytest.raises(RankError, match="the ranks disagree") as raised:
            hvd.allreduce(np.ones(2 + hvd.rank()), name="w")
        with pytest.raises(RankError):
            hvd.barrier()
        return str(raised.value)

    for message in hvd.run_on_threads(body, 2, timeout=20):
        assert '["w", "float64", [2], "AVERAGE", 1.0, 1.0]' in message
        assert '["w", "float64", [3], "AVERAGE", 1.0, 1.0]' in message


def test_a_rank_that_leaves_is_an_error_on_the_others() -> None:
    def body() -> str:
        hvd.init(cycle_time_ms=1)
        hvd.barrier()
        if hvd.rank() == 1:
            return ""
        with pytest.raises(RankError) as raised:
            hvd.allreduce(np.ones(2), name="w")
        return str(raised.value)

    assert "rank 1" in hvd.run_on_threads(body, 2, timeout=20)[0]


@pytest.mark.parametrize("ranks", [1, 3])
def test_ranks_with_more_data_go_on_with_those_that_have_joined(ranks: int) -> None:
    """As in Horovod: a rank that has joined adds zeros, and averages divide by all ranks."""

    def batches(rank: int) -> int:
        return 2 + 3 * ((rank + 1) % ranks)  # rank 0 has 5 of 3 ranks, rank 1 has 8, rank 2 has 2

    def body() -> tuple[list[float], list[float], int]:
        hvd.init(cycle_time_ms=0.5)
        rank = hvd.rank()
        params, optimizer = {"w": np.zeros(2)}, hvd.DistributedOptimizer(hvd.SGD(1.0))
        sums = []
        for batch in range(batches(rank)):
            optimizer.step(params, {"w": np.full(2, 1.0 + batch + rank)})
            sums.append(float(hvd.allreduce(np.float64(1), op=hvd.Sum, name=f"sum {batch}")))
        last = hvd.join()
        after = hvd.allreduce(np.float64(rank), op=hvd.Sum)  # all go on
        assert float(after) == sum(range(ranks))
        return params["w"].tolist(), sums, last

    found = hvd.run_on_threads(body, ranks)
    steps = max(batches(rank) for rank in range(ranks))
    for rank, (params, sums, last) in enumerate(found):
        there = [[r for r in range(ranks) if batches(r) > b] for b in range(batches(rank))]
        assert sums == [len(each) for each in there]
        moved = sum(sum(1.0 + b + r for r in each) / ranks for b, each in enumerate(there))
        assert params == pytest.approx([-moved] * 2)
        assert batches(last) == steps


def test_joined_ranks_can_only_reduce() -> None:
    def body() -> str:
        hvd.init(cycle_time_ms=0.5)
        message = ""
        if hvd.rank() == 0:
            time.sleep(0.05)
            assert hvd.allreduce(np.ones(2, "f4"), op=hvd.Max).tolist() == [1.0, 1.0]
            half = hvd.allreduce(np.ones(2), compression=hvd.Compression.bf16, op=hvd.Sum)
            assert half.tolist() == [1.0, 1.0]
            with pytest.raises(InputError) as raised:
                hvd.allgather(np.ones(2), name="rows")
            message = str(raised.value)
        assert hvd.join() == 0
        return message

    message = hvd.run_on_threads(body, 2)[0]
    assert message == "ALLGATHER 'rows': ranks have joined, which can only reduce: 1"


def test_what_needs_cycles_or_excludes_them() -> None:
    def body() -> None:
        pair = hvd.add_process_set([0])
        with pytest.raises(InputError, match="join needs cycles: set HOROVOD_CYCLE_TIME"):
            hvd.join()
        with pytest.raises(InputError, match="cycle_time_ms=-1 must be a number of at least 0"):
            hvd.init(cycle_time_ms=-1)
        hvd.init(cycle_time_ms=0)
        with pytest.raises(InputError, match="process sets have no cycles"):
            hvd.allreduce(np.ones(2), process_set=pair)

    hvd.run_on_threads(body, 2)


def speed(threshold: float, milliseconds: float) -> float:
    """Fastest at 40 MiB and 20 ms."""
    return 100 - (threshold / MEBIBYTE - 40) ** 2 / 40 - (milliseconds - 20) ** 2 / 60


def test_autotuning_finds_the_fastest_values(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    tune = Autotune(log, warmup_samples=1, steps_per_sample=2, max_samples=25, noise=0.1)
    knobs, calls = (64.0 * MEBIBYTE, 1.0), 0
    while tune.active:
        sent = round(1e6 * speed(*knobs))
        knobs = tune.record(sent, 1.0 - knobs[1] / 1000, knobs)
        calls += 1
    assert calls == 2 * 5 * 26
    assert tune.record(1, 1.0, knobs) == knobs
    rows = [[float(x) for x in row.split(",")] for row in log.read_text().splitlines()[1:]]
    assert log.read_text().startswith("cycle_time_ms,tensor_fusion_threshold,score\n")
    assert rows[0][:2] == [1.0, 64.0] and rows[1][:2] == [5.0, 4.0]  # Horovod's first points
    assert len(rows) == 26 and rows[-1] == max(rows[:-1], key=lambda row: row[2])
    assert speed(*knobs) > 97 and speed(*knobs) > max(row[2] for row in rows[:5]) / 1e6


def test_a_gaussian_process_passes_through_what_is_known() -> None:
    known = np.array([[0.1, 0.1], [0.5, 0.5], [0.9, 0.2]])
    values = np.array([1.0, -1.0, 0.5])
    mean, deviation = gaussian_process(known, values, known, 1e-4)
    np.testing.assert_allclose(mean, values, atol=1e-6)
    assert (deviation < 1e-3).all()
    far, unsure = gaussian_process(known, values, np.array([[50.0, 50.0]]), 1e-4)
    assert abs(far[0]) < 1e-9 and abs(unsure[0] - 1) < 1e-9


def test_ranks_take_the_values_of_rank_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log.csv"
    for name, value in [
        ("", "1"),
        ("_LOG", str(log)),
        ("_WARMUP_SAMPLES", "0"),
        ("_STEPS_PER_SAMPLE", "1"),
        ("_BAYES_OPT_MAX_SAMPLES", "3"),
    ]:
        monkeypatch.setenv(f"HOROVOD_AUTOTUNE{name}", value)

    def body() -> tuple[float, float]:
        hvd.init()
        for step in range(16):
            hvd.allreduce(np.ones(1000), name=f"step {step}")
        hvd.barrier()
        return cycles().knobs

    first, second = hvd.run_on_threads(body, 2)
    assert first == second
    rows = [tuple(map(float, r.split(",")))[:2] for r in log.read_text().splitlines()[1:]]
    assert rows[:3] == [(1.0, 64.0), (5.0, 4.0), (50.0, 32.0)]
    assert rows[3] in rows[:3] and (first[1], first[0] / MEBIBYTE) == rows[3]


def test_a_timeline_of_cycles(tmp_path: Path) -> None:
    file = tmp_path / "timeline.json"

    def body() -> None:
        hvd.init(cycle_time_ms=5)
        hvd.start_timeline(str(file), mark_cycles=True)
        hvd.grouped_allreduce([np.ones(2), np.ones(3)], name="g")
        hvd.allgather(np.ones(2), name="rows")
        hvd.stop_timeline()

    hvd.run_on_threads(body, 2)
    events = json.loads(file.read_text())
    about = [e for e in events if e["name"] == "process_name" and e["pid"]]
    of = {
        each["args"]["name"]: [
            e["name"] for e in events if e["pid"] == each["pid"] and e["ph"] == "B"
        ]
        for each in about
    }
    inside = ["QUEUE", "ALLREDUCE", "MEMCPY_IN_FUSION_BUFFER", "GLOO_ALLREDUCE"]
    assert of == {"g.0": inside, "g.1": inside, "rows": ["QUEUE", "ALLGATHER"]}
    for each in about:
        phases = [e["ph"] for e in events if e["pid"] == each["pid"] and "ts" in e]
        assert phases.count("B") == phases.count("E")
    assert any(e["name"] == "CYCLE_START" for e in events)


def test_numbers_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    def body() -> None:
        monkeypatch.setenv("HOROVOD_CYCLE_TIME", "soon")
        with pytest.raises(InputError, match="HOROVOD_CYCLE_TIME='soon' must be a number"):
            hvd.init()
        monkeypatch.delenv("HOROVOD_CYCLE_TIME")

    hvd.run_on_threads(body, 1)
