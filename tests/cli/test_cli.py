"""The command line: what each command does, and that bad input is refused by name."""

from __future__ import annotations

import json
import re
from importlib.metadata import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from onnxpar.cli.command_line import main

MODELS = Path(__file__).parents[2] / "models"
DLRM = str(MODELS / "dlrm.dynamo.static.onnx")
RANDOM = np.random.default_rng(0)


def matmul(folder: Path) -> Path:
    """x (8,16) times w (16,4), in node mm."""
    weight = numpy_helper.from_array(RANDOM.standard_normal((16, 4)).astype(np.float32), "w")
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"], "mm")],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [8, 16])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [8, 4])],
        [weight],
    )
    path = folder / "m.onnx"
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
    return path


def test_shard_run_inspect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, par = matmul(tmp_path), tmp_path / "m.par"
    strategy = tmp_path / "s.yaml"
    strategy.write_text("mesh: {a: 2}\nshard:\n  'm*': [[null, a], [a, null]]\n")
    assert main(["shard", str(model), "--strategy", str(strategy), "-o", str(par)]) == 0
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.onnx", "m.par", "s.yaml"]
    x = RANDOM.standard_normal((8, 16)).astype(np.float32)
    np.savez(tmp_path / "in.npz", x=x)
    inputs, outputs = str(tmp_path / "in.npz"), str(tmp_path / "out.npz")
    assert main(["run", str(par), "--inputs", inputs, "--outputs", outputs, "--repeat", "2"]) == 0
    weight = numpy_helper.to_array(onnx.load(model).graph.initializer[0])
    np.testing.assert_allclose(np.load(outputs)["y"], x @ weight, rtol=1e-5, atol=1e-5)
    capsys.readouterr()
    assert main(["inspect", str(par), "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    (collective,) = plan["collectives"]
    assert collective["kind"] == "AllReduce" and collective["group"] == [0, 1]
    assert collective["before"] == "[-, -] sum(a)" and collective["after"] == "[-, -]"
    assert [w["layout_text"] for w in plan["weights"]] == ["[a, -]"]
    assert main(["inspect", str(par)]) == 0
    text = capsys.readouterr().out
    assert "1 AllReduce" in text and max(map(len, text.splitlines())) <= 100


def test_random_inputs_and_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the typical sizes of a plan, with the indices that its tables have; the times are those
    of the runs without warm-up, ordered as their names say."""
    model, par = str(MODELS / "gpt2.dynamo.dynamic.onnx"), str(tmp_path / "m.par")
    how = ["--devices", "2", "--preset", "tensor-parallel", "--typical", "batch=3,seq=7"]
    assert main(["shard", model, *how, "-o", par]) == 0
    run = ["run", par, "--random", "--outputs", str(tmp_path / "out.npz")]
    found = []
    for seed in ("0", "0", "1"):
        assert main([*run, "--seed", seed]) == 0
        found.append(np.load(tmp_path / "out.npz")["logits"])
    assert found[0].shape == (3, 7, 512)
    np.testing.assert_array_equal(found[0], found[1])
    assert not np.array_equal(found[0], found[2])
    capsys.readouterr()
    # the clock of run number n, from 1, is read at 0 and n seconds after its begin
    clock = SimpleNamespace(perf_counter=iter([t for n in range(1, 7) for t in (0, n)]).__next__)
    with monkeypatch.context() as patched:
        patched.setattr("onnxpar.cli.run_model.time", clock)
        assert main([*run, "--repeat", "6", "--warmup", "2", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["outputs"] == [{"name": "logits", "dtype": "float32", "shape": [3, 7, 512]}]
    assert (told["runs"]["count"], told["runs"]["warm_up"]) == (6, 2)
    times = told["runs"]["seconds"]
    assert (times["min"], times["mean"], times["median"], times["max"]) == (3, 4.5, 4.5, 6)
    order = [times[name] for name in ("min", "median", "p90", "p95", "p99", "max")]
    assert order == sorted(order) and times["min"] <= times["mean"] <= times["max"]
    assert main([*run, "--repeat", "3"]) == 0
    out = capsys.readouterr().out
    assert "2 runs after 1 warm-up run, in milliseconds: min " in out
    assert re.search(r"predicted: [\d.]+ ms; a run takes [\d.]+ times as long", out)
    assert main([*run, "--repeat", "3", "--warmup", "3"]) == 2
    assert "--warmup 3: must be from 0 to 2" in capsys.readouterr().err
    for wrong in ([*run, "--inputs", "in.npz"], ["run", par]):
        with pytest.raises(SystemExit, match="2"):
            main(wrong)


def test_plan_is_what_shard_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--devices", "3", "--preset", "tensor-parallel"]
    assert main(["plan", DLRM, *options, "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    par = tmp_path / "m.par"
    assert main(["shard", DLRM, *options, "-o", str(par)]) == 0
    assert json.loads((par / "plan.json").read_text()).items() >= planned.items()


def test_check_says_so_of_a_mismatch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from onnxpar.lowering.lower_reshard import ReshardBuilder

    arguments = ["check", DLRM, "--devices", "2", "--preset", "tensor-parallel"]
    assert main(arguments) == 0
    assert "all outputs agree" in capsys.readouterr().out
    monkeypatch.setattr(
        ReshardBuilder, "_AllReduce", lambda self, x, y: self._add("Identity", [x], y)
    )
    assert main(arguments) == 1
    assert "the worst is probability" in capsys.readouterr().out


def test_opt_prints_and_dumps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    passes = "propagate-layouts,insert-collectives,fuse-all-reduces{bucket-bytes=1000}"
    options = ["--devices", "2", "--preset", "tensor-parallel", "--passes", passes]
    after = ["--print-after", "propagate-layouts"]
    assert main(["opt", DLRM, *options, *after, "--dump", str(tmp_path / "dump")]) == 0
    out = capsys.readouterr().out
    assert "after propagate-layouts" in out and "AllReduce" not in out
    names = sorted(p.name for p in (tmp_path / "dump").glob("*.onnxtxt"))
    assert names == [
        "01-annotate-strategy.onnxtxt",
        "02-propagate-layouts.onnxtxt",
        "03-insert-collectives.onnxtxt",
        "04-fuse-all-reduces.onnxtxt",
    ]
    assert "onnxpar.reshard.AllReduce" in (tmp_path / "dump" / names[2]).read_text()


BAD_OPTIONS: dict[str, tuple[list[str], str]] = {
    "no devices": ([], "--devices"),
    "too many devices": (["--devices", "1000000000"], "from 1 to 1,048,576"),
    "unknown symbol": (["--devices", "2", "--dim", "batch=3"], "batch"),
    "bad dim": (["--devices", "2", "--dim", "batch"], "--dim batch"),
    "mesh and devices": (
        ["--devices", "3", "--mesh", "dp=2"],
        "--devices is 3; leave --devices out",
    ),
    "no state": (["--devices", "2", "--state", "x=z"], "x=z"),
    "hybrid alone": (["--mesh", "tp=2", "--preset", "hybrid"], "hybrid"),
}


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_bad_options(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options, word = BAD_OPTIONS[name]
    model = matmul(tmp_path)
    assert main(["shard", str(model), *options, "-o", str(tmp_path / "m.par")]) == 2
    assert word in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["m.onnx"]


BAD_STRATEGIES: dict[str, tuple[str, list[str]]] = {
    "unknown node": ("shard: {nope: [[2, 1], [1, 1]]}", ["nope", "mm"]),
    "unknown tensor": ("tensors: {nope: [null]}", ["nope"]),
    "unknown axis": ("shard: {mm: [[zz, null], [null, null]]}", ["'zz'"]),
    "unknown key": ("shards: {}", ["shards"]),
    "not yaml": ("shard: [", ["s.yaml"]),
    "too many parts": ("shard: {mm: [[2, 64], [64, 1]]}", ["mm", "devices"]),
    "dimensions": ("shard: {mm: [[2], [1, 1]]}", ["mm", "2 dimensions"]),
    "inputs": ("shard: {mm: [[1, 1], [1, 1], [1]]}", ["mm", "2 inputs"]),
    "one axis twice": ("shard: {mm: [[tp, null], [null, tp]]}", ["mm", "use each axis once"]),
    "no split": ("shard: {mm: [[{tp: big}, null], [null, null]]}", ["mm", "is not a split"]),
    "hand sizes": ("tensors: {w: [{tp: [10, 5]}, null]}", ["'w'", "add up to 16"]),
    "tensor axis twice": ("tensors: {w: [tp, tp]}", ["'w'", "use each axis once"]),
    "one dimension, two ways": ("shard: {mm: [[null, tp], [null, null]], mm: 3}", ["mm"]),
}


@pytest.mark.parametrize("name", BAD_STRATEGIES)
def test_bad_strategies(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, words = BAD_STRATEGIES[name]
    model, strategy = matmul(tmp_path), tmp_path / "s.yaml"
    strategy.write_text(text)
    options = ["--mesh", "tp=2", "--strategy", str(strategy)]
    assert main(["shard", str(model), *options, "-o", str(tmp_path / "m.par")]) == 2
    error = capsys.readouterr().err
    assert all(word in error for word in words), error
    assert sorted(p.name for p in tmp_path.iterdir()) == ["m.onnx", "s.yaml"]


INVERSE = """<ir_version: 8, opset_import: ["" : 17, "com.microsoft" : 1]>
inverses (float[3,4,4] x) => (float[3,4,4] y) { [inverse] y = com.microsoft.Inverse(x) }"""


def test_a_whole_dimension_cannot_be_split(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "m.onnx"
    onnx.save(onnx.parser.parse_model(INVERSE), model)
    strategy = tmp_path / "s.yaml"
    strategy.write_text("shard: {inverse: [[null, tp, null]]}")
    options = ["--mesh", "tp=2", "--strategy", str(strategy)]
    assert main(["plan", str(model), *options]) == 2
    error = capsys.readouterr().err
    assert "inverse" in error and "must stay whole" in error and "rows" in error


def test_more_parts_than_elements(tmp_path: Path) -> None:
    model, strategy = matmul(tmp_path), tmp_path / "s.yaml"
    strategy.write_text("shard: {mm: [[1, 1], [1, 6]]}")
    assert main(["check", str(model), "--devices", "6", "--strategy", str(strategy)]) == 0


def bad_models(folder: Path) -> dict[str, tuple[Path, str]]:
    whole = matmul(folder).read_bytes()
    (folder / "cut.onnx").write_bytes(whole[: len(whole) // 2])
    (folder / "text.onnx").write_text("not a model")
    (folder / "empty.onnx").write_bytes(b"")
    out: dict[str, tuple[Path, str]] = {
        "cut": (folder / "cut.onnx", "cut.onnx"),
        "text": (folder / "text.onnx", "text.onnx"),
        "empty": (folder / "empty.onnx", "empty.onnx"),
        "missing": (folder / "none.onnx", "there is no file"),
        "folder": (folder, "folder"),
    }
    for name, location, word in [
        ("outside", "../../../../etc/passwd", "passwd"),
        ("absent", "weights.bin", "is missing"),
        ("short", "text.onnx", "too short"),
    ]:
        model = onnx.load_from_string(whole)
        tensor = model.graph.initializer[0]
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        tensor.external_data.add(key="location", value=location)
        (folder / f"{name}.onnx").write_bytes(model.SerializeToString())
        out[name] = (folder / f"{name}.onnx", word)
    return out


@pytest.mark.parametrize(
    "name", ["cut", "text", "empty", "missing", "folder", "outside", "absent", "short"]
)
def test_bad_models(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, word = bad_models(tmp_path)[name]
    before = sorted(p.name for p in tmp_path.iterdir())
    assert main(["shard", str(path), "--devices", "2", "-o", str(tmp_path / "o.par")]) == 2
    assert word in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == before


def test_strict_names_what_stays_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph = helper.make_graph(
        [
            helper.make_node("Relu", ["x"], ["h"], "r"),
            helper.make_node("NonZero", ["h"], ["y"], "nz"),
        ],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [8, 16])],
        [helper.make_tensor_value_info("y", TensorProto.INT64, [2, "n"])],
    )
    path = tmp_path / "m.onnx"
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
    options = [str(path), "--devices", "2", "--preset", "data-parallel"]
    assert main(["plan", *options]) == 0
    assert "the size of its results is data-dependent" in capsys.readouterr().out
    assert main(["check", *options]) == 0
    capsys.readouterr()
    written = tmp_path / "written.onnx"
    for command in (["plan"], ["annotate", "-o", str(written)]):
        assert main([*command, *options, "--strict"]) == 2
        assert "'nz'" in capsys.readouterr().err
    assert not written.exists()


@pytest.mark.parametrize("command", ["shard", "plan", "run", "check", "inspect", "opt"])
def test_help_is_there_for_every_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    assert f"onnxpar {command}" in capsys.readouterr().out


def test_the_only_import_root_is_onnxpar() -> None:
    listed: list[Any] = list(files("onnxpar") or [])
    if any("editable" in str(f) for f in listed):
        pytest.skip("an editable install redirects to the checkout")
    roots = {f.parts[0] for f in listed if ".dist-info" not in f.parts[0] and f.parts[0] != ".."}
    assert roots == {"onnxpar"}
    names = {str(f) for f in listed}
    assert "onnxpar/passes/lower/insert_collectives.py" in names
    assert "onnxpar/native/libonnxpar_ops.so" in names
