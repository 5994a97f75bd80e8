"""The names, the order and the defaults of arguments are Horovod's."""

from __future__ import annotations

import ast
import importlib
import inspect
import operator
import sys
from pathlib import Path
from typing import Any

import pytest

from onnxpar import hvd

sys.path.insert(0, str(Path(__file__).parent))

import horovod_signatures

LINES = horovod_signatures.FILE.read_text().splitlines()
LACKING = {
    "callbacks.BestModelCheckpoint": "an option of Keras's ModelCheckpoint",
}
"""What we do not have, and why."""


def of_horovod(line: str) -> inspect.Signature:
    """A signature whose defaults are those of `hvd` with the same names."""
    called, _, rest = line.partition("(")
    tree = ast.parse(f"def {called.rpartition('.')[2]}({rest}: pass")
    defined: dict[str, Any] = {}
    exec(compile(tree, line, "exec"), vars(hvd).copy(), defined)
    return inspect.signature(next(iter(defined.values())))


@pytest.mark.parametrize("line", LINES, ids=[line.partition("(")[0] for line in LINES])
def test_signatures(line: str) -> None:
    if line.partition("(")[0] not in LACKING:
        assert_same(hvd, line)


@pytest.mark.parametrize("line", [line for line in LINES if "." not in line.partition("(")[0]])
def test_signatures_of_tensors(line: str) -> None:
    pytest.importorskip("torch")
    assert_same(importlib.import_module("onnxpar.hvd.torch"), line)


def assert_same(module: Any, line: str) -> None:
    name = line.partition("(")[0]
    ours = operator.attrgetter(name)(module)
    inside = name.count(".") > name.startswith(("elastic.", "callbacks."))
    found = [
        p for p in inspect.signature(ours).parameters.values() if p.name != "self" or not inside
    ]
    wanted = list(of_horovod(line).parameters.values())
    for mine, theirs in zip(found, wanted, strict=False):
        assert (mine.name, mine.kind) == (theirs.name, theirs.kind)
        if theirs.default is not theirs.empty:
            assert mine.default == theirs.default, mine.name
    assert len(found) >= len(wanted), "arguments are missing"
    assert all(p.kind is p.KEYWORD_ONLY for p in found[len(wanted) :]), "more arguments by position"


def test_what_we_lack_is_lacking() -> None:
    for name in LACKING:
        with pytest.raises(AttributeError):
            operator.attrgetter(name)(hvd)


def test_the_file_is_what_the_script_reads(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    if not pytestconfig.getoption("--horovod"):
        pytest.skip("needs --horovod and the package index")
    archive = horovod_signatures.download(tmp_path)
    assert horovod_signatures.extract(archive) == horovod_signatures.FILE.read_text()
