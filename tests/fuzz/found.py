"""The corpus: files that the fuzzer kept, one for each message that it has seen."""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from fuzz.configurations import MERGE
from fuzz.corpus import FOUND
from fuzz.models import WAYS, case_of
from fuzz.trial import SESSION, Case, Outcome

MOST = 4096
"""Bytes of a file that is kept."""
KINDS: Mapping[str, tuple[str, list[str]]] = {
    "strategy": ("s.yaml", ["plan", "m.onnx", "--strategy", "s.yaml"]),
    "topology": ("t.yaml", ["plan", "m.onnx", "--devices", "4", "--topology", "t.yaml"]),
    "annotations": ("a.onnx", ["plan", "a.onnx"]),
    "arrays": ("in.npz", ["train", "step.par", "--data", "in.npz", "--lr", "0.1"]),
    "checkpoint": ("checkpoint.json", MERGE),
    "plan-m": ("m.par/plan.json", [SESSION, "m.par"]),
    "plan-open": ("open.par/plan.json", [SESSION, "open.par"]),
    "plan-step": ("step.par/plan.json", ["inspect", "step.par"]),
    "plan-llm": ("llm.par/plan.json", ["inspect", "llm.par"]),
}
"""For each kind but models: the file whose place it takes, and a command that reads it."""


def cases() -> list[Path]:
    """The files of the corpus."""
    return sorted(file for file in FOUND.glob("*/*") if file.is_file())


def case(file: Path, base: Path, folder: Path) -> Case:
    """Tries a file of the corpus again, among the files that `make_base` has made."""
    if file.parent.name == "model":
        return case_of(Path(shutil.copy(file, folder / "m.onnx")), WAYS[0])
    place, arguments = KINDS[file.parent.name]
    for name in {"m.onnx", *arguments} & {each.name for each in base.iterdir()}:
        copy = shutil.copytree if (base / name).is_dir() else shutil.copy
        copy(base / name, folder / name)
    if file.parent.name == "checkpoint":
        (step,) = (folder / "checkpoints").glob("step_*")
        place = f"checkpoints/{step.name}/{place}"
    shutil.copy(file, folder / place)
    return Case(arguments, lambda: "")


def keeper(folder: Path) -> Callable[[Outcome, str, Path], None]:
    """Returns a function that copies the broken file of a case to `folder`, if no file there caused
    the same message."""

    def keep(outcome: Outcome, kind: str, file: Path) -> None:
        said = (outcome.fault or outcome.said).partition("\n")[0]
        if not said.strip() or file.stat().st_size > MOST:
            return
        name = hashlib.sha256(_alike(said).encode()).hexdigest()[:8]
        target = folder / kind / f"{name}{_suffix(kind)}"
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, target)

    return keep


def _suffix(kind: str) -> str:
    return Path(KINDS[kind][0]).suffix if kind in KINDS else ".onnx"


def _alike(message: str) -> str:
    """A message without what differs among those of one place in the code."""
    return re.sub(r"'[^']*'|\"[^\"]*\"|[\[({].*[\])}]|[\w.]*[/\d][\w./]*", "_", message)
