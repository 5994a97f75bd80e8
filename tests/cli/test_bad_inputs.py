"""Whatever a command is given: one line that names the thing, exit status 2, and nothing left."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx
import pytest

import onnxpar
from onnxpar.cli.command_line import main
from onnxpar.rules import rule as rules

Capture = pytest.CaptureFixture[str]
MODEL = """<ir_version: 8, opset_import: ["" : 17]>
two (float[8,16] x, int64[8] labels) => (float[8,4] scores)
{ [product] scores = MatMul(x, w) }"""
DIMS = {"x": ((8, 16), np.float32), "labels": ((8,), np.int64)}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, a sharded one, a sharded training step, and their inputs."""
    folder = tmp_path_factory.mktemp("made")
    model = onnx.parser.parse_model(MODEL.replace(", int64[8] labels", ""))
    weight = np.random.default_rng(0).standard_normal((16, 4)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    onnx.save(model, folder / "m.onnx")
    strategy = {"mesh": {"tp": 2}, "shard": {"product": [[None, "tp"], ["tp", None]]}}
    onnxpar.shard(folder / "m.onnx", folder / "m.par", strategy=strategy)
    onnxpar.training.grad(
        folder / "m.onnx", folder / "step.onnx", loss="softmax-cross-entropy", optimizer="sgd"
    )
    onnxpar.shard(folder / "step.onnx", folder / "step.par", devices=2, preset="data-parallel")
    np.savez(folder / "in.npz", x=np.ones((8, 16), np.float32))
    return folder


@pytest.fixture
def place(made: Path, tmp_path: Path) -> Path:
    """A copy of it, to spoil."""
    return Path(shutil.copytree(made, tmp_path / "place"))


def refused(capsys: Capture, arguments: list[object], *words: str) -> None:
    """Runs a command that must fail on one line with these words."""
    capsys.readouterr()
    assert main([os.fspath(a) if isinstance(a, Path) else str(a) for a in arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("onnxpar: error: ") and error.count("\n") == 1, error
    assert "Traceback" not in error and "internal error" not in error, error
    assert "<unicode string>" not in error, error
    for word in words:
        assert word in error, error


def listing(folder: Path) -> set[str]:
    return {str(p) for p in folder.rglob("*")}


def model_commands(model: object, place: Path) -> dict[str, list[object]]:
    """The commands that read a model."""
    return {
        "shard": ["shard", model, "--devices", 2, "-o", place / "o.par"],
        "plan": ["plan", model, "--devices", 2],
        "candidates": ["plan", model, "--devices", 2, "--candidates"],
        "annotate": ["annotate", model, "--devices", 2, "-o", place / "o.onnx"],
        "check": ["check", model, "--devices", 2],
        "opt": ["opt", model, "--devices", 2, "--passes", "propagate-layouts"],
        "grad": ["grad", model, "--loss", "mse", "--optimizer", "sgd", "-o", place / "o.onnx"],
    }


def text_model(file: Path) -> None:
    file.write_text("// after insert-collectives\nmesh dp=2\nx: float32[8, 16] [dp, -]\n")


def not_loaded(file: Path) -> None:
    """A model that keeps to the standard, but has an op that nobody knows."""
    model = onnx.parser.parse_model(MODEL.replace("MatMul", "nowhere.Matmul"))
    model.opset_import.add(domain="nowhere", version=1)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((16, 4), np.float32), "w"))
    onnx.save(model, file)


BAD_MODELS: dict[str, Callable[[Path], object]] = {
    "missing": lambda file: None,
    "empty": lambda file: file.write_bytes(b""),
    "text": lambda file: file.write_text("not a model"),
    "dump": text_model,
    "folder": lambda file: file.mkdir(),
    "garbage": lambda file: file.write_bytes(bytes(range(256)) * 8),
    "zip": lambda file: np.savez(file.open("wb"), x=np.ones(3)),
    "loop": lambda file: file.symlink_to(file.name),
}


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("fault", BAD_MODELS)
def test_bad_models(fault: str, place: Path, capsys: Capture) -> None:
    model = place / "bad.onnx"
    BAD_MODELS[fault](model)
    before = listing(place)
    for arguments in model_commands(model, place).values():
        refused(capsys, arguments, str(model))
        assert listing(place) == before


def test_a_name_that_is_not_unicode(place: Path, capsys: Capture) -> None:
    model = Path(os.fsdecode(os.fsencode(place) + b"/caf\xe9.onnx"))
    model.write_text("no model")
    for arguments in model_commands(model, place).values():
        refused(capsys, arguments, "caf")
    refused(capsys, ["run", place / "m.par", "--inputs", model], "caf")


def spoiled(file: str, spoil: Callable[[Path], object]) -> Callable[[Path], None]:
    """Spoils a file of the sharded model, and of the training step."""

    def both(place: Path) -> None:
        for name in ("m.par", "step.par"):
            spoil(place / name / file)

    return both


def changed(**fields: object) -> Callable[[Path], None]:
    def change(place: Path) -> None:
        for name in ("m.par", "step.par"):
            file = place / name / "plan.json"
            plan = json.loads(file.read_text())
            file.write_text(json.dumps({**plan, **fields}))

    return change


def replaced(place: Path) -> None:
    for name in ("m.par", "step.par"):
        shutil.rmtree(place / name)
        (place / name).write_text("a file")


BAD_BUNDLES: dict[str, Callable[[Path], None]] = {
    "no folder": lambda place: [shutil.rmtree(place / n) for n in ("m.par", "step.par")] and None,
    "a file": replaced,
    "no plan": spoiled("plan.json", lambda f: f.unlink()),
    "an empty plan": spoiled("plan.json", lambda f: f.write_text("")),
    "half a plan": spoiled("plan.json", lambda f: f.write_text(f.read_text()[:200])),
    "a binary plan": spoiled("plan.json", lambda f: f.write_bytes(b"\xff\xfe\x00")),
    "a list": spoiled("plan.json", lambda f: f.write_text("[1, 2]")),
    "another format": changed(format=99),
    "no mesh": changed(mesh=None),
    "a wrong mesh": changed(mesh=[["tp", "two"]]),
    "no inputs": changed(inputs=3),
    "a wrong layout": changed(
        inputs=[{"name": "x", "dtype": "float32", "layout": 5, "shape": [1]}]
    ),
}
BAD_RANKS: dict[str, Callable[[Path], None]] = {
    "no rank": spoiled("rank_0001.onnx", lambda f: f.unlink()),
    "an empty rank": spoiled("rank_0001.onnx", lambda f: f.write_bytes(b"")),
    "a damaged rank": spoiled("rank_0001.onnx", lambda f: f.write_bytes(b"\x00\x01garbage")),
    "half a rank": spoiled("rank_0001.onnx", lambda f: f.write_bytes(f.read_bytes()[:100])),
}


def run_commands(place: Path) -> list[list[object]]:
    common = ["--timeout", 20, "--log-dir", place / "log"]
    common = ["--timeout", 20, "--log-dir", place / "log"]
    return [
        ["run", place / "m.par", "--inputs", place / "in.npz", *common],
        ["train", place / "step.par", "--data", place / "in.npz", "--lr", 0.1, *common],
    ]


@pytest.mark.matrix
@pytest.mark.parametrize("fault", BAD_BUNDLES)
def test_bad_bundles(fault: str, place: Path, capsys: Capture) -> None:
    BAD_BUNDLES[fault](place)
    for arguments in [*run_commands(place), ["inspect", place / "m.par"]]:
        refused(capsys, arguments, ".par")


@pytest.mark.parametrize("fault", BAD_RANKS)
def test_bad_ranks(fault: str, place: Path, capsys: Capture) -> None:
    BAD_RANKS[fault](place)
    for arguments in run_commands(place):
        refused(capsys, arguments, ".par")


def arrays(**given: np.ndarray) -> Callable[[Path], None]:
    return lambda file: np.savez(file.open("wb"), **given)


def half(file: Path) -> None:
    np.savez(file, x=np.ones((8, 16), np.float32))
    file.write_bytes(file.read_bytes()[:300])


def other_zip(file: Path) -> None:
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("x.npy", b"\x93NUMPY\x01\x00v\x00{'descr': ")


GOOD = np.ones((8, 16), np.float32)
BAD_ARRAYS: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda file: None, "there is no file"),
    "empty": (lambda file: file.write_bytes(b""), "not a .npz"),
    "text": (lambda file: file.write_text("x = 1"), "not a .npz"),
    "folder": (lambda file: file.mkdir(), "cannot read"),
    "device": (lambda file: file.symlink_to("/dev/null"), "not a .npz"),
    "one array": (lambda file: np.save(file.open("wb"), GOOD), "single array"),
    "half": (half, "bad.npz"),
    "damaged": (other_zip, "array 'x'"),
    "objects": (arrays(x=np.array([{}, None], object)), "Python objects"),
    "type": (arrays(x=np.ones((8, 16))), "float64"),
    "text array": (arrays(x=np.full((8, 16), "a")), "'x'"),
    "shape": (arrays(x=np.ones((8, 17), np.float32)), "[8, 17]"),
    "scalar": (arrays(x=np.float32(1)), "'x'"),
    "name": (arrays(x=GOOD, q=GOOD), "'q'"),
}


