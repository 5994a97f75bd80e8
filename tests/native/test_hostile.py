"""Damaged frames, false peers and false hubs: an error at most, and never the end of a process.

`pytest tests/native/test_hostile.py --frames 1000` sends more of them.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from onnxpar.base.errors import RankError
from onnxpar.runtime.ranks import collectives
from onnxpar.runtime.ranks.groups import World

TESTS = Path(__file__).parent.parent


def hostile(case: str, kind: str = "", count: int = 0, seed: int = 1) -> tuple[Any, str]:
    """What `native.hostile` prints of a case, and what the native library says meanwhile."""
    done = subprocess.run(
        [sys.executable, "-m", "native.hostile", case, kind, str(count), str(seed)],
        cwd=TESTS,  # not the checkout, which Python would import from
        capture_output=True,
        text=True,
        timeout=60 + count,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["random", "mutated"])
def test_frames_of_a_rank(kind: str, frames: int) -> None:
    """The other ranks' collectives go on, and the world begins anew when it is interrupted."""
    found, said = hostile("joined", kind, frames)
    assert found["sent"] == frames
    assert found["checks"] == frames // 20
    assert found["skipped"] < frames / 2, "frames by which a rank may end the world"
    assert found["grown"] < 100
    [line] = re.findall(r"onnxpar: .*", said)
    assert re.match(r"onnxpar: rank 2 \(pid \d+\) has sent a malformed message, which is", line)


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["random", "mutated"])
def test_frames_of_strangers(kind: str, frames: int) -> None:
    found, said = hostile("strangers", kind, frames)
    assert (found["sent"], found["checks"]) == (frames, frames // 20)
    assert found["taken"] == 0, "damaged handshakes"
    assert found["grown"] < 100
    assert said == ""


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["random", "mutated"])
def test_frames_of_a_false_hub(kind: str, frames: int) -> None:
    """A rank's world fails with the reason, and its process lives."""
    count = frames // 5
    found, _ = hostile("false_hub", kind, count)
    assert found["sent"] == count
    assert len(found["errors"]) >= found["worlds"] - 1 > 0
    reasons = (
        r"AllReduce: (rank 1 and rank 0 \(pid \d+\), which serves the control channel, use "
        r"different protocols: .+|the reason)"  # of a frame that was right after all
    )
    wrong = [error for error in found["errors"] if not re.fullmatch(reasons, error, re.DOTALL)]
    assert len(wrong) <= count / 10, wrong  # of a good frame, of which some letters differ
    assert len(found["errors"]) - len(wrong) > 0


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("kind, count", [("large", 120), ("small", 300)])
def test_strangers_that_never_end_their_hello(kind: str, count: int) -> None:
    """They get a few kB and seconds, and they are few."""
    found, _ = hostile("flood", kind, count)
    assert found["grown"] < 50
    assert found["open"] <= 128
    assert found["left"] == 0


@pytest.mark.slow
def test_a_rank_that_never_reads() -> None:
    found, _ = hostile("deaf", count=20_000)
    assert re.fullmatch(r"rank 1 \(pid 1\) does not read its messages", found["error"])
    assert found["grown"] < 200


@pytest.mark.slow
def test_a_hub_without_descriptors_says_so() -> None:
    found, _ = hostile("starved")
    assert re.search(
        r"rank 1 has not joined the world .*; the hub could not accept all ranks: this process has "
        r"used all its \d+ file descriptors; close files, or raise the limit \(ulimit -n\)",
        found["error"],
    )


@pytest.mark.parametrize("splits", [[2, -1], [-1, 4], [2**62, 2**62], [1, 2**63 - 1]])
def test_sizes_that_are_none(fresh_worlds: Callable[..., list[World]], splits: list[int]) -> None:
    """What a rank says it gives to others is no size, or more than can be."""
    world, false = fresh_worlds(2, timeout=5)
    x = np.ones((3, 4), np.float32)
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(collectives.all_to_all, false, x, splits)
        with pytest.raises(RankError, match=r"rank \d cannot run AllToAll: "):
            collectives.all_to_all(world, x, [1, 2])
        assert isinstance(other.exception(), RankError)
