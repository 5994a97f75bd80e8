"""No command overwrites what it reads, and no two of its options write one file."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from small_models import write_text

import onnxpar
from onnxpar.base.errors import OnnxparError
from onnxpar.cli.command_line import main
from onnxpar.cli.parser import parser
from onnxpar.planner.refuse_overwriting import READ, WRITTEN

TEXT = """<ir_version: 8, opset_import: ["" : 17]>
m (float[8,16] x) => (float[8,4] y) { y = MatMul(x, w) }"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with a model, one with external data, and other files that commands
    read."""
    monkeypatch.chdir(tmp_path)
    weight = np.random.default_rng(0).standard_normal((16, 4)).astype(np.float32)
    model = onnx.parser.parse_model(TEXT)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    onnx.save(model, "m.onnx")
    for name in ("e", "dumped"):
        data = "weights.data" if name == "dumped" else "e.data"
        onnx.save(
            onnx.load("m.onnx"),
            f"{name}.onnx",
            save_as_external_data=True,
            location=data,
            size_threshold=0,
        )
    Path("s.yaml").write_text("mesh: {tp: 2}\ntensors: {w: [null, tp]}\n")
    Path("t.yaml").write_text(onnxpar.Topology.default().text())
    np.savez("in.npz", x=np.ones((8, 16), np.float32))
    os.symlink("m.onnx", "link.onnx")
    Path("shards/x").mkdir(parents=True)
    np.save("shards/x/0.npy", np.ones((8, 16), np.float32))
    return tmp_path


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


GRAD = "grad m.onnx --loss mse --optimizer sgd -o"


@pytest.mark.parametrize(
    "command",
    [
        "annotate m.onnx --devices 2 -o m.onnx",
        "annotate m.onnx --devices 2 -o link.onnx",
        "annotate e.onnx --devices 2 -o e.data",
        "annotate m.onnx --strategy s.yaml -o ./s.yaml",
        f"{GRAD} ./m.onnx",
        "opt m.onnx --passes propagate-layouts --devices 2 -o m.onnx",
        "opt dumped.onnx --passes propagate-layouts --devices 2 --dump .",
        "shard m.onnx --strategy s.yaml --save-strategy s.yaml",
        "shard dumped.onnx --devices 2 --dump .",
        "plan m.onnx --devices 2 --html m.onnx",
        "plan m.onnx --devices 2 --topology t.yaml --html t.yaml",
        "plan m.onnx --devices 2 --save-strategy e.html --html e.html",
        "run m.par --inputs in.npz --outputs in.npz",
        "run m.par --inputs in.npz --outputs out --profile out",
        "train m.par --data in.npz --lr 1 --profile in.npz",
        "train m.par --data shards --lr 1 --profile shards/x/0.npy",
        "run m.par --inputs in.npz --library lib.so --outputs lib.so",
        "train m.par --data in.npz --eval ./shards --lr 1 --csv shards/x/0.npy",
        "checkpoint merge checkpoints m.onnx -o m.onnx",
    ],
)
def test_what_is_read_is_not_overwritten(
    command: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = contents(place)
    assert main(command.split()) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "; give another f" in error
    assert contents(place) == before


@pytest.mark.parametrize(
    "call",
    [
        lambda: onnxpar.annotate("m.onnx", "m.onnx", devices=2),
        lambda: onnxpar.annotate("e.onnx", "e.data", devices=2),
        lambda: onnxpar.shard("m.onnx", "m.par", strategy="s.yaml", save_strategy="s.yaml"),
        lambda: onnxpar.plan("m.onnx", devices=2, html="m.onnx"),
        lambda: onnxpar.candidates("m.onnx", devices=2, html="m.onnx"),
        lambda: onnxpar.opt("m.onnx", "propagate-layouts", devices=2, output="m.onnx"),
        lambda: onnxpar.training.grad("e.onnx", "e.data", loss="mse", optimizer="sgd"),
    ],
)
def test_nor_by_a_call(call: Callable[[], object], place: Path) -> None:
    before = contents(place)
    with pytest.raises(OnnxparError, match="give another file with"):
        call()
    assert contents(place) == before


def test_what_is_not_read_may_be_replaced(place: Path) -> None:
    for _ in range(2):
        assert main(["annotate", "e.onnx", "--devices", "2", "-o", "a.onnx"]) == 0
        more = ["--dump", ".", "--save-strategy", "/dev/null"]
        assert main(["plan", "m.onnx", "--devices", "2", *more]) == 0
    write_text(TEXT.replace("w)", "x)"), place / "bad.onnx")  # is refused by what reads it
    assert main(["annotate", "bad.onnx", "--devices", "2", "-o", "a.onnx"]) == 2


FOLDERS = {"dump", "node_data", "log_dir", "checkpoint", "par", "table_dir", "tensorboard"}
"""Options that name a folder."""


def test_every_option_that_names_a_file_is_known() -> None:
    commands = [*parser()._subparsers._group_actions[0].choices.values()]  # type: ignore[union-attr]
    for command in list(commands):
        if command._subparsers is not None:
            commands += command._subparsers._group_actions[0].choices.values()  # type: ignore[arg-type]
    named = {
        action.dest
        for command in commands
        for action in command._actions
        if action.metavar in ("FILE", "NPZ", "TRACE", "DIR", "model.onnx")
    }
    assert named <= {*READ, *WRITTEN, *FOLDERS}
