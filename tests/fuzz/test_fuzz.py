"""A slice of the fuzzer, and by hand what it has found: models and configurations that end in one
line that names them, or in the right answer."""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
from fuzz.bundles import Bundles, make_hand_split
from fuzz.configurations import Configurations, make_base
from fuzz.corpus import CORPUS
from fuzz.folders import Folders, renew
from fuzz.found import case, cases
from fuzz.models import WAYS, Models, case_of
from fuzz.trial import Maker, made_apart, run_all
from onnx import ModelProto, TensorProto, helper

from onnxpar.base.digests import sealed
from onnxpar.base.errors import InputError
from onnxpar.base.plain_yaml import parse
from onnxpar.cli.command_line import main
from onnxpar.runtime.session.npz import read_npz

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def base() -> Iterator[Path]:
    with made_apart(make_base) as folder:
        yield folder


@pytest.fixture(scope="module")
def bundles() -> Iterator[Path]:
    def make(folder: Path) -> None:
        make_base(folder)
        make_hand_split(folder)

    with made_apart(make) as folder:
        yield folder


@pytest.fixture
def every(request: pytest.FixtureRequest) -> int:
    """Of as many cases one is tried: all of them with `--zoo`."""
    return 1 if request.config.getoption("zoo") else 6


def none_fails(maker: Maker, numbers: range) -> None:
    faults = [f"{o.number}: {o.fault}" for o in run_all(maker, numbers) if o.fault]
    assert not faults, "\n".join(faults)


def test_mutated_models(every: int) -> None:
    none_fails(Models(0, share_of_large=0.02), range(0, 120, every))


@pytest.mark.slow
def test_mutated_configurations(base: Path, every: int) -> None:
    none_fails(Configurations(0, base), range(0, 120, every))


@pytest.mark.slow
def test_broken_folders(base: Path, every: int) -> None:
    none_fails(Folders(0, base), range(0, 120, every))


@pytest.mark.slow
def test_broken_rank_files(bundles: Path, every: int) -> None:
    """`verify` ends in one line, whatever the files are."""
    none_fails(Bundles(0, bundles), range(0, 240, every))


def test_the_corpus(base: Path, every: int) -> None:
    files = cases()
    none_fails(
        lambda number, folder: case(files[number], base, folder), range(0, len(files), every)
    )


def change(name: str, how: Callable[[ModelProto], object]) -> ModelProto:
    model = CORPUS[name]()
    how(model)
    return model


def nested(depth: int) -> ModelProto:
    """A function of each level calls that below it twice."""
    text = """<ir_version: 8, opset_import: ["" : 18, "own" : 1]>
        g (float[8,16] x) => (float[8,16] y) { y = own.f%d(x) }
        <domain: "own", opset_import: ["" : 18]> f0 (a) => (b) { b = Relu(a) }"""
    level = """<domain: "own", opset_import: ["" : 18, "own" : 1]>
        f%d (a) => (b) { h = own.f%d(a) b = own.f%d(h) }"""
    levels = [level % (i, i - 1, i - 1) for i in range(1, depth + 1)]
    return onnx.parser.parse_model("\n".join([text % depth, *levels]))


def recursive(model: ModelProto) -> None:
    model.functions[1].node[0].op_type = "twice"
    model.functions[1].node[0].domain = "own"
    model.functions[1].opset_import.append(helper.make_opsetid("own", 1))


def located(key: str, value: str) -> Callable[[ModelProto], None]:
    def how(model: ModelProto) -> None:
        entries = model.graph.initializer[0].external_data
        next(e for e in entries if e.key == key).value = value

    return how


def large_sparse(model: ModelProto) -> None:
    model.graph.sparse_initializer[0].dims[0] = 1 << 40


def valueless(model: ModelProto) -> None:
    model.graph.node.add(op_type="Constant", output=["v"])


def of_others(model: ModelProto) -> None:
    model.graph.node[0].domain = "com.microsoft"
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))


def refers(model: ModelProto) -> None:
    attribute = model.graph.node[0].attribute.add(name="axis", ref_attr_name="axis", type=2)
    assert attribute.ref_attr_name


