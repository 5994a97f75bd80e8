"""`onnxpar check`: what it is fed, what it compares by, and what it says."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from onnxpar.base.errors import InputError
from onnxpar.cli.command_line import main
from onnxpar.compiler.plan import write_plan
from onnxpar.lowering.lower_reshard import ReshardBuilder
from onnxpar.planner import sharder
from onnxpar.planner.options import Options
from onnxpar.report import compare
from onnxpar.report.check import Way, check_model
from onnxpar.runtime.session.bundle import Bundle

MODEL = """<ir_version: 8, opset_import: ["" : 17]>
two (float[8,16] x, float[8,16] z) => (float[8,4] y) {
  s = Add(x, z)  [product] y = MatMul(s, w) }"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """y = (x + z) @ w."""
    proto = onnx.parser.parse_model(MODEL)
    weight = np.random.default_rng(0).standard_normal((16, 4)).astype(np.float32)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    path = tmp_path / "two.onnx"
    onnx.save(proto, path)
    return path


def feeds(folder: Path, *names: str) -> str:
    arrays = {name: np.ones((8, 16), np.float32) for name in names}
    np.savez(folder / "in.npz", **arrays)
    return str(folder / "in.npz")


@pytest.mark.slow
def test_unknown_names_are_errors(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for names in (("q",), ("x", "q"), ("x", "z", "q")):
        assert (
            main(["check", str(model), "--devices", "2", "--inputs", feeds(tmp_path, *names)]) == 2
        )
        assert (
            "has an array 'q', but the model has no such input; its inputs: x, z"
            in capsys.readouterr().err
        )


@pytest.mark.slow
def test_made_up_inputs_are_named(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["check", str(model), "--devices", "2", "--inputs"]
    assert main([*arguments, feeds(tmp_path, "z")]) == 0
    assert "random inputs: x float32 [8, 16]\n" in capsys.readouterr().out
    assert main([*arguments, feeds(tmp_path, "x", "z")]) == 0
    assert "random inputs" not in capsys.readouterr().out


def test_the_times_of_both(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(model), "--devices", "2", "--rtol", "1e-4", "--atol", "1e-4"]) == 0
    out = capsys.readouterr().out
    ms = r"[\d.]+ ms \([\d.]+ predicted\)"
    told = re.search(rf"a run takes {ms} unsplit, {ms} on\s+2 ranks[^)]*\)\n", out)
    assert told is not None and max(map(len, told[0].splitlines())) <= 100


@pytest.mark.slow
def test_a_tolerance_decides(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault that doubles every element passes where that much may differ, and only there."""

    def doubled(self: ReshardBuilder, x: object, y: object) -> None:
        self._add("Add", [x, x], y)

    monkeypatch.setattr(ReshardBuilder, "_AllReduce", doubled)
    strategy = model.with_suffix(".yaml")
    strategy.write_text("shard: {product: [[1, 2], [2, 1]]}")
    common = ["check", str(model), "--devices", "2", "--strategy", str(strategy)]
    assert main(common) == 1
    assert main([*common, "--rtol", "1e-3"]) == 1
    assert main([*common, "--atol", "1e3"]) == 0


DEEP = """<ir_version: 8, opset_import: ["" : 17]>
deep (float[8,16] x) => (float[8,16] y) {
  [up] u = MatMul(x, a)
  [bend] r = Relu(u)
  [down] d = MatMul(r, b)
  [again] t = Tanh(d)
  [last] y = MatMul(t, c)
}"""


