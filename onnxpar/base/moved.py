"""Documented modules that have moved: their old names still work, with a DeprecationWarning."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.abc import Loader
else:
    Loader = object  # importlib.abc takes longer to import than the rest of this module

MOVED = {
    "onnxpar.pass_order": "onnxpar.pipeline.placed_passes",
    "onnxpar.passes.pass_": "onnxpar.compiler.pass_",
    "onnxpar.rules.case": "onnxpar.testing.case",
    "onnxpar.rules.proof": "onnxpar.testing.proof",
    "onnxpar.trace": "onnxpar.runtime.trace",
    "onnxpar.training.data": "onnxpar.trainer.data",
    "onnxpar.training.loop": "onnxpar.trainer.loop",
    "onnxpar.training.merge": "onnxpar.trainer.merge",
    "onnxpar.training.trainer": "onnxpar.trainer.trainer",
}


class _MovedModule(ModuleType):
    """The module that an old name refers to. Importing `onnxpar.training.merge` replaces the
    function `merge` in `onnxpar.training` by this module, so the module can be called like the
    function."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        """Calls the function in the module that has the module's name."""
        return vars(self)[self.__name__.rpartition(".")[2]](*args, **options)


class _MovedModules(Loader):
    """Imports old names; the module of an old name has the attributes of the new module."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of an old name; None for other names."""
        return ModuleSpec(fullname, self) if fullname in MOVED else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """An empty module, which `exec_module` fills."""
        return _MovedModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Copies the attributes of the new module into the old one, and warns that the old name is
        deprecated."""
        new = MOVED[module.__name__]
        warnings.warn(f"{module.__name__} is now {new}", DeprecationWarning, stacklevel=2)
        found = vars(importlib.import_module(new))
        module.__doc__ = found["__doc__"]
        vars(module).update({k: v for k, v in found.items() if not k.startswith("__")})


def find_moved_modules() -> None:
    """Makes the old names importable."""
    if not any(isinstance(finder, _MovedModules) for finder in sys.meta_path):
        sys.meta_path.append(_MovedModules())