@pytest.mark.matrix
@pytest.mark.parametrize("fault", BAD_ARRAYS)
def test_bad_arrays(fault: str, place: Path, capsys: Capture) -> None:
    make, word = BAD_ARRAYS[fault]
    file = place / "bad.npz"
    make(file)
    before = listing(place)
    for arguments in (
        ["run", place / "m.par", "--inputs", file],
        ["check", place / "m.onnx", "--devices", 2, "--inputs", file],
    ):
        refused(capsys, arguments, word)
    train = ["train", place / "step.par", "--data", file, "--lr", 0.1, "--log-dir", place / "log"]
    refused(capsys, train)
    assert {p for p in listing(place) - before if "/log" not in p} == set()


BAD_YAML: dict[str, bytes] = {
    "unclosed": b"shard: [",
    "tabs": b"a:\n\t- b",
    "list": b"- 1\n- 2",
    "text": b"hello",
    "bytes": b"\xff\xfe\x00\x01",
    "null byte": b"a: \x00",
    "mesh": b"mesh: 3",
    "mesh size": b"mesh: {tp: two}",
    "mesh zero": b"mesh: {tp: 0}",
    "mesh flag": b"mesh: {tp: true}",
    "mesh name": b"mesh: {'': 2}",
    "node": b"shard: {product: 5}",
    "operand": b"shard: {product: [5, 6]}",
    "tensor": b"tensors: {w: {a: b}}",
    "nested": b"tensors: {w: [[[tp]], null]}",
    "python": b"!!python/object/apply:os.system ['true']",
    "anchor": b"a: &a [*a]",
    "levels": b"levels: 5",
    "level": b"levels: [{name: 5}]",
    "rate": b"levels: [{name: a, bandwidth: fast}]",
    "device": b"levels: [{name: host}]\ndevice: 7",
}


