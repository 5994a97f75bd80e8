"""A signal at any moment of a command leaves nothing behind, and files of users whole."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from base.test_new_folder import is_change, killed_at
from onnx import helper, numpy_helper

from onnxpar.base.own_folder import OwnFolder, remove_left
from onnxpar.cli.command_line import main
from onnxpar.compiler.write_annotations import save
from onnxpar.graph.write_model import write_model
from onnxpar.planner.dump import Dump


def small_model(path: Path, factor: float = 1.0, rows: int = 8) -> onnx.ModelProto:
    """y = x w / factor, with `rows` rows of `factor` in w: all but 1 means that w is another's."""
    weight = numpy_helper.from_array(np.full((rows, 4), factor, np.float32), "w")
    scale = numpy_helper.from_array(np.float32(factor), "c")
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Div", ["h", "c"], ["y"], name=f"by_{factor}"),
    ]
    ports = [helper.make_tensor_value_info(n, 1, s) for n, s in (("x", [4, rows]), ("y", [4, 4]))]
    graph = helper.make_graph(nodes, "small", ports[:1], ports[1:], [weight, scale])
    opset = [helper.make_opsetid("", 17)]
    model = helper.make_model(graph, opset_imports=opset, ir_version=8)
    onnx.save(model, path)
    return model


def signalled_at(number: int, sent: signal.Signals, command: list[str], scratch: Path) -> int:
    """Runs a command in a child, which sends itself a signal before the change of this number to
    files below `scratch`, where temporary files go. Returns the child's exit code."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    left = [number]

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if is_change(event, args, os.fspath(scratch)):
            left[0] -= 1
            if left[0] == -1:
                os.kill(os.getpid(), sent)

    tempfile.tempdir = os.fspath(scratch)
    for stream in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    for each in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_DFL)
    sys.addaudithook(hook)
    code = 1
    try:
        code = main(command)
    finally:
        os._exit(code)


COMMANDS = {
    "run": ["run", "m.par", "--inputs", "in.npz", "--profile", "t.json", "--outputs", "out.npz"],
    "check": ["check", "m.onnx", "--devices", "2", "--preset", "data-parallel"],
    "train": ["train", "step.par", "--data", "data.npz", "--lr", "0.1", "--profile", "t.json"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("left")
    small_model(made / "m.onnx")
    np.savez(made / "in.npz", x=np.ones((4, 8), np.float32))
    np.savez(made / "data.npz", x=np.ones((4, 8), np.float32), labels=np.ones((4, 4), np.float32))
    ways = ["--devices", "2", "--preset", "data-parallel"]
    step = ["--loss", "mse", "--optimizer", "sgd", "-o", str(made / "step.onnx")]
    assert main(["shard", str(made / "m.onnx"), "-o", str(made / "m.par"), *ways]) == 0
    assert main(["grad", str(made / "m.onnx"), *step]) == 0
    assert main(["shard", str(made / "step.onnx"), "-o", str(made / "step.par"), *ways]) == 0
    names = onnx.load(made / "step.onnx").graph.input
    (target,) = (p.name for p in names if p.name not in ("x", "w", "samples", "learning_rate"))
    np.savez(made / "data.npz", **{"x": np.ones((4, 8), np.float32), target: np.ones((4, 4), "f4")})
    return made


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
@pytest.mark.parametrize("command", COMMANDS)
def test_no_temporary_file_is_left(
    command: str,
    sent: signal.Signals,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing cleans up upon SIGKILL; then the next command does."""
    monkeypatch.chdir(folder)
    shared = set(os.listdir("/dev/shm"))
    (tmp_path / "scratch").mkdir()
    step = 3 if command == "check" or sent == signal.SIGHUP else 1
    number, left = 0, 0
    while (code := signalled_at(number, sent, COMMANDS[command], tmp_path / "scratch")) != 0:
        found = [n for n in os.listdir(tmp_path / "scratch") if n != ".ses"]  # onnxruntime's own
        if sent == signal.SIGKILL:
            assert code == -sent and len(found) <= 2, found
            left += len(found)
        else:
            assert code == 128 + sent and not found, (number, code, found)
        number += step
    assert number >= 4
    assert [n for n in os.listdir(tmp_path / "scratch") if n != ".ses"] == []
    assert (left > 0) == (sent == signal.SIGKILL)
    assert not {n for n in set(os.listdir("/dev/shm")) - shared if "onnxpar" in n}
    print(f"{number // step} moments of {command}, {left} folders left until the next command")


def factor_of(path: Path) -> float:
    """The factor of a small model. It computes with the weight of that factor, by onnxruntime."""
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    rows = session.get_inputs()[0].shape[1]
    (y,) = session.run(None, {"x": np.ones((4, rows), np.float32)})
    np.testing.assert_array_equal(y, np.full((4, 4), rows, np.float32))
    return float(onnx.load(path, load_external_data=False).graph.node[1].name[3:])


