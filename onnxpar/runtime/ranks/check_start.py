"""Checks, when ranks start, that all have the same, unchanged sharded model."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from onnxpar.base.digests import Block, check_blocks
from onnxpar.base.errors import ModelError, OnnxparError
from onnxpar.runtime.profile.profile import host_id
from onnxpar.runtime.ranks.collectives import gather_bytes
from onnxpar.runtime.ranks.groups import World
from onnxpar.runtime.session.bundle import Bundle
from onnxpar.runtime.session.bundle_files import WRITE_AGAIN

E = TypeVar("E", bound=OnnxparError)
ROUND = 256
"""The number of blocks that a rank checks between two exchanges, so that ranks that wait do not
time out."""


def check_start(bundle: Bundle, world: World, whole: bool) -> None:
    """Checks the files that a rank reads: samples of large files, or with `whole` every byte. All
    ranks call this; ranks that read the same folder divide the work on files that several of them
    read.

    Errors: ModelError; with the same text on all ranks after a `whole` check, and if ranks have
    different models.
    """
    if not whole:
        bundle.files.check_samples(world.rank)
    own = {**place_of(bundle.path), "digest": bundle.digest, "whole": whole}
    each = exchange(world, own, "plan.json")
    check_same(bundle.path, each)
    if any(rank["whole"] for rank in each):
        fault, blocks = "", list[Block]()
        if whole:
            fault = _fault_of(bundle, world.rank)
            beside = [r for r, e in enumerate(each) if e["whole"] and e["folder"] == own["folder"]]
            blocks = [] if fault else bundle.files.share(world.rank, beside)
        check_together(bundle.path, world, blocks, each, fault)


def check_same(path: Path, each: Sequence[Mapping[str, Any]]) -> None:
    """Raises a ModelError, on all ranks with the same text, if the ranks have different plans.
    `each` has the digest of each rank's plan, and its host."""
    odd = next((r for r, own in enumerate(each) if own["digest"] != each[0]["digest"]), None)
    if odd is not None:
        first, other = (
            f"{each[r]['digest'][:8]} on rank {r} (host {each[r]['host']})" for r in (0, odd)
        )
        text = (
            f"{path}: the ranks disagree on the model: the SHA-256 of plan.json begins with "
            f"{first} and {other}; copy the same folder to all hosts, or shard the same model with "
            "the same options and the same onnxpar on each"
        )
        raise common(ModelError(text))


def common(error: E) -> E:
    """Marks an error as one that all ranks raise, so that no rank says that another has failed;
    returns the error."""
    error.is_common = True
    return error


def check_together(
    path: Path,
    world: World,
    blocks: Sequence[Block],
    each: Sequence[Mapping[str, Any]],
    fault: str = "",
) -> None:
    """Compares blocks of the folder's files with their digests; each rank compares its own
    `blocks`.

    each   for each rank, a mapping with its `host`, for the error
    fault  an error that this rank already knows of, and tells the others; empty: none

    Errors: ModelError, on all ranks with the same text, if a block of any rank differs.
    """
    at = 0
    while True:
        fault = fault or _changed(path, blocks[at : at + ROUND])
        at += ROUND
        told = exchange(world, {"fault": fault, "goes_on": at < len(blocks)}, "digests")
        odd = next((rank for rank, own in enumerate(told) if own["fault"]), None)
        if odd is not None:
            is_one_host = len({own["host"] for own in each}) == 1
            where = f"rank {odd}" + ("" if is_one_host else f" (host {each[odd]['host']})")
            raise common(ModelError(f"{where} failed: {told[odd]['fault']}"))
        if not any(own["goes_on"] for own in told):
            return


def place_of(folder: Path) -> dict[str, Any]:
    """Returns {"host": the name of this host, "folder": an identifier of the folder}; ranks that
    see the same folder on one host have equal identifiers."""
    try:
        status = os.stat(folder)
        identity = [host_id(), status.st_dev, status.st_ino]
    except OSError:
        identity = [host_id(), os.fspath(folder)]
    return {"host": socket.gethostname(), "folder": identity}


def exchange(world: World, own: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """Returns the `own` of each rank, by rank, sent as JSON. Errors: RankError if the collective
    fails."""
    return [json.loads(text) for text in gather_bytes(world, json.dumps(own).encode(), name)]


def _fault_of(bundle: Bundle, rank: int) -> str:
    """Returns the text of an error if files of the folder have wrong names or sizes; empty if all
    are right."""
    try:
        bundle.files.check_listed()
        bundle.files.check_sizes(bundle.files.of(rank))
    except ModelError as error:
        return str(error)
    return ""


def _changed(path: Path, blocks: Sequence[Block]) -> str:
    """Returns the text of an error if one of these blocks has changed; empty if none has."""
    try:
        check_blocks(path, blocks, WRITE_AGAIN)
    except ModelError as error:
        return str(error)
    return ""
