"""Rooms import one way, passes do not import each other, rules know no mesh."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import onnxpar
import onnxpar.training

ROOT = Path(__file__).parents[1]
ROOMS = tuple(re.findall(r"^(\w+)  +\S", onnxpar.__doc__ or "", re.MULTILINE))
"""From the lowest, as the package's docstring lists them."""


def modules() -> Iterator[tuple[str, Path]]:
    """Every module of the package by its name below onnxpar."""
    for file in sorted((ROOT / "onnxpar").rglob("*.py")):
        yield ".".join(file.relative_to(ROOT / "onnxpar").with_suffix("").parts), file
    for file in sorted((ROOT / "passes").rglob("*.py")):
        yield ".".join(("passes", *file.relative_to(ROOT / "passes").with_suffix("").parts)), file


_IMPORT = re.compile(r"^ *from onnxpar([\w.]*) import (\([^)]*\)|.*)$", re.MULTILINE)


@cache
def imports(file: Path) -> tuple[str, ...]:
    """The onnxpar modules that a file imports, also for types alone, by name below onnxpar."""
    return tuple(_imports(file.read_text()))


def _imports(source: str) -> Iterator[str]:
    for match in _IMPORT.finditer(source):
        base = match[1].removeprefix(".")
        for name in re.findall(r"(\w+)(?: as \w+)?", re.sub(r"#.*", "", match[2])):
            inner = f"{base}.{name}".removeprefix(".")
            path = ROOT / "onnxpar" / Path(*inner.split("."))
            is_module = path.with_suffix(".py").exists() or path.is_dir()
            yield inner if is_module else base


OUTSIDE = ("__init__", "__main__", "training.__init__", "cli.__init__")
"""Entrances: they import what users import from there."""


def test_rooms_import_one_way() -> None:
    for module, file in (m for m in modules() if m[0] not in OUTSIDE):
        here = ROOMS.index(module.split(".")[0])
        above = [n for n in imports(file) if n and ROOMS.index(n.split(".")[0]) > here]
        assert not above, f"{module} imports {above} from rooms below"


def test_each_folder_is_a_room() -> None:
    folders = {m.split(".")[0] for m, _ in modules()} - {"__init__", "__main__"}
    assert folders == set(ROOMS)


def test_passes_do_not_import_each_other() -> None:
    for module, file in modules():
        if module.startswith("passes."):
            others = {n for n in imports(file) if n.startswith("passes.")}
            assert not others, f"{module} imports {others}"


def test_rules_know_no_mesh() -> None:
    for module, file in modules():
        if module.startswith("rules."):
            assert "layout.mesh" not in set(imports(file)), module


def test_tests_alone_use_the_machinery_of_tests() -> None:
    for module, file in modules():
        if not module.startswith("testing."):
            assert not [n for n in imports(file) if n.startswith("testing")], module


BELOW = {"base", "graph", "layout", "runtime"}


def test_the_runtime_knows_no_passes() -> None:
    for module, file in modules():
        if module.startswith("runtime."):
            known = {n.split(".")[0] for n in imports(file)}
            assert known <= BELOW, (module, known)