ROWS = 8192
"""Of a weight that is stored apart."""


def external(path: Path, factor: float) -> onnx.ModelProto:
    """A model whose weight is in `weights.bin` beside it."""
    path.parent.mkdir(exist_ok=True)
    model = small_model(path, factor, ROWS)
    onnx.save_model(model, path, save_as_external_data=True, location="weights.bin")
    return onnx.load(path, load_external_data=False)


def by_write_model(source: Path, output: Path) -> None:
    write_model(onnx.load(source, load_external_data=False), source.parent, output)


def by_save(source: Path, output: Path) -> None:
    save(onnx.load(source, load_external_data=False), source, output)


@pytest.mark.matrix
@pytest.mark.parametrize("has_links", [True, False])
@pytest.mark.parametrize("has_old", [True, False])
@pytest.mark.parametrize("write", [by_write_model, by_save])
def test_a_model_always_has_its_own_weights(
    write: Callable[[Path, Path], None],
    has_old: bool,
    has_links: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whenever the process is killed, the old model stands there or the new one, never a model
    with the other's data. The next one that is written removes what was left."""
    if not has_links:

        def refused(*names: Any) -> None:
            raise PermissionError

        monkeypatch.setattr(os, "link", refused)
    for name, factor in (("old", 1.0), ("new", 2.0)):
        external(tmp_path / name / "m.onnx", factor)
    work = tmp_path / "work"
    work.mkdir()
    output = work / "m.onnx"
    number, seen = 0, set[float | None]()
    while True:
        for file in work.iterdir():
            file.unlink()
        if has_old:
            write(tmp_path / "old/m.onnx", output)
        if not killed_at(number, work, lambda: write(tmp_path / "new/m.onnx", output)):
            break
        seen.add(factor_of(output) if output.exists() else None)
        write(tmp_path / "new/m.onnx", output)
        assert factor_of(output) == 2.0
        found = sorted(file.name for file in work.iterdir())
        assert len(found) == 2, found
        if has_links:
            assert found == ["m.onnx", "m.onnx.data" if write is by_write_model else "weights.bin"]
        number += 1
    assert number > 4 and seen == ({1.0, 2.0} if has_old else {None, 2.0})
    assert factor_of(output) == 2.0
    print(f"{number} file operations")


def test_a_dump_never_has_the_weights_of_another(tmp_path: Path) -> None:
    external(tmp_path / "a/m.onnx", 1.0)
    command = ["plan", str(tmp_path / "a/m.onnx"), "--devices", "2", "--preset", "data-parallel"]
    assert main([*command, "--dump", str(tmp_path / "dump")]) == 0
    dumps = sorted((tmp_path / "dump").glob("*.onnx"))
    assert any(b"weights.data" in file.read_bytes() for file in dumps)
    Dump(tmp_path / "dump")  # a second one begins, and is killed
    assert not any((tmp_path / "dump").glob("*.onnx"))


def test_a_file_is_replaced_where_a_link_leads(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its permissions stay, and a run that fails leaves it as it was."""
    monkeypatch.chdir(folder)
    (tmp_path / "elsewhere").mkdir()
    real, link = tmp_path / "elsewhere/out.npz", tmp_path / "out.npz"
    real.write_bytes(b"before")
    real.chmod(0o640)
    link.symlink_to(real)
    np.savez(tmp_path / "bad.npz", x=np.ones((3, 3), np.float32))
    command = ["run", "m.par", "--outputs", str(link), "--inputs"]
    assert main([*command, str(tmp_path / "bad.npz")]) == 2
    assert real.read_bytes() == b"before"
    assert main([*command, "in.npz"]) == 0
    assert link.is_symlink() and real.stat().st_mode & 0o777 == 0o640
    np.testing.assert_array_equal(np.load(real)["y"], np.full((4, 4), 8, np.float32))
    assert sorted(p.name for p in real.parent.iterdir()) == ["out.npz"]


def test_folders_of_living_processes_stay(tmp_path: Path) -> None:
    with OwnFolder("a-", tmp_path) as own:
        child = os.fork()
        if not child:
            OwnFolder("a-", tmp_path).path.joinpath("file").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # it is a zombie, and as good as gone
        assert len(list(tmp_path.iterdir())) == 2
        remove_left(tmp_path, "a-")
        assert list(tmp_path.iterdir()) == [own]
        os.waitpid(child, 0)
    assert list(tmp_path.iterdir()) == []
    other = tmp_path / "a-0123abcd-1-1.00000000.onnxpar"  # of another machine, just made
    other.mkdir()
    remove_left(tmp_path, "a-")
    assert other.exists()
    os.utime(other, (0, 0))
    remove_left(tmp_path, "a-")
    assert not other.exists()