def nameless(model: ModelProto) -> None:
    model.graph.node[0].attribute.add(type=2, i=1)


def twice_made(model: ModelProto) -> None:
    model.graph.node[1].output[0] = model.graph.node[0].output[0]


def key_of_bytes(model: ModelProto) -> None:
    """In a Constant, a key that is no UTF-8."""
    node = next(n for n in model.graph.node if n.op_type == "Constant")
    node.attribute[0].t.external_data[0].key = "QQ"


def constant_of_others(model: ModelProto) -> None:
    """onnxruntime loads it as ONNX's own."""
    model.graph.node[-1].op_type, model.graph.node[-1].domain = "Constant", "own"
    model.opset_import.append(helper.make_opsetid("own", 1))


def plain_sparse(model: ModelProto) -> None:
    """A sparse value that is a number, which onnxruntime loads."""
    constant = next(n for n in model.graph.node if n.op_type == "Constant")
    del constant.attribute[:]
    constant.attribute.append(helper.make_attribute("sparse_value", 0.5))


def empty_body(model: ModelProto) -> None:
    loop = next(n for n in model.graph.node if n.op_type == "Loop")
    del loop.attribute[0].g.output[:]


def unknown_domain(model: ModelProto) -> None:
    """Beside a function of another opset, for which onnx infers types where it inlines it."""
    model.graph.node[1].domain = "é"
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("own", 1)]
    relu = [helper.make_node("Relu", ["a"], ["b"])]
    model.functions.append(helper.make_function("own", "f", ["a"], ["b"], relu, opsets))
    model.graph.node.append(helper.make_node("f", ["c"], ["k"], domain="own"))
    model.opset_import.append(helper.make_opsetid("own", 1))


def short_perm(model: ModelProto) -> None:
    """Inference of ONNX takes it."""
    model.graph.node.add(op_type="Transpose", input=["y"], output=["t"]).attribute.append(
        helper.make_attribute("perm", [0])
    )


def segment(model: ModelProto) -> None:
    model.graph.initializer[0].segment.begin = 1


def no_import(model: ModelProto) -> None:
    del model.functions[0].opset_import[1]


def documented(model: onnx.ModelProto) -> None:
    """With metadata of an exporter that are no UTF-8."""
    model.graph.metadata_props.add(
        key="pkg.torch.export.ExportedProgram.graph_signature"
    ).value = "QQ"


def trained(model: onnx.ModelProto) -> None:
    model.metadata_props.add(key="onnxpar.training", value='{"slots": 3')


def of_many_devices(model: onnx.ModelProto) -> None:
    model.configuration.add(name="all", num_devices=1_000_000_000)


def far_away(model: onnx.ModelProto) -> None:
    """A name of a file that is too long."""
    for entry in model.graph.initializer[0].external_data:
        if entry.key == "location":
            entry.value = "w" * 5000


