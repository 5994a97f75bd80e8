"""onnxpar calibrate: what it runs, what it concludes, and the file that it writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import onnx_graphsurgeon as gs
import onnxruntime as ort
import pytest
from native.ranks import on_ranks, session
from onnx import numpy_helper, shape_inference

from onnxpar.base.errors import RankError
from onnxpar.cli.command_line import main
from onnxpar.cost import calibration_models as models
from onnxpar.cost.cost import messages
from onnxpar.cost.fit import (
    FASTEST,
    channels_at_once,
    explained_seconds,
    fit,
    fit_link,
    lines,
    predict_seconds,
    rows_and_elements,
    with_cache,
    with_exposed,
)
from onnxpar.cost.measure import (
    COPIED,
    LARGE,
    MEASURED,
    MIDDLE,
    NEAR,
    SIZES,
    CollectiveTime,
    Effort,
    Measurements,
    Work,
    cases,
    group_sizes,
    measure,
)
from onnxpar.cost.topology import Device, Topology
from onnxpar.runtime.ranks.groups import World, thread_worlds
from onnxpar.search.rated_ops import rated_as, work_of


def took(kind: str, ranks: int, size: int, latency: float, bandwidth: float) -> CollectiveTime:
    rounds, sent = messages(kind, ranks, size)
    return CollectiveTime(kind, ranks, size, rounds * latency + sent / bandwidth)


MILLISECONDS = {kind: (1e-3,) * len(shapes) for kind, shapes in models.RATED.items()}
NARROW = (1e-4, 1.1e-4, 1e-4, 2e-4, 4e-4)
"""Seconds of convolutions that compute 16 channels at once."""


@pytest.mark.parametrize(
    "seconds,channels",
    [
        (NARROW, 16),
        ((1e-4, 1.05e-4, 2e-4, 4e-4, 8e-4), 8),
        ((1e-4, 1e-4, 1e-4, 1e-4, 2e-4), 32),
        ((1e-4, 1.9e-4, 4e-4, 7e-4, 16e-4), None),
    ],
)
def test_how_many_channels_are_computed_at_once(
    seconds: tuple[float, ...], channels: int | None
) -> None:
    assert channels_at_once(seconds) == channels


RATES = {
    "Softmax": (6e-8, 2e-9),
    "LayerNormalization": (2e-8, 5e-10),
    "Erf": (0.0, 5e-10),
    "Transpose": (5e-9, 2e-10),
    "MatMul": (1e-7, 5e-11),
}
"""Seconds of a row and of an element, by kind of op."""


def test_a_machine_without_a_fast_cache_has_none() -> None:
    device = Device(memory_bandwidth=1e10, launch=1e-6)
    copies = tuple(2 * size / 1e10 + 1e-6 for size in COPIED)
    assert with_cache(device, copies) == device


def test_what_follows_the_formula_is_found_again() -> None:
    links = {kind: (1e-5 * (i + 1), 1e9 * (i + 1)) for i, kind in enumerate(MEASURED)}
    talk = tuple(took(*case[:3], *links[case[0]]) for case in cases(4))
    product = 2 * 256 * 768**2 / 5e10 + 2e-6
    bottleneck = 2 * 28**2 * (256 * 64 + 9 * 64 * 64 + 64 * 256) / 3e10 + 3 * 2e-6
    cache = 1.5e6 / 4e10
    near, middle = 2 * NEAR / 4e10, cache + (2 * MIDDLE - 1.5e6) / 8e9
    copies = near + 2e-6, middle + 2e-6, cache + (2 * LARGE - 1.5e6) / 8e9 + 2e-6
    picks = 65536 * 5e-9 + 2e-6
    device = Device(5e10, 8e9, 2e-6, row=5e-9, cache=1.5e6, cache_bandwidth=4e10)
    rated = {
        kind: tuple(
            explained_seconds(kind, *shape, device)
            + sum(
                n * each
                for n, each in zip(rows_and_elements(kind, *shape), RATES[kind], strict=True)
            )
            for shape in shapes
        )
        for kind, shapes in models.RATED.items()
    }
    few = 4e-4 + 2e-6  # the weight takes 295 us
    work = Work(
        product, few, few + 0.4 * 4 * 768**2 / 8e9, bottleneck, copies, picks, 2e-6, NARROW, rated
    )
    alone = replace(work, product=work.product / 3 + 2e-6 * 2 / 3)
    small, large = 8192, 8 << 20
    runs = ((1, small), (4, small), (4, large))
    session = tuple((n, size, 1e-4 + n * 2e-5 + size / 5e9) for n, size in runs)
    found = fit(Measurements(4, 1, work, alone, session, talk))
    (level,) = found.levels
    assert level.at_once == 4 and found.alone is not None and found.session is not None
    assert found.alone.flops == pytest.approx(3 * found.device.flops, rel=1e-3)
    assert found.alone.convolution == found.device.convolution
    assert found.session.latency == pytest.approx(1e-4, rel=1e-3)
    assert found.session.bandwidth == pytest.approx(5e9, rel=1e-3)
    assert found.session.rank == pytest.approx(2e-5, rel=1e-3)
    for kind, (latency, bandwidth) in links.items():
        assert level.link(kind).latency == pytest.approx(latency, rel=1e-3)
        assert level.link(kind).bandwidth == pytest.approx(bandwidth, rel=1e-3)
    assert 1e-5 < level.latency < 5e-5 and 1e9 < level.bandwidth < 5e9
    plain = replace(found.device, ops={}, memory_bandwidth=0, cache=0, exposed=None)
    assert plain == Device(5e10, 0, 2e-6, None, 3e10, 5e-9, 16, 0, 4e10)
    assert found.device.memory_bandwidth == pytest.approx(8e9, rel=0.05)  # small copies count, too
    assert found.device.cache == pytest.approx(1.5e6, rel=0.05)
    assert found.device.exposed == pytest.approx(0.4, rel=0.05)
    for kind, rate in found.device.ops.items():
        assert (rate.row, rate.element) == pytest.approx(RATES[kind], rel=0.05), kind
    for one in talk:
        assert predict_seconds(one, found) == pytest.approx(one.seconds, rel=1e-3)


@pytest.mark.parametrize(
    "compute,seconds,exposed",
    [
        (1.5e-3, 1.5e-4, 0.0),
        (1.5e-3, 1.9e-3, 0.5),
        (1.5e-3, 1.98e-3, 0.6),
        (1.5e-3, 9e-3, 1.0),
        (0.4e-3, 0.7e-3, 0.0),
        (0.4e-3, 1.0e-3, 0.5),
    ],
)
def test_what_a_product_waits_for(compute: float, seconds: float, exposed: float) -> None:
    """A product's weight takes 0.8 ms from memory."""
    device = Device(memory_bandwidth=4 * 768**2 / 8e-4, launch=1e-6)
    found = with_exposed(device, compute + device.launch, seconds + device.launch)
    assert (found.exposed or 0.0) == pytest.approx(exposed)


