"""Loads passes and sharding rules of plugins: modules by name or file, and entry points of
installed packages.

A module registers rules with `onnxpar.rules.rule.rule`, and passes by defining subclasses of
`Pass`. An installed package names them as entry points: `onnxpar.passes` (classes) and
`onnxpar.rules` (modules).
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType

from onnxpar.base.errors import OnnxparError, StrategyError
from onnxpar.base.unreadable import missing
from onnxpar.compiler.pass_ import Pass

PASSES, RULES = "onnxpar.passes", "onnxpar.rules"
"""Groups of entry points."""
_registered: dict[str, type[Pass]] = {}


def registered_passes() -> dict[str, type[Pass]]:
    """Returns the passes of plugins by name, passes of installed packages first."""
    load_entry_points()
    return dict(_registered)


def load_plugin(module: str) -> None:
    """Imports a module by its dotted name, or a file `x.py`, and registers its passes; rules
    register themselves. Errors: StrategyError that names the module and its mistake."""
    try:
        loaded = _from_file(Path(module)) if module.endswith(".py") else _from_name(module)
    except OnnxparError:
        raise
    except Exception as error:
        raise StrategyError(
            f"--plugin {module}: {type(error).__name__}: {error}; give a module that Python can "
            "import, or a file x.py"
        ) from error
    for kind in vars(loaded).values():
        if not (inspect.isclass(kind) and issubclass(kind, Pass)) or inspect.isabstract(kind):
            continue
        # A package may import its passes from its own modules.
        if f"{kind.__module__}.".startswith(f"{loaded.__name__}."):
            register_pass(kind)


def register_pass(kind: type[Pass]) -> None:
    """Registers a pass under its `name`. Errors: StrategyError if another pass has that name."""
    name = getattr(kind, "name", None)
    if not isinstance(name, str) or not name:
        raise StrategyError(f"{kind.__module__}.{kind.__qualname__}: a pass needs a `name`")
    present = _registered.setdefault(name, kind)
    if (present.__module__, present.__qualname__) != (kind.__module__, kind.__qualname__):
        raise StrategyError(
            f"two passes are called {name!r}: {present.__module__}.{present.__qualname__} and "
            f"{kind.__module__}.{kind.__qualname__}; rename one"
        )
    _registered[name] = kind


@cache
def load_entry_points() -> None:
    """Loads the entry points of installed packages, once per process. Errors: StrategyError that
    names the package."""
    for point in entry_points(group=RULES):
        _load(point)
    for point in entry_points(group=PASSES):
        kind = _load(point)
        if not (inspect.isclass(kind) and issubclass(kind, Pass)):
            raise StrategyError(
                f"entry point {point.name} = {point.value} is not a subclass of Pass"
            )
        register_pass(kind)


def _load(point: EntryPoint) -> object:
    try:
        return point.load()
    except Exception as error:
        package = point.dist.name if point.dist is not None else "a package"
        raise StrategyError(
            f"{package} adds {point.value} to {point.group}, which does not load: "
            f"{type(error).__name__}: {error}; upgrade or uninstall {package}"
        ) from error


def _from_name(module: str) -> ModuleType:
    """Imports a module by name; also looks in the working folder."""
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)
    return importlib.import_module(module)


def _from_file(path: Path) -> ModuleType:
    """Imports a module from a file; a second call for the same file returns the same module."""
    file = path.resolve()
    name = f"onnxpar_plugin_{path.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise StrategyError(f"--plugin: {missing(path)}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