BROKEN: dict[str, tuple[ModelProto, str]] = {
    "recursive": (change("functions", recursive), "calls itself"),
    "nested": (nested(24), "expand into 16,777,216 nodes"),
    "sparse": (change("sparse", large_sparse), "[1099511627776, 4]"),
    "NUL": (change("external", located("location", "a\0b")), "'a\\x00b'"),
    "offset": (change("external", located("offset", "abc")), "'abc'"),
    "dtype": (change("product", lambda m: setattr(m.graph.initializer[0], "data_type", 99)), "99"),
    "no value": (change("product", valueless), "Constant"),
    "unknown op of Microsoft's": (change("product", of_others), "com.microsoft"),
    "reference": (change("product", refers), "'axis'"),
    "nameless attribute": (change("functions", nameless), "m.onnx"),
    "unknown domain": (change("product", unknown_domain), "é"),
    "short perm": (change("product", short_perm), "erm"),
    "segment": (change("product", segment), "is a segment of a tensor"),
    "no import in a function": (change("functions", no_import), "m.onnx"),
    "two makers": (change("functions", twice_made), "m.onnx"),
    "Constant of others": (change("product", constant_of_others), "Constant"),
    "no UTF-8": (change("external", key_of_bytes), "UTF-8"),
    "documentation that is no UTF-8": (change("product", documented), "UTF-8"),
    "damaged description of a step": (change("product", trained), "onnxpar.training"),
    "a billion devices": (change("product", of_many_devices), "1,000,000,000 devices"),
    "a long location": (change("external", far_away), "location"),
    "plain sparse": (change("sparse", plain_sparse), "not a tensor"),
    "no output of a body": (change("control", empty_body), "m.onnx"),
    "opset below 1": (
        change("product", lambda m: setattr(m.opset_import[0], "version", -(1 << 63))),
        "opset",
    ),
    "no rows": (change("product", lambda m: m.graph.initializer[0].ClearField("dims")), "'w'"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_models(
    tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    model, word = BROKEN[case]
    monkeypatch.chdir(tmp_path)
    Path("m.onnx").write_bytes(model.SerializeToString().replace(b"QQ", b"\xff\xfe"))
    made = case_of(tmp_path / "m.onnx", WAYS[0])
    assert main(made.arguments) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and word in error and "internal" not in error, error
    assert not Path("m.par").exists()


@pytest.mark.parametrize("kind", ["If", "Loop", "Scan"])
def test_ops_of_others_may_have_names_of_onnx(kind: str, tmp_path: Path) -> None:
    """They stay as they are, for a library of the user's."""
    model = CORPUS["product"]()
    node = model.graph.node[-1]
    node.op_type, node.domain = kind, "own"
    del node.attribute[:]
    model.opset_import.append(helper.make_opsetid("own", 1))
    onnx.save(model, tmp_path / "m.onnx")
    assert main(["plan", str(tmp_path / "m.onnx"), "--devices", "2"]) == 0


def test_what_the_runtime_refuses_is_refused(tmp_path: Path, capsys: Capture) -> None:
    model = CORPUS["product"]()
    model.graph.output.add(name="gone").type.CopyFrom(
        helper.make_tensor_type_proto(TensorProto.FLOAT, [1])
    )
    onnx.save(model, tmp_path / "m.onnx")
    assert main(["plan", str(tmp_path / "m.onnx"), "--devices", "2"]) == 2
    assert "m.onnx" in capsys.readouterr().err


def test_functions_below_the_limit_are_inlined(tmp_path: Path) -> None:
    onnx.save(nested(8), tmp_path / "m.onnx")
    assert main(["plan", str(tmp_path / "m.onnx"), "--devices", "2"]) == 0


def test_a_level_of_a_topology_may_be_of_any_size(tmp_path: Path) -> None:
    onnx.save(CORPUS["product"](), tmp_path / "m.onnx")
    (tmp_path / "t.yaml").write_text(
        f"levels:\n- {{name: host, size: {10**30}, latency: 1 us, bandwidth: 1 GB/s}}\n"
        "- {name: rack, latency: 1 us, bandwidth: 1 GB/s}\n"
        "device: {flops: 1 GFLOP/s, memory_bandwidth: 1 GB/s, memory: 1 GB}\n"
    )
    command = ["plan", str(tmp_path / "m.onnx"), "--devices", "4"]
    assert main([*command, "--topology", str(tmp_path / "t.yaml")]) == 0


def test_a_sequence_along_no_axis_stays_one(tmp_path: Path) -> None:
    """onnxruntime refuses it in a run."""
    model = CORPUS["sequences"]()
    split = next(n for n in model.graph.node if n.op_type == "SplitToSequence")
    split.attribute[0].i = 1 << 40
    onnx.save(model, tmp_path / "m.onnx")
    assert main(["plan", str(tmp_path / "m.onnx"), "--devices", "2"]) == 0


def test_a_sequence_of_very_many_parts_stays_one(tmp_path: Path) -> None:
    """It would be a Split of 2 ** 38 results."""
    model = CORPUS["sequences"]()
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 1 << 40
    onnx.save(model, tmp_path / "m.onnx")
    assert main(["plan", str(tmp_path / "m.onnx"), "--devices", "2"]) == 0


@pytest.mark.parametrize(
    "entry", ["tensors: {x: [[a, a], null]}", "shard: {mm: [[[a, a], null], [1, 1]]}"]
)
def test_an_axis_twice_in_one_dimension(entry: str, tmp_path: Path, capsys: Capture) -> None:
    onnx.save(CORPUS["product"](), tmp_path / "m.onnx")
    (tmp_path / "s.yaml").write_text("mesh: {a: 2}\n" + entry)
    command = ["plan", str(tmp_path / "m.onnx"), "--strategy", str(tmp_path / "s.yaml")]
    assert main(command) == 2
    assert "use each axis once" in capsys.readouterr().err


def test_state_pairs_that_are_no_names(base: Path, tmp_path: Path, capsys: Capture) -> None:
    shutil.copytree(base / "step.par", tmp_path / "step.par")
    plan = json.loads((tmp_path / "step.par/plan.json").read_text())
    plan["states"][0]["output"] = [[]]
    (tmp_path / "step.par/plan.json").write_text(sealed(plan))
    assert main(["inspect", str(tmp_path / "step.par")]) == 2
    assert "plan.json is damaged" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("dims", "word"),
    [
        ([], "its layout has 0 dimensions, but its shape is"),
        ([{"size": [1]}] * 2, "plan.json is damaged: TypeError: a size is [1]"),
        ([{"size": 4, "parts": ["a"]}] * 2, "plan.json is damaged: TypeError: a size is 'a'"),
        ("[" * 100_000, "is not JSON"),
    ],
)
def test_plans_of_another_form(
    base: Path, tmp_path: Path, capsys: Capture, dims: object, word: str
) -> None:
    shutil.copytree(base / "open.par", tmp_path / "open.par")
    file = tmp_path / "open.par/plan.json"
    plan = json.loads(file.read_text())
    plan["inputs"][0]["layout"]["dims"] = dims
    file.write_text(sealed(plan) if isinstance(dims, list) else str(dims))
    assert main(["inspect", str(tmp_path / "open.par")]) == 2
    assert word in capsys.readouterr().err


@pytest.mark.timeout(60)
def test_a_record_that_is_a_pipe_is_not_waited_for(
    base: Path, tmp_path: Path, capsys: Capture
) -> None:
    shutil.copytree(base / "checkpoints", tmp_path / "checkpoints")
    (record,) = (tmp_path / "checkpoints").glob("step_*/checkpoint.json")
    record.unlink()
    os.mkfifo(record)
    given = [str(tmp_path / "checkpoints"), str(base / "m.onnx"), "-o", str(tmp_path / "o.onnx")]
    assert main(["checkpoint", "merge", *given]) == 2
    assert "checkpoint.json: it is not a file" in capsys.readouterr().err


def _shape(index: Any) -> None:
    index["c"]["shape"] *= 2


def _axes(record: Any) -> None:
    record["layouts"]["w"]["partial"] = [["d", 2, 1]]


def _name(record: Any) -> None:
    record["slots"][0]["input"] = [None]


@pytest.mark.parametrize(
    ("file", "change", "word"),
    [
        ("rank_0000.json", _shape, "state 'c' of rank 0 has the shape [4, 4], not [4]"),
        ("checkpoint.json", _axes, "a layout is over"),
        ("checkpoint.json", _name, "TypeError: a state has the name [None]"),
    ],
)
def test_checkpoints_of_another_form(
    base: Path,
    tmp_path: Path,
    capsys: Capture,
    file: str,
    change: Callable[[Any], None],
    word: str,
) -> None:
    shutil.copytree(base / "checkpoints", tmp_path / "checkpoints")
    (step,) = (tmp_path / "checkpoints").glob("step_*")
    data = json.loads((step / file).read_text())
    change(data)
    (step / file).write_text(json.dumps(data))
    assert renew(step / file, step / "checkpoint.json")
    given = [str(tmp_path / "checkpoints"), str(base / "m.onnx"), "-o", str(tmp_path / "o.onnx")]
    assert main(["checkpoint", "merge", *given]) == 2
    assert word in capsys.readouterr().err


@pytest.mark.parametrize(
    ("key", "value", "word"),
    [
        ("example", {"n": "\0"}, "example sizes are {'n': '\\x00'}"),
        ("example", {"n": -1}, "example sizes are {'n': -1}"),
        ("inputs", [{"name": 3, "dtype": "float32"}], "has the name 3"),
    ],
)
def test_plans_with_odd_entries(
    base: Path, tmp_path: Path, capsys: Capture, key: str, value: object, word: str
) -> None:
    shutil.copytree(base / "open.par", tmp_path / "open.par")
    file = tmp_path / "open.par/plan.json"
    file.write_text(sealed({**json.loads(file.read_text()), key: value}))
    assert main(["inspect", str(tmp_path / "open.par")]) == 2
    assert word in capsys.readouterr().err


@pytest.mark.timeout(60)
def test_an_empty_file_that_is_a_pipe_is_not_waited_for(
    base: Path, tmp_path: Path, capsys: Capture
) -> None:
    shutil.copytree(base / "checkpoints", tmp_path / "checkpoints")
    (states,) = (tmp_path / "checkpoints").glob("step_*/rank_0001.bin")
    assert not states.stat().st_size
    states.unlink()
    os.mkfifo(states)
    given = [str(tmp_path / "checkpoints"), str(base / "m.onnx"), "-o", str(tmp_path / "o.onnx")]
    assert main(["checkpoint", "merge", *given]) == 2
    assert "rank_0001.bin is not a file" in capsys.readouterr().err


YAML = {
    "!!timestamp 2020-99-99": "timestamp",
    "!!python/object:os.system x": "python/object",
    "!!int x": "not YAML|invalid literal",
    "!!bool x": "not YAML",
    "!!float ''": "does not fit its tag",
    "a: &a [*a]": "alias",
    "[" * 5000: "nested",
    "x: *gone": "gone",
    "\n".join(
        ["a0: &a0 [x, x]", *(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 40))]
    ): "entries",
}


@pytest.mark.parametrize("text", YAML)
def test_yaml_of_other_things_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=YAML[text]):
        parse(text)