def test_small_and_large_count_alike() -> None:
    """What is off by as much in proportion pulls as much: 4 KiB by 10 %, or 4 MiB."""
    talk = [took("AllGather", 2, size, 1e-4, 1e9) for size in SIZES]
    off = [CollectiveTime(t.kind, t.ranks, t.size, t.seconds * (1 + 0.1 * (-1) ** i))
           for i, t in enumerate(talk)]  # fmt: skip
    link = fit_link(off)
    assert link.latency == pytest.approx(1e-4, rel=0.15)
    assert link.bandwidth == pytest.approx(1e9, rel=0.15)


def test_nothing_is_negative() -> None:
    faster_when_large = [
        CollectiveTime("AllGather", 2, 4096, 2e-4),
        CollectiveTime("AllGather", 2, 8192, 1e-4),
    ]
    link = fit_link(faster_when_large)
    assert link.latency > 0 and link.bandwidth == FASTEST
    through_nothing = [
        CollectiveTime("AllGather", 2, 4096, 1e-6),
        CollectiveTime("AllGather", 2, 8192, 5e-6),
    ]
    assert fit_link(through_nothing).latency == 0


def test_which_groups() -> None:
    assert group_sizes(2) == [2]
    assert group_sizes(6) == [2, 4, 6]
    assert group_sizes(8) == [2, 4, 8]


ELEMENTS = {
    "AllReduce": 1,
    "AllGather": 3,
    "ReduceScatter": 1,
    "AllToAll": 1,
    "CollectivePermute": 1,
    "Broadcast": 1,
}
"""What of the largest tensor is fed, over three ranks: one part in so many."""


@pytest.fixture(scope="module")
def three() -> Iterator[list[World]]:
    worlds = thread_worlds(3, timeout=30)
    yield worlds
    for world in worlds:
        world.close()


