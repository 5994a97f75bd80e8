"""The files of a sharded model as its plan lists them: which ranks read which file, and whether
files are unchanged."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from onnxpar.base.bundle_names import ENCODER_PART, PLAN, inner_path, is_own, owner_of, rank_name
from onnxpar.base.digests import Block, Digests, blocks_of, check_files, check_size
from onnxpar.base.errors import ModelError
from onnxpar.base.unreadable import cannot_read

_ENCODER = f"{ENCODER_PART}/{PLAN}"
WRITE_AGAIN = "write the folder again with `onnxpar shard`, or copy it again"


@dataclass(frozen=True)
class BundleFiles:
    """The files in the folder of a sharded model.

    listed  for each file except plan.json, by name: its digests and, unless all ranks read it, the
            `ranks` that do
    size    the number of ranks
    """

    folder: Path
    listed: Mapping[str, Digests]
    size: int

    def of(self, rank: int) -> dict[str, Digests]:
        """Returns the files that a rank reads, with their digests."""
        return {name: each for name, each in self.listed.items() if rank in self._readers(name)}

    @cached_property
    def absent(self) -> list[int]:
        """The ranks of whose own files the folder has none, because it was written for other
        ranks."""
        return [rank for rank in range(self.size) if not any(map(self._names, self._alone(rank)))]

    def has(self, name: str) -> bool:
        """True if the folder has a file of this name."""
        return (self.folder / name).is_file()

    def path(self, name: str) -> Path:
        """Returns the path of a file. Errors: ModelError if it is missing, naming the ranks that
        have no files in the folder."""
        path = self.folder / name
        if path.is_file():
            return path
        if not self.absent or len(self.absent) == self.size:
            raise ModelError(
                f"{self.folder} lacks {name}, though its plan has {self.size} ranks; {WRITE_AGAIN}"
            )
        raise ModelError(
            f"{self.folder} lacks {name}: it has no files of {ranks_text(self.absent)} of its "
            f"{self.size} ranks; start all ranks where their files are, with a launcher such as "
            f"mpirun, or add these with `onnxpar shard --ranks {','.join(map(str, self.absent))}`"
        )

    def check_complete(self) -> None:
        """Raises a ModelError if the ONNX file of a rank is missing, or if a file has another size
        than listed."""
        for rank in range(self.size):
            self.path(rank_name(rank, "onnx"))
        self.check_sizes(self.listed)

    def check_sizes(self, names: Iterable[str]) -> None:
        """Raises a ModelError if a file is missing, is a link out of the folder, or has another
        size than listed."""
        for name in names:
            self.path(name)
            check_size(inner_path(self.folder, name), self.listed[name], WRITE_AGAIN)

    def check_samples(self, rank: int) -> None:
        """Raises a ModelError if files that a rank reads have changed; of large files, compares
        only samples."""
        self._check(self.of(rank), whole=False)

    def check_whole(self) -> None:
        """Compares every byte of the files in the folder, which may be files of some ranks only,
        with the digests. Errors: ModelError if a file is damaged, missing, or not listed."""
        self.check_listed()
        here = [rank for rank in range(self.size) if rank not in self.absent]
        self._check({n: each for rank in here for n, each in self.of(rank).items()}, whole=True)

    def check_listed(self) -> None:
        """Raises a ModelError if the plan has no digests, or if the folder has a file that the plan
        does not list, under a name that ranks read."""
        if not self.listed:
            raise ModelError(
                f"{self.folder} carries no digests, so its files cannot be verified; shard the "
                "model again with this onnxpar"
            )
        is_old = not any("ranks" in each for each in self.listed.values())  # has no such entry
        known = {PLAN, *self.listed, *([ENCODER_PART] if is_old or _ENCODER in self.listed else [])}
        try:
            paths = sorted(self.folder.iterdir())
        except OSError as error:
            raise ModelError(cannot_read(self.folder, error, WRITE_AGAIN)) from None
        for path in paths:
            if path.name not in known and (is_own(path.name) or path.name == ENCODER_PART):
                raise ModelError(
                    f"{path} is not in the list of files of plan.json; remove it, or {WRITE_AGAIN}"
                )

    def share(self, rank: int, beside: Iterable[int]) -> list[Block]:
        """Returns the blocks that a rank has to check if the ranks `beside`, itself included, read
        the same folder: all blocks that only this rank reads, and its share of the blocks that
        several of them read."""
        ranks, blocks = [*beside], list[Block]()
        for name, digests in self.of(rank).items():
            readers = [r for r in ranks if r in self._readers(name)]
            blocks += blocks_of({name: digests})[readers.index(rank) :: len(readers)]
        return blocks

    def _check(self, wanted: Mapping[str, Digests], whole: bool) -> None:
        """Compares these files with their digests, whole or by samples. Errors: ModelError if a
        file differs."""
        self.check_sizes(wanted)
        check_files(self.folder, wanted, whole, WRITE_AGAIN)

    def _names(self, name: str) -> bool:
        """True if the folder has an entry of this name, even a broken link."""
        return os.path.lexists(self.folder / name)

    def _alone(self, rank: int) -> list[str]:
        """The names of the files that only this rank reads."""
        return [name for name in self.listed if [*self._readers(name)] == [rank]]

    def _readers(self, name: str) -> Iterable[int]:
        """Returns the ranks that read a file. Older plans do not list the ranks of weights: there,
        all ranks read them."""
        owner = owner_of(name)
        ranks: Iterable[int] | None = self.listed[name].get("ranks")
        if ranks is not None:
            return ranks
        return range(self.size) if owner is None else [owner]


def ranks_text(ranks: Sequence[int]) -> str:
    """Returns ranks as text: "rank 3", "ranks 2 and 3", "ranks 1, 2 and 3"."""
    *others, last = map(str, ranks)
    return f"ranks {', '.join(others)} and {last}" if others else f"rank {last}"