@pytest.mark.matrix
@pytest.mark.parametrize("fault", BAD_YAML)
def test_bad_yaml(fault: str, place: Path, capsys: Capture) -> None:
    file = place / "bad.yaml"
    file.write_bytes(BAD_YAML[fault])
    for option in ("--strategy", "--topology"):
        refused(capsys, ["plan", place / "m.onnx", "--devices", 2, option, file])
    for path, word in ((place / "none.yaml", "none.yaml"), (place, str(place))):
        refused(capsys, ["plan", place / "m.onnx", "--devices", 2, "--strategy", path], word)


@pytest.mark.parametrize("content", [b"", b"{}", b"[", b'{"onnxpar": 3}', b"\xff\x00"])
def test_bad_traces(content: bytes, place: Path, capsys: Capture) -> None:
    file = place / "bad.json"
    file.write_bytes(content)
    refused(capsys, ["plan", place / "m.onnx", "--devices", 2, "--compare", file], "bad.json")


BAD_CHECKPOINTS: dict[str, Callable[[Path], object]] = {
    "missing": lambda folder: None,
    "a file": lambda folder: folder.write_text("x"),
    "empty": lambda folder: folder.mkdir(),
    "no json": lambda folder: (folder.mkdir(), (folder / "checkpoint.json").write_text("x")),
    "a list": lambda folder: (folder.mkdir(), (folder / "checkpoint.json").write_text("[]")),
    "format": lambda folder: (
        folder.mkdir(),
        (folder / "checkpoint.json").write_text('{"format": 7}'),
    ),
    "fields": lambda folder: (
        folder.mkdir(),
        (folder / "checkpoint.json").write_text('{"format": 1, "mesh": 5}'),
    ),
}