@pytest.mark.parametrize("kind", MEASURED)
def test_collectives_run_one_after_the_other(kind: str, three: list[World]) -> None:
    size = 3 * 4 * models.COLUMNS * 16

    def run(world: World) -> tuple[int, int]:
        made = models.collective(kind, size, range(3), 5)
        assert [n.op_type for n in made.graph.node] == ["MatMul", "Gate", kind] * 5
        opened = session(world, made.SerializeToString())
        (shape,) = [i.shape for i in opened.get_inputs() if i.name == "X"]
        feeds = {"X": np.zeros(shape, np.float32), "token0": np.zeros(0, np.bool_)}
        feeds["Z0"] = np.zeros(models.BETWEEN, np.float32)
        (token,) = opened.run(None, feeds)
        return int(np.prod(shape)) * 4, token.size

    assert on_ranks(three, run) == [(size // ELEMENTS[kind], 0)] * 3


@pytest.mark.parametrize(
    "make,kind", [(partial(models.products, 16), "MatMul"), (models.rows, "Gather"),
                  (models.work_between, "MatMul"),
                  (lambda turns: models.convolutions(turns // 3), "Conv"),
                  (lambda turns: models.copies(4096, turns), "Neg")],
)  # fmt: skip
def test_ops_are_a_chain(make: Callable[[int], object], kind: str) -> None:
    made = make(6)
    assert [n.op_type for n in made.graph.node] == [kind] * 6 + ["ReduceMax"]
    opened = ort.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"])
    (x,) = opened.get_inputs()
    (y,) = opened.run(None, {x.name: np.zeros(x.shape, np.float32)})
    assert y.shape == ()


def test_weights_from_memory_differ() -> None:
    """A processor or an allocator that finds equal ones would keep one of them in the cache."""
    made = models.products(16, 6, apart=True)
    each = [numpy_helper.to_array(weight).tobytes() for weight in made.graph.initializer]
    assert [n.input[1] for n in made.graph.node[:-1]] == [w.name for w in made.graph.initializer]
    assert len(set(each)) == 6


@pytest.mark.slow
def test_a_file_is_measured_and_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "cluster.yaml"
    assert main(["calibrate", "-o", str(file), "--ranks", "2", "--seconds", "0.01"]) == 0
    said = capsys.readouterr().out.splitlines()
    read = Topology.read(file)
    (level,) = read.levels
    assert level.name == "host" and level.size is None and {*level.collectives} == {*MEASURED}
    assert "".join(f"{line}\n" for line in said).count(read.text()) == 1
    text = file.read_text()
    for kind, ranks, size in cases(2):
        (row,) = [line for line in said if line.split()[:3] == [kind, str(ranks), str(size)]]
        assert f"# {row}\n" in text
    assert said[-1] == f"written to {file}"
    assert [p.name for p in tmp_path.iterdir()] == ["cluster.yaml"]


@pytest.mark.parametrize(
    "arguments,message",
    [
        (["--ranks", "1"], "--ranks 1: calibrate measures links between ranks; give at least 2"),
        (["--seconds", "0"], "--seconds 0.0: must be above 0"),
        (["-o", "nowhere/cluster.yaml"], "nowhere: no such folder"),
    ],
)
def test_what_cannot_be(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", "-o", str(tmp_path / "cluster.yaml"), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_under_a_launcher_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ONNXPAR_RANK", "0")
    monkeypatch.setenv("ONNXPAR_WORLD_SIZE", "1")
    assert main(["calibrate", "-o", str(tmp_path / "cluster.yaml")]) == 2
    assert "calibrate starts its own ranks" in capsys.readouterr().err


def test_a_rank_that_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = models.tiny_ops(2)
    broken.graph.node[0].op_type = "NoSuchOp"
    monkeypatch.setattr("onnxpar.cost.measure._WORK", ((lambda repeats: broken, 2, {}),))
    with pytest.raises(RankError, match=r"a case .*rank \d failed: .*NoSuchOp"):
        measure(2, 0.01)


@pytest.mark.slow
def test_ranks_that_are_left_over_wait() -> None:
    """Of three ranks, two make a pair."""
    found = measure(3, 0.01, effort=Effort((4096,), rounds=1))
    assert [(t.kind, t.ranks) for t in found.collectives] == [
        (k, n) for n in (2, 3) for k in MEASURED
    ]
    assert all(t.seconds > 0 for t in found.collectives)


def test_the_table_has_every_case() -> None:
    talk = tuple(took(*case[:3], 1e-4, 1e9) for case in cases(2))
    work = Work(1e-3, 1e-3, 1e-3, 1e-3, (1e-3,) * 3, 1e-3, 1e-6, NARROW, MILLISECONDS)
    session = ((1, 8192, 8e-5), (2, 8192, 1e-4), (2, 8 << 20, 2e-3))
    found = Measurements(2, 1, work, work, session, talk)
    table = list(lines(found, fit(found)))
    assert sum(line.endswith(("+0%", "-0%")) for line in table) == len(cases(2))


@pytest.mark.parametrize(
    "kind,shape", [(kind, shape) for kind, shapes in models.RATED.items() for shape in shapes]
)
def test_models_of_rated_ops_have_the_work_that_is_counted(
    kind: str, shape: tuple[int, int]
) -> None:
    made = shape_inference.infer_shapes(models.rated(kind, *shape, 3))
    graph = gs.import_onnx(made)
    each = [node for node in graph.nodes if node.op == kind]
    for node in each:
        shapes = [tuple(t.shape) for t in node.inputs]
        assert rated_as(node) == kind
        assert work_of(kind, node, shapes, tuple(node.outputs[0].shape)) == rows_and_elements(
            kind, *shape
        )
    (x,) = made.graph.input
    feeds = {x.name: np.ones([d.dim_value for d in x.type.tensor_type.shape.dim], np.float32)}
    (found,) = ort.InferenceSession(made.SerializeToString()).run(None, feeds)
    assert len(each) == 3 and np.isfinite(found)


def test_tiny_ops_are_of_several_kinds() -> None:
    made = models.tiny_ops(100)
    assert len(made.graph.node) == 101 and len({node.op_type for node in made.graph.node}) > 10
    (found,) = ort.InferenceSession(made.SerializeToString()).run(None, {"X0": np.ones(1, "f")})
    assert found.shape == ()
