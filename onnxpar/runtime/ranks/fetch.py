"""Copies files of a sharded model from ranks that have them to ranks that lack them.

All ranks exchange lists of their files, and compute the same transfers. Files arrive under
temporary names, are compared with the digests of the plan, and get their names once all have
arrived.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from onnxpar.base.bundle_names import ENCODER_PART, PLAN, inner_path, is_own
from onnxpar.base.digests import Block, blocks_of
from onnxpar.base.errors import ModelError, RankError
from onnxpar.base.own_folder import OwnFolder
from onnxpar.base.units import text_of
from onnxpar.base.write_file import cause, new_file, sync_folder
from onnxpar.runtime.ranks.check_start import check_same, check_together, common, exchange, place_of
from onnxpar.runtime.ranks.collectives import barrier, broadcast
from onnxpar.runtime.ranks.file_traffic import FileTraffic
from onnxpar.runtime.ranks.groups import World
from onnxpar.runtime.ranks.redirect import tell_terminal
from onnxpar.runtime.ranks.transfers import Transfer, planned
from onnxpar.runtime.session.bundle import Bundle, read_plan
from onnxpar.runtime.session.bundle_files import ranks_text

PREFIX = ".onnxpar-fetch-"
"""Prefix of the names of folders in which files arrive."""
Told = Sequence[Mapping[str, Any]]
"""A message of each rank to all others, by rank."""


def complete(path: Path, world: World) -> Bundle:
    """Returns the sharded model in the folder `path`, after fetching the files that this rank lacks
    from other ranks. All ranks of the world call this. Rank 0 prints what is fetched.

    Errors: ModelError if a file cannot be fetched; RankError if a rank is lost. Even after an
    error, each file in the folder is complete.
    """
    text = _text(path)
    own = Bundle.of(path, text) if text else None
    lacks = own is None or not all(map(own.files.has, own.files.of(world.rank)))
    known = {"digest": own.digest if own else "", "bytes": len(text), "lacks": lacks}
    each = exchange(world, {**place_of(path), "path": os.fspath(path), **known}, "files")
    root = next((rank for rank, told in enumerate(each) if told["digest"]), None)
    if root is None:
        try:
            read_plan(path)  # says what is wrong with it
        except ModelError as error:
            raise common(error) from None
        raise RankError(f"{path / PLAN} appeared just now; start again")
    check_same(path, [{**told, "digest": told["digest"] or each[root]["digest"]} for told in each])
    if not all(told["digest"] for told in each):
        text = _sent_text(text, each[root]["bytes"], root, world)
    bundle = own or Bundle.of(path, text)
    check_same(path, [{**each[root], "digest": d} for d in (each[root]["digest"], bundle.digest)])
    if bundle.mesh.size != world.size:
        what = (
            f"{path} has {bundle.mesh.size} ranks, but {world.size} processes were started; start "
            f"{bundle.mesh.size}, as with mpirun -n or launch --hosts, or shard the model for "
            f"{world.size}"
        )
        raise common(RankError(what))
    if any(told["lacks"] for told in each):
        with ExitStack() as stack:
            _Fetch(bundle, world, each, stack).run(text)
    return bundle


def _text(path: Path) -> bytes:
    """Returns the text of plan.json in a folder; empty if there is none. Errors: ModelError for a
    folder with other content, which must not get files of a sharded model."""
    if path.is_file() or (path / PLAN).is_file():
        return read_plan(path)
    for each in path.iterdir() if path.is_dir() else ():
        if not (is_own(each.name) or each.name == ENCODER_PART or each.name.startswith(".")):
            raise ModelError(
                f"{path} is not a sharded model: it has no plan.json, and contains {each.name!r}; "
                "give the path of one, or that of a new folder to fetch it to"
            )
    return b""


def _sent_text(text: bytes, size: int, root: int, world: World) -> bytes:
    """Sends the text of plan.json, of `size` bytes, from rank `root` to all ranks; returns it."""
    data = np.frombuffer(text, np.uint8) if world.rank == root else np.empty(size, np.uint8)
    return broadcast(world, data, root, PLAN).tobytes()


class _Fetch:
    """Fetches the files of one sharded model; all ranks make the same calls.

    each   for each rank: its host, its path, and whether it lacks files
    stack  closes the folder for arriving files

    Two attributes describe all ranks: `_told` has the files that each rank has and needs, and the
    name of its folder for arriving files (empty: it lacks nothing); `_places` has, for each rank
    that lacks files, the ranks that see the same folder.
    """

    def __init__(self, bundle: Bundle, world: World, each: Told, stack: ExitStack) -> None:
        self._bundle, self._files, self._world, self._each = bundle, bundle.files, world, each
        self._path, self._rank = bundle.path, world.rank
        self._lacks = bool(each[self._rank]["lacks"])
        self._stack = stack
        self._folder = self._new_folder() if self._lacks else None
        own = self._files.of(self._rank)
        self._told = exchange(
            world,
            {
                "has": [name for name in self._files.listed if self._has(name)],
                "needs": [name for name in own if not self._files.has(name)],
                "folder": self._folder.name if self._folder else "",
            },
            "files",
        )
        self._places = self._same_places()

    def run(self, text: bytes) -> None:
        """Fetches the missing files, and gives them their names; `text` is the text of plan.json.
        Errors: ModelError if a file cannot be fetched; RankError if a rank is lost."""
        transfers = self._transfers()
        mine = [one for one in transfers if self._rank in one.receivers]
        self._check_room(sum(one.bytes for one in mine))
        check_together(self._path, self._world, self._kept(), self._each)
        start = time.monotonic()
        if self._rank == 0:
            self._tell(transfers)
        try:
            ends = [self._end(rank) for rank in range(self._world.size)]
            with FileTraffic(self._files, self._world, self._folder, ends) as traffic:
                traffic.move(transfers)
            barrier(self._world, "all files have arrived")
            self._give_names([one.name for one in mine])
            barrier(self._world, "all files have their names")
            if self._leads and not self._each[self._rank]["digest"]:
                with new_file(self._path / PLAN) as file:
                    file.write_bytes(text)
            barrier(self._world, "the plan has its name")
        except OSError as error:
            raise ModelError(f"cannot write {self._path}: {cause(error)}") from error
        if self._rank == 0 and transfers:
            total = sum(one.bytes * len(one.receivers) for one in transfers)
            tell_terminal(f"fetched {text_of(total, 'B')} in {time.monotonic() - start:.1f} s")

    @property
    def _leads(self) -> bool:
        """True if this rank is the first of the ranks that share its folder and lack files
        there."""
        return self._lacks and self._places[self._rank][0] == self._rank

    def _has(self, name: str) -> bool:
        """True if this rank has a complete file of this name, which it can send."""
        try:
            self._files.check_sizes([name])
        except ModelError:
            return False
        return True

    def _new_folder(self) -> Path:
        """Returns a new folder for arriving files, in the file system of the sharded model. Errors:
        ModelError if it cannot be made."""
        parent = self._path if self._path.is_dir() else self._path.absolute().parent
        try:
            return self._stack.enter_context(OwnFolder(PREFIX, parent))
        except OSError as error:
            text = f"cannot fetch {self._path}: cannot write {parent}: {cause(error)}"
            raise ModelError(text) from error

    def _same_places(self) -> list[list[int]]:
        """Returns for each rank the ranks that see the same folder: each looks which ranks' folders
        for arriving files lie beside its own folder for arriving files."""
        seen = -1
        if self._folder is not None:
            parent = self._folder.parent
            names = [os.path.basename(told["folder"]) for told in self._told]
            seen = next(r for r, name in enumerate(names) if name and (parent / name).is_dir())
        firsts = [told["seen"] for told in exchange(self._world, {"seen": seen}, "folders")]
        return [[r for r, own in enumerate(firsts) if own == first] for first in firsts]

    def _transfers(self) -> list[Transfer]:
        """Returns all transfers of missing files, equal on all ranks. Errors: ModelError if no rank
        has one of the files."""
        needs: dict[str, dict[int, list[int]]] = {}
        for rank, told in enumerate(self._told):
            for name in filter(self._files.listed.__contains__, told["needs"]):
                place = self._places[rank]
                needs.setdefault(name, {})[place[0]] = place
        holders = {
            name: [rank for rank, told in enumerate(self._told) if name in told["has"]]
            for name in needs
        }
        for name, owners in holders.items():
            if not owners:
                ranks = [rank for rank, told in enumerate(self._told) if name in told["needs"]]
                text = (
                    f"{self._path}: no rank has {name}, which {ranks_text(ranks)} "
                    f"({self._hosts(ranks)}) must read; write it with `onnxpar shard --ranks "
                    f"{','.join(map(str, ranks))}`, or copy it to one of the hosts"
                )
                raise common(ModelError(text))
        sizes = {name: int(self._files.listed[name]["bytes"]) for name in needs}
        return planned(sizes, holders, {name: [*places.values()] for name, places in needs.items()})

    def _kept(self) -> list[Block]:
        """Returns the blocks that this rank must check. If its folder lacks files, the files that
        it has are checked in full; ranks that share the folder divide the blocks."""
        if not self._lacks:
            return []
        place = self._places[self._rank]
        needed = {name for rank in place for name in self._told[rank]["needs"]}
        every = {n: digests for rank in place for n, digests in self._files.of(rank).items()}
        blocks = blocks_of({n: digests for n, digests in every.items() if n not in needed})
        return blocks[place.index(self._rank) :: len(place)]

    def _check_room(self, size: int) -> None:
        """Raises a ModelError if the file system has no room for the `size` bytes that this rank
        receives."""
        free = shutil.disk_usage(self._folder).free if self._folder else size
        if free < size:
            raise ModelError(
                f"cannot fetch {self._path}: it lacks {text_of(size, 'B')}, and the file system "
                f"has {text_of(free, 'B')} free"
            )

    def _tell(self, transfers: Sequence[Transfer]) -> None:
        """Prints which files go to which ranks."""
        for place in sorted({tuple(place) for place in self._places}):
            to = [one for one in transfers if not {*place}.isdisjoint(one.receivers)]
            if to:
                sources = sorted({one.source for one in to})
                files = f"{len(to)} files" if len(to) > 1 else "1 file"
                tell_terminal(
                    f"fetching {files} of {self._each[place[0]]['path']}, "
                    f"{text_of(sum(one.bytes for one in to), 'B')}, to {ranks_text(place)} "
                    f"({self._hosts(place)}) from {ranks_text(sources)} ({self._hosts(sources)})"
                )

    def _give_names(self, names: Sequence[str]) -> None:
        """Moves the files that have arrived to the folder of the sharded model."""
        if self._folder is None:
            return
        self._path.mkdir(exist_ok=True)
        for name in names:
            target = inner_path(self._path, name)
            target.parent.mkdir(exist_ok=True)
            os.replace(self._folder / name, target)
        sync_folder(self._path)

    def _host(self, rank: int) -> str:
        return str(self._each[rank]["host"])

    def _end(self, rank: int) -> str:
        """A rank and its host, for texts."""
        return f"rank {rank} (host {self._host(rank)})"

    def _hosts(self, ranks: Sequence[int]) -> str:
        """The hosts of these ranks, for texts: "host a", "hosts a, b"."""
        names = list(dict.fromkeys(map(self._host, ranks)))
        return f"host{'s' if len(names) > 1 else ''} {', '.join(names)}"