@pytest.mark.parametrize("fault", BAD_CHECKPOINTS)
def test_bad_checkpoints(fault: str, place: Path, capsys: Capture) -> None:
    folder = place / "bad"
    BAD_CHECKPOINTS[fault](folder)
    merge = ["checkpoint", "merge", folder, place / "m.onnx", "-o", place / "o.onnx"]
    refused(capsys, merge, str(folder))


@contextmanager
def small_files(most: int) -> Iterator[None]:
    """As on a full disk, no file grows beyond so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def writing_commands(place: Path, to: Path) -> dict[str, list[object]]:
    model = place / "m.onnx"
    plan = ["plan", model, "--devices", 2]
    run = ["run", place / "m.par", "--inputs", place / "in.npz"]
    return {
        "annotate": ["annotate", model, "--devices", 2, "-o", to],
        "grad": ["grad", model, "--loss", "mse", "--optimizer", "sgd", "-o", to],
        "html": [*plan, "--html", to],
        "strategy": [*plan, "--save-strategy", to],
        "outputs": [*run, "--outputs", to],
        "profile": [*run, "--profile", to],
        "shard": ["shard", model, "--devices", 2, "-o", to],
    }


WRITERS = ("annotate", "grad", "html", "strategy", "outputs", "profile", "shard")


@pytest.mark.matrix
@pytest.mark.parametrize("name", WRITERS)
def test_outputs_that_cannot_be_written(name: str, place: Path, capsys: Capture) -> None:
    (place / "folder").mkdir()
    (place / "folder" / "file").write_text("precious")
    before = listing(place)
    nowhere = place / "none" / "out"
    refused(capsys, writing_commands(place, nowhere)[name], str(nowhere.parent))
    for to in (place / "m.onnx" / "out", place / "folder"):
        refused(capsys, writing_commands(place, to)[name], str(to.parent))
    full = place / "full"
    full.symlink_to("/dev/full")  # never by its own name: root could replace the device
    refused(capsys, writing_commands(place, full)[name], str(full))
    assert full.is_symlink()
    full.unlink()
    assert listing(place) == before
    assert (place / "folder" / "file").read_text() == "precious"


@pytest.mark.parametrize("name", ["annotate", "grad", "html", "shard"])
def test_a_full_disk(name: str, place: Path, capsys: Capture) -> None:
    before = listing(place)
    with small_files(100):
        refused(capsys, writing_commands(place, place / "out")[name], "cannot write", str(place))
    assert listing(place) == before


@pytest.mark.parametrize("seconds", [0, -1, 1e9])
def test_timeouts_that_bound_nothing(seconds: float, place: Path, capsys: Capture) -> None:
    for arguments in run_commands(place):
        refused(capsys, [*arguments, "--timeout", seconds], "timeout", "seconds")
    calibrate = ["calibrate", "-o", place / "c.yaml", "--timeout", seconds]
    refused(capsys, calibrate, "timeout")


BAD_RULES = {
    "raises": ("raise ZeroDivisionError('mine')", "ZeroDivisionError: mine"),
    "returns": ("return 7", "it returned int, not a Rule"),
    "asserts": ("return einsum(node, 'a, b -> c d e')", "correct the plugin"),
}


@pytest.mark.parametrize("fault", BAD_RULES)
def test_a_rule_of_a_plugin_that_fails(fault: str, tmp_path: Path, capsys: Capture) -> None:
    body, words = BAD_RULES[fault]
    (tmp_path / f"p_{fault}.py").write_text(
        "from onnxpar.rules.rule import einsum, rule\n"
        '@rule("Nowhere", domain="my")\n'
        f"def nowhere(node):\n    {body}\n"
    )
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17, "my" : 1]> g (float[4,4] x) => (float[4,4] y) '
        "{ [odd] y = my.Nowhere(x) }"
    )
    onnx.save(model, tmp_path / "m.onnx")
    plan = ["plan", tmp_path / "m.onnx", "--devices", 2, "--plugin", tmp_path / f"p_{fault}.py"]
    try:
        refused(capsys, plan, "nowhere fails on Nowhere 'odd'", words)
    finally:
        rules._RULES.pop(("my", "Nowhere"), None)


def test_a_step_of_a_step(place: Path, capsys: Capture) -> None:
    grad = ["grad", place / "step.onnx", "--loss", "mse", "--optimizer", "sgd"]
    refused(capsys, [*grad, "-o", place / "o.onnx"], "step.onnx", "already a training step")


@pytest.mark.parametrize(
    "option,word",
    [
        (["--lr", -1], "--lr -1"),
        (["--lr", 1, "--epochs", 0], "--epochs 0"),
        (["--lr", 1, "--every", 3], "--every 3"),
        (["--lr", 1, "--resume"], "--resume"),
        (["--lr", 1, "--warmup", -1], "--warmup -1"),
        (["--lr", 1, "--timeout", 0], "timeout 0"),
    ],
)
def test_options_of_train_are_checked_before_files(
    option: list[object], word: str, place: Path, capsys: Capture
) -> None:
    """Options that no run can have are refused even if nothing that the run reads exists."""
    refused(capsys, ["train", place / "no.par", "--data", place / "no.npz", *option], word)


@pytest.mark.parametrize(
    "option,word",
    [
        (["--loss", "WRONG"], "loss 'WRONG'"),
        (["--loss", "mse", "--class-axis", 1], "--class-axis: the loss 'mse' has none"),
        (["--loss", "mse", "--loss-of", "z"], "output 'z'"),
        (["--loss", "mse", "--accumulate", 0], "--accumulate 0"),
        (["--loss", "mse", "--groups", 2], "--groups needs"),
    ],
)
def test_options_of_grad_are_checked_before_sizes(
    option: list[object], word: str, place: Path, capsys: Capture
) -> None:
    model = onnx.load(place / "m.onnx")
    for port in (*model.graph.input, *model.graph.output):
        port.type.tensor_type.shape.dim[0].dim_param = "batch"
    onnx.save(model, place / "open.onnx")
    grad = ["grad", place / "open.onnx", "--optimizer", "sgd", "-o", place / "s.onnx"]
    refused(capsys, [*grad, *option], word)
    refused(capsys, [*grad, "--loss", "mse"], "these sizes are open: batch")


@pytest.mark.slow
@pytest.mark.processes
def test_check_names_the_model_and_no_temporary_folder(place: Path, capsys: Capture) -> None:
    model = place / "m.onnx"
    refused(capsys, ["check", model, "--train", "--devices", 2], f"{model} is not a training step")
    text = MODEL.replace("MatMul(x, w)", "Gather(x, far)").replace("scores", "y")
    text = text.replace("[product]", "far = Add(labels, labels)")
    onnx.save(onnx.parser.parse_model(text.replace("float[8,4] y", "float[8,16] y")), model)
    np.savez(place / "bad.npz", x=np.ones((8, 16), np.float32), labels=np.full(8, 7))
    checked = ["check", model, "--devices", 2, "--preset", "manual"]
    refused(capsys, [*checked, "--inputs", place / "bad.npz"], f"run 1 of {model}: ")


def test_a_seed_below_0(place: Path, capsys: Capture) -> None:
    refused(capsys, ["check", place / "m.onnx", "--devices", 2, "--seed", -1], "--seed -1")


@pytest.mark.slow
def test_a_full_standard_output() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "onnxpar", "ops"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert done.returncode == 2
    assert done.stderr.startswith("onnxpar: error: ") and done.stderr.count("\n") == 1
    assert "standard output" in done.stderr


def test_an_internal_error_is_one_line(
    place: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise TypeError("a bug\non two lines")

    monkeypatch.setattr("onnxpar.planner.loader.load_model", broken)
    arguments = ["plan", str(place / "m.onnx"), "--devices", "2"]
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "internal error: TypeError: a bug on two lines" in error
    assert "ONNXPAR_TRACEBACK=1" in error
    monkeypatch.setenv("ONNXPAR_TRACEBACK", "1")
    assert main(arguments) == 2
    assert "Traceback" in capsys.readouterr().err


INTERRUPTED = """
import os, signal, sys, time
from onnxpar.cli import main
from onnxpar.passes.write.split_ranks import SplitRanks
run = SplitRanks.run
def slow(self, graph, ctx):
    run(self, graph, ctx)
    print("ready", flush=True)
    time.sleep(30)
