"""A disk that fails at any moment: one error of ours, and nothing half-written."""

from __future__ import annotations

import errno
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import yaml
from onnx import numpy_helper

import onnxpar
from onnxpar import training
from onnxpar.base.errors import OnnxparError
from onnxpar.runtime.session.threads import ThreadSession


class Disk:
    """Counts the accesses to files in a folder, and lets the one at index `fails` fail."""

    def __init__(self) -> None:
        self.folder = ""
        self.fails = -1
        self.accesses: list[str] = []
        sys.addaudithook(self._note)  # never removed; without a folder, it does nothing

    def _note(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.folder or not event.startswith(("open", "os.", "shutil.rm", "mmap")):
            return
        path = args[0] if args else None
        if not isinstance(path, (str, os.PathLike)) or self.folder not in os.path.abspath(path):
            return
        self.accesses.append(event)
        if len(self.accesses) - 1 == self.fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO), os.fspath(path))


DISK = Disk()


def run(par: Path) -> None:
    with ThreadSession(par) as session:
        session.run(None, {"x": np.ones((2, 40), np.float32)})


def grad(folder: Path, out: Path) -> None:
    loss, optimizer = "softmax-cross-entropy", "sgd"
    training.grad(folder / "m.onnx", out / "step.onnx", loss=loss, optimizer=optimizer)


CALLS: dict[str, Callable[[Path, Path], object]] = {
    "shard": lambda folder, out: onnxpar.shard(
        folder / "m.onnx", out / "m.par", mesh="tp=2", strategy=folder / "split.yaml"
    ),
    "annotate": lambda folder, out: onnxpar.annotate(
        folder / "m.onnx", out / "m.onnx", devices=2, preset="tensor-parallel"
    ),
    "inspect": lambda folder, out: onnxpar.inspect(folder / "good.par", verify=True),
    "run": lambda folder, out: run(folder / "good.par"),
    "grad": grad,
}


@pytest.mark.parametrize("name", CALLS)
def test_every_access_may_fail(tmp_path: Path, name: str) -> None:
    random = np.random.default_rng(0)
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["" : 21]>
        net (float[2,40] x) => (float[2,8] y) {
            h = MatMul(x, w)  r = Relu(h)  y = MatMul(r, v) }""")
    for weight, shape in (("w", (40, 32)), ("v", (32, 8))):
        values = random.standard_normal(shape, np.float32)
        model.graph.initializer.append(numpy_helper.from_array(values, weight))
    onnx.save(model, tmp_path / "m.onnx")
    (tmp_path / "split.yaml").write_text(yaml.safe_dump({"tensors": {"w": [None, "tp"]}}))
    CALLS["shard"](tmp_path, tmp_path)
    (tmp_path / "m.par").rename(tmp_path / "good.par")
    DISK.fails, at = -1, 0
    while True:
        out = Path(tempfile.mkdtemp(dir=tmp_path))
        DISK.folder, DISK.accesses, failed = str(tmp_path), [], False
        try:
            CALLS[name](tmp_path, out)
        except OnnxparError as error:
            failed = True
            assert len(str(error).splitlines()) == 1
        finally:
            DISK.folder = ""
        is_left = any(path.name.startswith(".") for path in out.iterdir())
        # shutil.rmtree opens, lists and removes a folder
        is_removal = "shutil.rmtree" in DISK.accesses[max(DISK.fails - 3, 0) : DISK.fails + 1]
        assert not is_left or is_removal
        if DISK.fails >= 0 and not failed and len(DISK.accesses) <= DISK.fails:
            return  # it needs no more accesses
        DISK.fails, at = at, at + 1
