"""Refuses to write a file that the same command also reads, or to write one file twice.

Imports the compiler only for commands on a model, so that `run` does not wait for it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeGuard

from onnxpar.base.errors import InputError, ModelError

READ = {
    "api_key_file": "the file of API keys",
    "config": "the file of --config",
    "hostfile": "the file of hosts",
    "tls_dir": "the folder of certificates",
    "audio": "the file of --audio",
    "file": "the file of --file",
    "model": "the model",
    "step": "the file of --step",
    "strategy": "the file of --strategy",
    "topology": "the file of --topology",
    "inputs": "the file of --inputs",
    "data": "the file of --data",
    "eval": "the file of --eval",
    "compare": "the file of --compare",
    "weights": "the weights of --weights",
    "libraries": "a library of --library",
}
"""Options that name a file to read, and words for that file in errors."""
WRITTEN = {
    "output": "-o",
    "outputs": "--outputs",
    "html": "--html",
    "save_strategy": "--save-strategy",
    "profile": "--profile",
    "keep": "--keep",
    "csv": "--csv",
}
"""Options that name a file to write, and their flags."""
DATA = ("data", "eval")
"""Options that may also name a folder, and whose files are then all read."""


def refuse_overwriting(options: Mapping[str, Any]) -> None:
    """Checks the files that the options of a command or call name. Errors: InputError if a file to
    write is also read, or is written twice, or if a dump would remove or replace files of the
    model."""
    uses = dict(_read(options))
    written = {WRITTEN[name]: path for name, path in _files(options, WRITTEN)}
    for flag, path in written.items():
        place = _place(path)
        if place in uses:
            raise InputError(f"{path} is {uses[place]}; give another file with {flag}")
        if place.is_file() and any(_place(f) in place.parents for _, f in _files(options, DATA)):
            raise InputError(f"{path} is a file of training data; give another file with {flag}")
        if _has_weights(path, options):
            raise InputError(f"{path} has weights of the model; give another file with {flag}")
        if not path.exists() or path.is_file():  # /dev/null may be given twice
            uses[place] = f"also the file of {flag}"
    model, dump = options.get("model"), options.get("dump")
    if _is_path(model) and dump is not None:
        from onnxpar.planner.dump import DUMPED, WEIGHTS

        is_dump = fnmatchcase(Path(model).name, DUMPED) and _place(Path(model).parent) == _place(
            Path(dump)
        )
        if is_dump or _has_weights(Path(dump) / WEIGHTS, options):
            raise InputError(
                f"--dump {os.fspath(dump)}: a dump replaces files of the model, which is in that "
                "folder; give another folder"
            )


def _read(options: Mapping[str, Any]) -> Iterator[tuple[Path, str]]:
    for name, path in _files(options, READ):
        yield _place(path), f"{READ[name]} itself" if name == "model" else READ[name]


def _files(options: Mapping[str, Any], names: Iterable[str]) -> Iterator[tuple[str, Path]]:
    for name in names:
        value = options.get(name)
        for item in value if isinstance(value, (list, tuple)) else [value]:
            if _is_path(item):
                yield name, Path(item)


def _is_path(value: Any) -> TypeGuard[str | os.PathLike[str]]:
    return isinstance(value, (str, os.PathLike))


def _place(path: Path) -> Path:
    return Path(os.path.realpath(path))


def _has_weights(file: Path, options: Mapping[str, Any]) -> bool:
    """True if the file exists and holds external data of the model."""
    model = options.get("model")
    if not _is_path(model) or not file.is_file():
        return False
    from onnxpar.graph.stored import external_location, stored_tensors
    from onnxpar.load.read_file import read_proto

    folder, place = Path(model).parent, _place(file)
    with suppress(ModelError):  # the command itself reports it
        tensors = stored_tensors(read_proto(Path(model)).graph)
        stored = (external_location(t)[0] for t in tensors if t.data_location == t.EXTERNAL)
        return any(_place(folder / name) == place for name in stored)
    return False
