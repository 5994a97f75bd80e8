"""A sharded model takes the place of an old one at once, and of nothing else."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from committed import MODELS

from onnxpar.base import new_folder
from onnxpar.cli.command_line import main
from onnxpar.layout.mesh import Mesh
from onnxpar.planner import sharder
from onnxpar.planner.options import Options
from onnxpar.runtime.session.bundle import Bundle

MODEL = MODELS / "llama.dynamo.static.onnx"
OLD, NEW = (Options(mesh=Mesh.parse(m), preset="tensor-parallel") for m in ("tp=2", "tp=4"))
KILLED = 77
_CHANGES = ("os.rename", "os.link", "os.remove", "os.rmdir", "os.mkdir", "os.chmod", "os.truncate")


def digests(folder: Path) -> dict[str, str]:
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in folder.iterdir()}


def is_change(event: str, args: tuple[Any, ...], under: str) -> bool:
    """Whether Python is about to change a file below a folder."""
    names = [os.fsdecode(a) for a in args if isinstance(a, str | bytes)]
    if event == "open":
        return bool(names) and names[0].startswith(under) and bool(args[2] & os.O_ACCMODE)
    return event in _CHANGES and (any(n.startswith(under) for n in names) or not names)


def killed_at(number: int, under: Path, what: Callable[[], Any]) -> bool:
    """Runs in a child that dies before the file operation of this number; whether there is one."""
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        code = os.waitstatus_to_exitcode(status)
        assert code in (0, KILLED), code
        return code == KILLED
    left = [number]

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if is_change(event, args, os.fspath(under)):
            left[0] -= 1
            if left[0] < 0:
                os._exit(KILLED)

    sys.addaudithook(hook)
    code = 1
    try:
        what()
        code = 0
    finally:
        os._exit(code)


@pytest.mark.slow
@pytest.mark.parametrize("can_swap", [True, False])
def test_a_kill_at_any_file_operation_loses_nothing(
    can_swap: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old folder or the new one stands, whole; where names cannot be swapped, the next `shard`
    may have to put the old one back."""
    if not can_swap:
        monkeypatch.setattr(new_folder, "_exchange", lambda one, two: False)
    wanted = {}
    for name, how in (("old", OLD), ("new", NEW)):
        sharder.shard(MODEL, tmp_path / name, how)
        wanted[name] = digests(tmp_path / name)
    work = tmp_path / "work"
    work.mkdir()
    target = work / "model.par"
    planned = sharder.plan(MODEL, NEW)
    monkeypatch.setattr(sharder, "plan", lambda *given: planned)  # each child has its own
    number, seen = 0, set[bool]()
    while True:
        shutil.rmtree(work)
        work.mkdir()
        shutil.copytree(tmp_path / "old", target)
        if not killed_at(number, work, lambda: sharder.shard(MODEL, target, NEW)):
            break
        new_folder.check_place(target, lambda folder: None)
        found = digests(target)
        assert found in wanted.values()
        seen.add(found == wanted["new"])
        with suppress(KeyError), new_folder.new_folder(target, lambda folder: None):
            raise KeyError
        assert digests(target) == found
        assert [entry.name for entry in work.iterdir()] == ["model.par"]
        number += 1
    assert digests(target) == wanted["new"]
    assert number > 15 and seen == {True, False}
    print(f"{number} file operations")


@pytest.mark.slow
def test_where_the_old_one_went_is_told(tmp_path: Path) -> None:
    """After a kill between two names."""
    sharder.shard(MODEL, tmp_path / "model.par", OLD)
    (tmp_path / "model.par").rename(tmp_path / ".model.par.old.onnxpar")
    sharder.shard(MODEL, tmp_path / "model.par", NEW)
    assert Bundle.load(tmp_path / "model.par").mesh.size == 4
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.par"]


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("notes.txt", "precious", "contains 'notes.txt'"),
        ("rank_0007.onnx/x", "precious", "contains 'rank_0007.onnx'"),
        ("plan.json", "{}", "its plan.json was not written by onnxpar"),
        ("plan.json", '{"format": 1}', "its plan.json was not written by onnxpar"),
        ("plan.json", "precious", "is not a sharded model"),
    ],
)
def test_other_folders_are_never_replaced(
    name: str, content: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "model.par"
    sharder.shard(MODEL, target, OLD)
    (target / name).parent.mkdir(exist_ok=True)
    (target / name).write_text(content)
    before = sorted(target.rglob("*"))
    arguments = ["shard", str(MODEL), "--devices", "2", "-o", str(target)]
    assert main(arguments) == 2
    assert text in capsys.readouterr().err
    assert sorted(target.rglob("*")) == before and (target / name).read_text() == content


def test_what_came_while_ranks_were_written_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "model.par"
    sharder.shard(MODEL, target, OLD)
    made = sharder.plan

    def late(*given: Any) -> Any:
        (target / "notes.txt").write_text("precious")
        return made(*given)

    monkeypatch.setattr(sharder, "plan", late)
    with pytest.raises(Exception, match=r"contains 'notes\.txt'"):
        sharder.shard(MODEL, target, NEW)
    assert (target / "notes.txt").read_text() == "precious"
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.par"]


@pytest.mark.matrix
@pytest.mark.parametrize("output", [".", "..", "../model.par", "inner/.."])
def test_the_folder_one_stands_in_is_not_replaced(
    output: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    target = tmp_path / "model.par"
    sharder.shard(MODEL, target, OLD)
    (target / "inner").mkdir(exist_ok=output.startswith("inner"))
    if not output.startswith("inner"):
        (target / "inner").rmdir()
    monkeypatch.chdir(target)
    assert main(["shard", str(MODEL), "--devices", "2", "-o", output]) == 2
    assert "the command runs in that folder" in capsys.readouterr().err
    assert Bundle.load(target).mesh.size == 2


def test_an_empty_folder_and_a_link_to_a_sharded_model(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    sharder.shard(MODEL, tmp_path / "empty", OLD)
    (tmp_path / "link").symlink_to("empty")
    sharder.shard(MODEL, tmp_path / "link", NEW)
    assert (tmp_path / "link").is_symlink() and Bundle.load(tmp_path / "empty").mesh.size == 4
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["empty", "link"]


def test_a_folder_that_is_being_written_is_left_alone(tmp_path: Path) -> None:
    """Another process writes to the same place."""
    place = new_folder.check_place(tmp_path / "model.par", lambda folder: None)
    with new_folder.new_folder(place, lambda folder: None) as folder:
        os.utime(folder, (0, 0))
        sharder.shard(MODEL, place, OLD)
        (folder / "plan.json").write_text("{}")
    assert [entry.name for entry in place.iterdir()] == ["plan.json"]
