"""Costs of a model with open sizes are those of the model at typical sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import onnx
import pytest
from agreement import check_agrees
from committed import MODELS
from decoders import Decoder, build
from small_models import write_text

import onnxpar
from onnxpar.base.errors import StrategyError
from onnxpar.cli.command_line import main
from onnxpar.compiler.plan import Plan
from onnxpar.cost.topology import Topology
from onnxpar.graph.typical import Ties, Typical, typical_sizes
from onnxpar.layout.mesh import Mesh
from onnxpar.layout.symbols import Polynomial
from onnxpar.planner import sharder
from onnxpar.planner.options import Options
from onnxpar.planner.save_strategy import Saver
from onnxpar.report.explain import explain
from onnxpar.search.objective import Objective
from onnxpar.strategy.strategy import Strategy


def planned(name: str, how: Options) -> Plan:
    return sharder.plan(MODELS / f"{name}.onnx", how)[0]


@pytest.mark.slow
def test_typical_sizes_as_text() -> None:
    given = onnxpar.plan(
        MODELS / "gpt2.dynamo.dynamic.onnx", devices=2, typical="batch=4,seq=16", preset="hybrid"
    )
    assert list(given.typical) == [({"batch": 4, "seq": 16}, 1.0)]


def test_parts_are_those_of_typical_sizes(tmp_path: Path) -> None:
    """Rows of three samples of four over two ranks: 8 and 4."""
    text = """<ir_version: 8, opset_import: ["" : 17]> m (float[N,4,6] x) => (float[M,6] y)
    <int64[2] flat = {-1, 6}, int64[6] some = {2, 2, 2, 2, 2, 2}>
    { rows = Reshape(x, flat) y = ReverseSequence<batch_axis = 1, time_axis = 0>(rows, some) }"""
    file = write_text(text, tmp_path / "m.onnx")
    made = onnxpar.plan(file, mesh="dp=2", preset="data-parallel", typical={"N": 3})
    assert [c.before for c in made.collectives] == ["[dp{8,4}, -]"]


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("name", "sizes", "preset"),
    [
        ("gpt2.dynamo.dynamic", {"batch": 4, "seq": 16}, "tensor-parallel"),
        ("bert.legacy.dynamic", {"batch": 4}, "tensor-parallel"),
        ("llama_decode.dynamo.dynamic", {"batch": 2, "past": 12}, "tensor-parallel"),
        ("llama_decode.legacy.dynamic", {"batch": 2, "past": 12}, "tensor-parallel"),
        ("resnet.dynamo.dynamic", {"batch": 4}, "data-parallel"),
    ],
)
def test_costs_are_those_of_fixed_sizes(name: str, sizes: dict[str, int], preset: str) -> None:
    """With `--dim`, sizes are numbers from the beginning: an oracle that knows nothing of typical
    sizes. More is folded there; whatever is a node in both takes the same, and is sent alike."""
    axis = "dp" if preset == "data-parallel" else "tp"
    how = Options(mesh=Mesh.parse(f"{axis}=2"), preset=preset)
    opened = explain(MODELS / f"{name}.onnx", replace(how, typical=Typical.from_argument(sizes)))
    fixed = explain(MODELS / f"{name}.onnx", replace(how, dims=sizes))
    times = {step.name: step.predicted for step in opened.steps}
    both = [step for step in fixed.steps if step.name in times]
    assert len(both) > 0.9 * len(fixed.steps)
    for step in both:
        assert times[step.name].compute == pytest.approx(step.predicted.compute, rel=1e-9)
        assert times[step.name].communication == pytest.approx(
            step.predicted.communication, rel=1e-9
        )
    assert opened.plan.flops == fixed.plan.flops
    told = {(c.kind, c.tensor): c.bytes for c in opened.plan.collectives}
    assert told == {(c.kind, c.tensor): c.bytes for c in fixed.plan.collectives}
    example = opened.plan.example
    assert all(example[name] != size for name, size in sizes.items())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2.dynamo.dynamic", "bert.legacy.dynamic"])
def test_what_caches_hold_is_decided_at_typical_sizes(name: str) -> None:
    """Few nodes differ: what is folded at fixed sizes is not written between others."""
    device = replace(Topology.default().device, cache=2e4, cache_bandwidth=1e11)
    topology = replace(Topology.default(), device=device)
    how = Options(mesh=Mesh.parse("tp=2"), preset="tensor-parallel", topology=topology)
    sizes = {"batch": 4, "seq": 16} if name.startswith("gpt2") else {"batch": 4}
    opened = explain(MODELS / f"{name}.onnx", replace(how, typical=Typical.from_argument(sizes)))
    fixed = explain(MODELS / f"{name}.onnx", replace(how, dims=sizes))
    times = {step.name: step.predicted.compute for step in opened.steps}
    both = [step for step in fixed.steps if step.name in times]
    same = [s for s in both if times[s.name] == pytest.approx(s.predicted.compute, rel=1e-9)]
    assert len(same) > 0.95 * len(both)


@pytest.mark.slow
def test_a_batch_of_one_is_not_worth_a_split() -> None:
    """One of two ranks has all of it, so that both take as long as one; a batch of 64 halves."""
    how = {"devices": 2, "preset": "data-parallel"}
    one, many = (
        planned("gpt2.dynamo.dynamic", Options(typical=Typical.from_argument({"batch": n}), **how))  # type: ignore[arg-type]
        for n in (1, 64)
    )
    assert one.predicted is not None and many.predicted is not None
    assert one.predicted.total >= 0.99 * one.predicted.one_rank
    assert many.predicted.total < 0.6 * many.predicted.one_rank


@pytest.mark.slow
def test_the_search_decides_for_typical_sizes(tmp_path: Path) -> None:
    """Each of two plans is the faster one at its own sizes, and both run at any."""
    name, path = "llama.dynamo.dynamic", MODELS / "llama.dynamo.dynamic.onnx"
    batches, texts = (
        Typical.from_argument({"batch": 64, "seq": 2}),
        Typical.from_argument({"batch": 1, "seq": 64}),
    )
    for own, other in ((batches, texts), (texts, batches)):
        found = planned(name, Options(devices=2, typical=own))
        alien = planned(name, Options(devices=2, typical=other))
        saver = Saver(tmp_path / "other.yaml")
        there, _ = sharder.plan(path, Options(devices=2, typical=other), saver)
        saver.write()
        strategy = Strategy.from_argument(tmp_path / "other.yaml")
        again = planned(name, Options(mesh=there.mesh, strategy=strategy, typical=own))
        assert again.predicted is not None and found.predicted is not None
        assert found.predicted.total < again.predicted.total * (1 - 1e-6)
        assert alien.typical == other.profiles or dict(alien.typical[0][0]) == dict(
            other.profiles[0][0]
        )
        check_agrees(path, tmp_path, Options(devices=2, typical=own, check_layouts=True))


@pytest.mark.slow
def test_several_are_weighed() -> None:
    """Times are means by weight, memory is the most."""
    name, mesh = "llama.dynamo.dynamic", Mesh.parse("tp=2")
    small, large = {"batch": 1, "seq": 4}, {"batch": 8, "seq": 16}

    def at(typical: object) -> Plan:
        given = Typical.from_argument(typical)  # type: ignore[arg-type]
        return planned(name, Options(mesh=mesh, preset="tensor-parallel", typical=given))

    a, b, both = at(small), at(large), at([(small, 3), (large, 1)])
    assert a.predicted and b.predicted and both.predicted
    assert both.predicted.total == pytest.approx(
        0.75 * a.predicted.total + 0.25 * b.predicted.total
    )
    assert both.memory == b.memory
    assert [weight for _, weight in both.typical] == [0.75, 0.25]


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("gpt2.dynamo.dynamic", {"batch": 1, "seq": 16}),  # positions
        ("bert.legacy.dynamic", {"batch": 1, "seq": 16}),
        ("llama_decode.dynamo.dynamic", {"batch": 1, "past": 128}),
        ("dlrm.legacy.dynamic", {"batch": 1}),
    ],
)
def test_by_default(name: str, sizes: dict[str, int], capsys: pytest.CaptureFixture[str]) -> None:
    """A batch of one, and a length of 128 or what a table of positions has; it is written."""
    assert main(["plan", str(MODELS / f"{name}.onnx"), "--devices", "2"]) == 0
    text = ", ".join(f"{key}={size}" for key, size in sizes.items())
    out = capsys.readouterr().out
    other = ",".join(f"{key}={8 if size == 1 else size}" for key, size in sizes.items())
    assert f"sizes are open: costs are for {text}; set others with --typical {other}" in out
    given = ",".join(f"{key}={size}" for key, size in sizes.items())
    assert main(["plan", str(MODELS / f"{name}.onnx"), "--devices", "2", "--typical", given]) == 0
    again = capsys.readouterr().out
    assert again == out.replace(f"; set others with --typical {other}", "")


BEGIN = {
    "texts and images": ({"ids": "s1 16", "pixels": "s2 3", "mask": "s3 16"}, {"s1", "s2", "s3"}),
    "nodes and edges": ({"x": "s1 16", "edges": "2 s2", "weights": "s2 4"}, {"s1"}),
    "a cache": ({"ids": "s1 s2", "past": "s1 s3"}, {"s1"}),
    "a square": ({"x": "s1 s2", "y": "s2 s1"}, {"s1"}),
    "names": ({"x": "batch 16", "y": "s1 16"}, {"batch"}),
}


@pytest.mark.parametrize("case", BEGIN)
def test_what_inputs_begin_with_is_a_batch(case: str) -> None:
    inputs, batch = BEGIN[case]
    dims = {
        (name, axis): Polynomial.variable(size)
        for name, shape in inputs.items()
        for axis, size in enumerate(shape.split())
        if not size.isdigit()
    }
    symbols = sorted({str(size.symbol) for size in dims.values()})
    ((sizes, _),) = typical_sizes(Typical(), symbols, Ties(), dims, [], [lambda _: True])
    assert sizes == {s: 1 if s in batch else 128 for s in symbols}


def test_sizes_that_are_tied() -> None:
    """The mask is as long as past and present; any of them may be given."""
    past, total, seq = (Polynomial.variable(s) for s in ("past", "total", "seq"))
    ties = Ties((("total", past + seq),))
    dims = {("ids", 0): Polynomial.variable("batch"), ("ids", 1): seq, ("mask", 1): past + seq}
    symbols = ("batch", "past", "seq")

    def found(**sizes: int) -> dict[str, int]:
        given = Typical.from_argument(sizes) if sizes else Typical()
        ((at, weight),) = typical_sizes(given, symbols, ties, dims, [], [lambda _: True])
        assert weight == 1.0 and total.variables == ("total",)
        return dict(at)

    assert found() == {"batch": 1, "past": 128, "seq": 128}
    assert found(total=100, seq=1) == {"batch": 1, "past": 99, "seq": 1}
    assert found(total=100, past=60, batch=2) == {"batch": 2, "past": 60, "seq": 40}
    assert found(past=0, seq=7) == {"batch": 1, "past": 0, "seq": 7}
    with pytest.raises(StrategyError, match=r"typical total=9: the model ties total to past . seq"):
        found(total=9, past=5, seq=5)


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("told", "sizes"),
    [
        ({}, {"batch": 1, "past": 32, "seq": 32, "total": 64}),
        ({"past": 40, "seq": 1}, {"batch": 1, "past": 40, "seq": 1, "total": 41}),
        ({"total": 20, "seq": 4}, {"batch": 1, "past": 16, "seq": 4, "total": 20}),
        ({"batch": 3}, {"batch": 3, "past": 32, "seq": 1, "total": 33}),
        ({"batch": 3, "seq": 8}, {"batch": 3, "past": 0, "seq": 8, "total": 8}),
    ],
    ids=str,
)
def test_a_mask_is_as_long_as_past_and_present(
    told: dict[str, int], sizes: dict[str, int], tmp_path: Path
) -> None:
    """No shape says so, but the kernel needs it; its table of angles has 64 rows."""
    onnx.save(build(Decoder("GroupQueryAttention")), tmp_path / "decoder.onnx")
    how = Options(devices=2, preset="data-parallel", typical=Typical.from_argument(told or None))
    plan, _ = sharder.plan(tmp_path / "decoder.onnx", how)
    assert plan.typical == (({**sizes}, 1.0),)


def test_a_mask_is_as_long_as_a_cache_of_fixed_length(tmp_path: Path) -> None:
    onnx.save(build(Decoder("GroupQueryAttention", length=48)), tmp_path / "decoder.onnx")
    plan, _ = sharder.plan(
        tmp_path / "decoder.onnx", Options(devices=2, typical=Typical.from_argument({"seq": 1}))
    )
    assert plan.typical == (({"batch": 1, "seq": 1, "total": 48}, 1.0),)


@pytest.mark.parametrize(
    ("entries", "profiles"),
    [
        (["batch=1,seq=128"], [({"batch": 1, "seq": 128}, 1.0)]),
        (["seq=1:0.9", "seq=512:0.1"], [({"seq": 1}, 0.9), ({"seq": 512}, 0.1)]),
    ],
)
def test_what_is_typed(
    entries: Sequence[str], profiles: list[tuple[dict[str, int], float]]
) -> None:
    assert Typical.parse(entries).profiles == tuple(profiles)
    assert Typical.from_argument(profiles).profiles == tuple(profiles)


@pytest.mark.parametrize("entry", ["batch", "batch=", "batch=x", "=3", "a=1:0", "a=1:x", ""])
def test_what_cannot_be_read(entry: str) -> None:
    with pytest.raises(StrategyError, match=r"--typical .*: write NAME=N"):
        Typical.parse([entry])


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("name", "entry", "message"),
    [
        ("bert.legacy.dynamic", "foo=3", "the model has no open size of that name; it has: batch"),
        ("bert.legacy.dynamic", "seq=99", "the model does not run at these sizes"),
        ("bert.legacy.static", "seq=9", "has no open sizes; leave --typical out"),
    ],
)
def test_what_does_not_fit(
    name: str, entry: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    how = ["plan", str(MODELS / f"{name}.onnx"), "--devices", "2", "--typical", entry]
    assert main(how) == 2
    assert message in capsys.readouterr().err


def test_memory_is_that_of_each_profile(tmp_path: Path) -> None:
    """What is large in one profile and what is large in another are never held together."""
    text = """<ir_version: 8, opset_import: ["" : 17]>
      m (float[a,256] x, float[b,256] z) => (float[a,256] y, float[b,256] w)
      { y = Tanh(x) w = Tanh(z) }"""
    path = tmp_path / "m.onnx"
    onnx.save(onnx.parser.parse_model(text), path)
    typical = Typical.from_argument([({"a": 1, "b": 101}, 1), ({"a": 101, "b": 1}, 1)])
    held = 2 * (1 + 101) * 128 * 4  # halves of the inputs and outputs
    for limit in (held, 2 * held):
        how = Options(devices=2, typical=typical, objective=Objective(memory=limit))
        made, _ = sharder.plan(path, how)
        assert sum(made.memory.values()) == held
    with pytest.raises(StrategyError, match="a rank would need"):
        sharder.plan(path, replace(how, objective=Objective(memory=held - 1)))


@pytest.fixture
def in_parts(tmp_path: Path) -> Path:
    """What is pooled, enlarged and added fits only where sizes divide: 224 of 8 are 28 parts."""
    pools = "".join(
        f"p{i + 1} = MaxPool<kernel_shape = [2, 2], strides = [2, 2]>(p{i})\n" for i in range(3)
    )
    return write_text(
        f"""<ir_version: 8, opset_import: ["" : 18]>
        g (float[batch,3,height,width] p0) => (float[batch,3,height,width] y)
        <float[4] by = {{1.0, 1.0, 8.0, 8.0}}> {{ {pools}
          large = Resize<mode = "nearest">(p3, , by)  y = Add(p0, large) }}""",
        tmp_path / "m.onnx",
    )


def test_an_image_whose_height_is_in_parts(in_parts: Path) -> None:
    plan = onnxpar.plan(in_parts, devices=2)
    assert plan.typical == (({"batch": 1, "height_by_8": 28, "width_by_8": 28}, 1.0),)
    assert onnxpar.plan(in_parts, devices=2, typical={"height": 64, "width": 32}).typical == (
        ({"batch": 1, "height_by_8": 8, "width_by_8": 4}, 1.0),
    )


@pytest.mark.slow
def test_a_height_in_parts_is_checked_at_other_sizes(in_parts: Path) -> None:
    assert onnxpar.check(in_parts, devices=2).ok