def test_each_names_the_first_tensor_that_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a fault in one rank's part of a weight, it is the product with that weight."""
    model, proto = tmp_path / "deep.onnx", onnx.parser.parse_model(DEEP)
    random = np.random.default_rng(0)
    for name in "abc":
        weight = random.standard_normal((16, 16)).astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(weight, name))
    onnx.save(proto, model)
    strategy = model.with_suffix(".yaml")
    strategy.write_text("shard: {up: [[1, 1], [1, 2]], down: [[1, 2], [2, 1]]}")
    arguments = ["check", str(model), "--devices", "2", "--strategy", str(strategy), "--each"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "5 tensors that both models have were compared in the model's order: all agree" in out
    assert len([line for line in out.splitlines() if " output " in line]) == 1
    shard = sharder.shard
    for weight, fault, op in (("b", "d", "MatMul 'down'"), ("a", "u", "MatMul 'up'")):

        def spoil(*args: Any, weight: str = weight, **more: Any) -> Any:
            made = shard(*args, **more)
            file = args[1] / "rank_0001.onnx"
            graph = onnx.load(file)
            (tensor,) = (t for t in graph.graph.initializer if t.name == weight)
            array = onnx.numpy_helper.to_array(tensor).copy()
            array[0, 0] += 1
            tensor.CopyFrom(onnx.numpy_helper.from_array(array, weight))
            onnx.save(graph, file)
            write_plan(args[1], Bundle.load(args[1]).data)
            return made

        monkeypatch.setattr(sharder, "shard", spoil)
        assert main(arguments) == 1
        out = capsys.readouterr().out
        assert f"the first that differs is '{fault}' of {op}: float32 [8, 16], error" in out


OPEN = """<ir_version: 8, opset_import: ["" : 17]>
open (float[batch,seq,16] x, int64[batch,seq] ids) => (float[batch,k] y) {
  [up] u = MatMul(x, a)
  [shape] s = Shape(ids)
  [fill] f = ConstantOfShape<value = float[1] {2.0}>(s)
  [axes] axes = Constant<value = int64[1] {2}>()
  [wide] g = Unsqueeze(f, axes)
  [bend] r = Mul(u, g)
  [odd] nz = NonZero(ids)
  [down] d = MatMul(r, b)
  [mean] m = ReduceMean<axes = [1], keepdims = 0>(d)
  [last] y = Relu(m)
}"""


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--dim", "batch=1"]])
def test_each_with_open_sizes(
    more: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Tensors inside are compared at the sizes of the feeds, with one element on a rank or none."""
    model, proto = tmp_path / "open.onnx", onnx.parser.parse_model(OPEN)
    random = np.random.default_rng(0)
    for name in "ab":
        weight = random.standard_normal((16, 16)).astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(weight, name))
    onnx.save(proto, model)
    strategy = model.with_suffix(".yaml")
    strategy.write_text(
        "{mesh: {dp: 2, tp: 2}, tensors: {x: [dp, null, null]}, "
        "shard: {up: [null, [null, tp]], down: [null, [tp, null]]}}"
    )
    arguments = ["check", str(model), "--strategy", str(strategy), "--each", *more]
    feeds = {"x": np.ones((1, 3, 16), np.float32), "ids": np.ones((1, 3), np.int64)}
    np.savez(tmp_path / "in.npz", **feeds)
    given = ["--inputs", str(tmp_path / "in.npz")]
    for each in (arguments, [*arguments, *given]):
        assert main(each) == 0, capsys.readouterr().err
        out = capsys.readouterr().out
        found = re.search(r"(\d+) tensors that both models have were compared", out)
        assert found is not None and int(found[1]) >= 5
        assert len([line for line in out.splitlines() if " output " in line]) == 1
    shard = sharder.shard

    def spoil(*args: Any, **more: Any) -> Any:
        made = shard(*args, **more)
        file = args[1] / "rank_0001.onnx"
        graph = onnx.load(file)
        (tensor,) = (t for t in graph.graph.initializer if t.name == "b")
        array = onnx.numpy_helper.to_array(tensor).copy()
        array[0, 0] += 1
        tensor.CopyFrom(onnx.numpy_helper.from_array(array, "b"))
        onnx.save(graph, file)
        write_plan(args[1], Bundle.load(args[1]).data)
        return made

    monkeypatch.setattr(sharder, "shard", spoil)
    assert main([*arguments, *given]) == 1
    out = capsys.readouterr().out
    assert "the first that differs is 'd' of MatMul 'down': float32 [1, 3, 16], error" in out


@pytest.mark.slow
def test_made_up_lengths_shrink_to_what_the_model_takes(capsys: pytest.CaptureFixture[str]) -> None:
    model = Path(__file__).parents[2] / "models" / "gpt2.legacy.dynamic.onnx"  # of 16 positions
    assert main(["check", str(model), "--devices", "2", "--preset", "tensor-parallel"]) == 0
    shape = re.search(r"logits  float32   \[(\d+), (\d+), 512\]", capsys.readouterr().out)
    assert shape is not None and 1 < int(shape[2]) <= 16


def test_made_up_lengths_grow_to_what_the_model_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Mirrored padding of 90 on each side takes 91 elements or more."""
    text = """<ir_version: 8, opset_import: ["" : 17]> m (float[n,l] x) => (float[n,k] y)
      { by = Constant<value = int64[4] {0, 90, 0, 90}>()  y = Pad<mode = "reflect">(x, by) }"""
    onnx.save(onnx.parser.parse_model(text), tmp_path / "m.onnx")
    assert main(["check", str(tmp_path / "m.onnx"), "--devices", "2"]) == 0
    shape = re.search(r"y +float32   \[(\d+), (\d+)\]", capsys.readouterr().out)
    assert shape is not None and int(shape[2]) > 270


BATCHES = """<ir_version: 8, opset_import: ["" : 17]>
m (float[batch,seq,16] x) => (float[batch,seq,16] y) { a = Relu(x)  y = Exp(a) }"""


@pytest.mark.parametrize(
    ("more", "fed"),
    [
        (["--mesh", "tp=3"], [1, 128]),
        (["--preset", "data-parallel", "--devices", "3"], [5, 128]),  # split: rows for each rank
        (["--preset", "data-parallel", "--devices", "3", "--typical", "batch=2,seq=7"], [2, 7]),
    ],
)
def test_made_up_sizes_are_the_typical_ones(
    more: list[str], fed: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    onnx.save(onnx.parser.parse_model(BATCHES), tmp_path / "m.onnx")
    assert main(["check", str(tmp_path / "m.onnx"), *more]) == 0, capsys.readouterr().err
    shape = re.search(r"y +float32   \[(\d+), (\d+), 16\]", capsys.readouterr().out)
    assert shape is not None and [int(n) for n in shape.groups()] == fed


def test_a_check_tells_what_it_does(model: Path) -> None:
    told: list[str] = []
    assert check_model(model, Options(devices=2), Way(), tell=told.append).ok
    assert told == [
        "sharding",
        "running the unsplit model",
        "timing the unsplit model",
        "running 2 ranks",
        "timing 2 ranks",
        "",
    ]
    told.clear()
    with pytest.raises(InputError):
        check_model(model, Options(devices=2), Way({"q": np.ones(1)}), tell=told.append)
    assert told == ["sharding", ""]


def test_ranks_that_share_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "own_cores", lambda: [0, 1])
    assert "ms on 4 ranks that share 2 cores (" in compare.Times(0.1, 0.1, 4).text()
    assert "ms on 2 ranks (" in compare.Times(0.1, 0.1, 2).text()


def test_large_errors_without_a_limit_are_explained() -> None:
    """Of values that are nothing but rounding errors."""
    row = compare.Comparison("w", "float32", (2,), 1e-3, math.inf, largest=1.0)
    assert "no limit" not in compare.Report((row,)).text()
    far = replace(row, name="k.bias.exp_avg", error=1.6, largest=2.5e-10)
    text = compare.Report((row, far)).text()
    assert "-: no limit" in text
    wanted = "1 row has an error above 1% of its largest element, which is at most 2.5e-10, such as"
    assert f"{wanted}\nk.bias.exp_avg" in text


@pytest.mark.parametrize(
    ("each", "runs"), [([0.1] * 9, 5), ([1.0, 0.9, 0.9], 1), ([0.1, 1.4, 1.4], 1), ([9.0], 0)]
)
def test_timing_ends_before_runs_take_long(
    each: list[float], runs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of these seconds are those of the run that is compared."""
    clock = [0.0]
    left = iter(each[1:])
    monkeypatch.setattr(compare.time, "perf_counter", lambda: clock[0])

    def run() -> dict[str, Any]:
        clock[0] += next(left)
        return {}

    shortest = compare.shortest(run, each[0])
    assert shortest == pytest.approx(min(each[1 : runs + 1], default=each[0]))
    assert clock[0] == pytest.approx(sum(each[1 : runs + 1]))
    first = compare.Times(each[0], 0.1, 2).text()
    assert ("the first" in first) == (runs == 0)