SplitRanks.run = slow
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("name,status", [("SIGINT", 130), ("SIGTERM", 143)])
def test_an_interrupted_shard_leaves_nothing(name: str, status: int, place: Path) -> None:
    import signal

    before = listing(place)
    arguments = ["shard", place / "m.onnx", "--devices", "2", "-o", place / "o.par"]
    arguments = ["shard", place / "m.onnx", "--devices", "2", "-o", place / "o.par"]
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.2)
    process.send_signal(getattr(signal, name))
    _, error = process.communicate(timeout=30)
    assert process.returncode == status
    assert "Traceback" not in error and error.count("\n") == 1, error
    assert listing(place) == before


EMBEDDING = """<ir_version: 8, opset_import: ["" : 17]>
look (int64[4,2] ids) => (float[4,2,4] y) { [found] y = Gather(table, ids) }"""


@pytest.mark.slow
@pytest.mark.processes
def test_an_index_out_of_range(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model = onnx.parser.parse_model(EMBEDDING)
    table = np.ones((8, 4), np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(table, "table"))
    onnx.save(model, tmp_path / "m.onnx")
    onnxpar.shard(tmp_path / "m.onnx", tmp_path / "m.par", devices=2, preset="tensor-parallel")
    ids = np.zeros((4, 2), np.int64)
    ids[2, 1] = 8
    np.savez(tmp_path / "in.npz", ids=ids)
    inputs = ["--inputs", str(tmp_path / "in.npz")]
    told = "input 'ids': index 8 at [2, 1] is out of range for 'table' of 8 rows"
    check = ["check", str(tmp_path / "m.onnx"), "--devices", "2", *inputs]
    for arguments in (["run", str(tmp_path / "m.par"), *inputs], check, [*check, "--each"]):
        assert main(arguments) == 2
        error = capfd.readouterr().err
        assert error == f"onnxpar: error: {told}, in node 'found'\n", error


@pytest.mark.parametrize("suffix", ["onnx", "json", "textproto", "onnxtxt"])
def test_a_file_that_is_no_model_in_each_format_of_onnx(
    suffix: str, tmp_path: Path, capsys: Capture
) -> None:
    """The format is that of the name's end, so that a config.json is read as a model."""
    file = tmp_path / f"config.{suffix}"
    file.write_text('{"architectures": ["LlamaForCausalLM"]}')
    assert main(["plan", str(file), "--devices", "2"]) == 2
    assert f"error: {file}: not an ONNX model" in capsys.readouterr().err