def test_yaml_of_plain_things_is_read() -> None:
    text = "a: &a [1, 2.5, null, true, 2020-01-01]\nb: *a\nc: {<<: {d: x}}"
    row = [1, 2.5, None, True, "2020-01-01"]
    assert parse(text) == {"a": row, "b": row, "c": {"d": "x"}}
    assert parse("") is None


@pytest.mark.parametrize("shape", [(1 << 40, 16), (-1, 16), (10**30, 0)])
def test_arrays_that_a_file_does_not_have(tmp_path: Path, shape: tuple[int, int]) -> None:
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".encode()
    member = b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little") + header
    with zipfile.ZipFile(tmp_path / "in.npz", "w") as archive:
        archive.writestr("x.npy", member + bytes(64))
    with pytest.raises(InputError, match=r"'x'.*shape"):
        read_npz(tmp_path / "in.npz")


def test_versions_of_arrays_are_read(tmp_path: Path) -> None:
    arrays = {"a": np.arange(6.0).reshape(2, 3), "b": np.array("é"), "c": np.zeros((0, 4))}
    np.savez_compressed(tmp_path / "in.npz", **arrays)
    for name, array in read_npz(tmp_path / "in.npz").items():
        np.testing.assert_array_equal(array, arrays[name])


def test_a_layout_without_a_known_reduction(base: Path, tmp_path: Path, capsys: Capture) -> None:
    shutil.copytree(base / "m.par", tmp_path / "m.par")
    file = tmp_path / "m.par/plan.json"
    plan = json.loads(file.read_text())
    plan["outputs"][0]["layout"]["reduce"] = "mean"
    file.write_text(sealed(plan))
    assert main(["inspect", str(tmp_path / "m.par")]) == 2
    assert "no reduction is named 'mean'" in capsys.readouterr().err
