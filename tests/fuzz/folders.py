"""Cases of broken folders: sharded models and checkpoints with a file that is damaged, cut, gone,
or something else than a file."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import onnx
from fuzz.configurations import MERGE, damaged, plan_kind, spoiled
from fuzz.mutate import mutated
from fuzz.trial import SESSION, Case, chance_of

from onnxpar.base.digests import digests_of, sealed

LISTS = {"par": "plan.json", "checkpoints": "checkpoint.json"}
"""The file that lists all others, with their digests."""
_INSPECTED = (["inspect"], ["inspect", "--verify"])
_RUN = ([SESSION], [SESSION], *_INSPECTED)
WAYS: dict[str, tuple[list[str], ...]] = {
    "m.par": _RUN,
    "open.par": _RUN,
    "step.par": _INSPECTED,
    "llm.par": (["generate", "import", "--max-new-tokens", "2", "--timeout", "20"], *_INSPECTED),
}
"""What reads each sharded model of `make_base`: a command, and what follows the folder."""
HUGE = 1 << 34
"""Bytes of a file with a hole, more than a command may have in memory."""


class Folders:
    """The cases of one seed, of files that `make_base` has made."""

    def __init__(self, seed: int, base: Path) -> None:
        self.seed, self.base = seed, base

    def __call__(self, number: int, folder: Path) -> Case:
        chance = chance_of("folder", self.seed, number)
        return chance.choices((_bundle, _checkpoint), (3, 2))[0](self.base, folder, chance)


def _bundle(base: Path, folder: Path, chance: random.Random) -> Case:
    """A sharded model is inspected, or run."""
    name = chance.choice(tuple(WAYS))
    shutil.copytree(base / name, folder / name)
    file = chance.choice(sorted((folder / name).iterdir()))
    is_renewed = _break(file, chance, LISTS["par"])
    command, *rest = chance.choice(WAYS[name])
    reads_all = [command, *rest] != ["inspect"]
    unseen = is_renewed or (not reads_all and file.name != LISTS["par"])
    kept = (plan_kind(name), file) if file.name == LISTS["par"] and file.is_file() else None
    return Case(
        [command, name, *rest],
        lambda: "" if unseen else _accepted(file, base / name / file.name),
        kept if kept is not None and file.stat().st_size < HUGE else None,
    )


def _checkpoint(base: Path, folder: Path, chance: random.Random) -> Case:
    """The weights of a checkpoint are put into the model."""
    shutil.copytree(base / "checkpoints", folder / "checkpoints")
    shutil.copy(base / "m.onnx", folder)
    (step,) = (folder / "checkpoints").glob("step_*")
    file = chance.choice(sorted(step.iterdir()))
    is_renewed = _break(file, chance, LISTS["checkpoints"])
    original = base / "checkpoints" / step.name / file.name
    return Case(
        MERGE,
        lambda: "" if is_renewed else _accepted(file, original),
    )


def _accepted(file: Path, original: Path) -> str:
    """What is wrong where a folder was accepted: a file of it is not as it was written."""
    if file.name.startswith("rank_") and not os.path.lexists(file):
        return ""  # as if written for other ranks alone
    if file.is_file() and file.stat().st_size < HUGE and file.read_bytes() == original.read_bytes():
        return ""
    return f"accepted: {file.parent.name}/{file.name} is not as it was written"


def _break(file: Path, chance: random.Random, listing: str) -> bool:
    """Breaks a file. Half of the files that are damaged within get new digests, as if they had been
    written so; returns whether this one did."""
    if chance.random() < 0.2:
        chance.choice(instead)(file)
        return False
    before = file.read_bytes()
    if file.suffix == ".json" and chance.random() < 0.7:
        file.write_text(json.dumps(spoiled(json.loads(before), chance)))
    elif file.suffix == ".onnx" and chance.random() < 0.7:
        file.write_bytes(mutated(onnx.load(file, load_external_data=False), chance))
    else:
        file.write_bytes(_other_bytes(before, chance))
    return chance.random() < 0.5 and renew(file, file.parent / listing)


def _other_bytes(before: bytes, chance: random.Random) -> bytes:
    way = chance.random()
    if not before or way < 0.15:
        return before + bytes(chance.randrange(1, 9))
    if way < 0.3:
        return before[: chance.randrange(len(before))]
    return damaged(before, chance)


def renew(file: Path, listing: Path) -> bool:
    """Puts the digests of a file into the list, and seals the list; returns whether it could."""
    try:
        data = json.loads(listing.read_bytes())
        if file != listing:
            data["files"].update(digests_of([file]))
        listing.write_text(sealed(data))
    except (ValueError, TypeError, KeyError, AttributeError):
        return False
    return True


def _gone(file: Path) -> None:
    file.unlink()


def _folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def _pipe(file: Path) -> None:
    """Whoever opens it waits for a writer."""
    file.unlink()
    os.mkfifo(file)


def _endless(file: Path) -> None:
    file.unlink()
    file.symlink_to("/dev/zero")


def _loop(file: Path) -> None:
    file.unlink()
    file.symlink_to(file.name)


def _huge(file: Path) -> None:
    os.truncate(file, HUGE)


def _of_another(file: Path) -> None:
    """The file has the content of another one, of another rank where there is one."""
    others = [other for other in file.parent.iterdir() if other != file and other.is_file()]
    alike = [other for other in others if other.name[9:] == file.name[9:]]
    file.write_bytes(min(alike or others).read_bytes())


instead: tuple[Callable[[Path], None], ...] = (
    _gone, _folder, _pipe, _endless, _loop, _huge, _of_another,
)  # fmt: skip
