"""A process that is a rank of one world after another, over links that fail.

Each line that it reads is a world: what it should run there. For each it prints a line once all
ranks have met, and one when its work has ended: with right results, a wrong one, or an error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
from hosts.model_of_faults import expected, feeds

import onnxpar.hvd as hvd
from onnxpar.base.errors import OnnxparError
from onnxpar.runtime.session.session import InferenceSession

Array = np.ndarray[Any, np.dtype[np.float32]]


class Wrong(Exception):
    """A result that is not what NumPy computes."""


def operand(rank: int, turn: int, rows: int) -> Array:
    """Small integers, whose sums are exact in any order."""
    return ((np.arange(rows * 3) * (rank + 3) + turn) % 199 - 99).astype("f4").reshape(rows, 3)


def run_collective(kind: str, rows: int, turn: int) -> None:
    rank, size = hvd.rank(), hvd.size()
    rows *= size
    own = operand(rank, turn, rows)
    root = turn % size
    found: Any
    if kind == "all-reduce":
        found = hvd.allreduce(own, op=hvd.Sum)
    elif kind == "all-gather":
        found = hvd.allgather(own)
    elif kind == "reduce-scatter":
        found = hvd.reducescatter(own, op=hvd.Sum)
    elif kind == "all-to-all":
        found = hvd.alltoall(own)
    else:
        found = hvd.broadcast(own, root_rank=root)
    every = [operand(other, turn, rows) for other in range(size)]
    mine = slice(rank * rows // size, (rank + 1) * rows // size)
    right = {
        "all-reduce": lambda: sum(every[1:], start=every[0]),
        "all-gather": lambda: np.concatenate(every),
        "reduce-scatter": lambda: sum(each[mine] for each in every),
        "all-to-all": lambda: np.concatenate([each[mine] for each in every]),
        "broadcast": lambda: every[root],
    }[kind]()
    compare(np.asarray(found), np.asarray(right), f"{kind} of {rows} rows, turn {turn}")


def compare(found: Array, right: Array, what: str) -> None:
    if found.dtype != right.dtype or found.tobytes() != right.tobytes():
        raise Wrong(what)


def collectives(job: dict[str, Any]) -> tuple[Callable[[int], None], Callable[[], None]]:
    """Joins the world; returns what a turn does, and what leaves the world."""
    hvd.init()

    def turn(number: int) -> None:
        run_collective(*job["turns"][number], number)

    return turn, hvd.shutdown


def model(job: dict[str, Any]) -> tuple[Callable[[int], None], Callable[[], None]]:
    session = InferenceSession(job["model"], timeout=float(os.environ["ONNXPAR_TIMEOUT"]))

    def turn(number: int) -> None:
        x = feeds(number)
        compare(session.run(["y"], {"x": x})[0], expected(x), f"the model, turn {number}")

    return turn, session.close


def serve(job: dict[str, Any]) -> dict[str, Any]:
    """How a world has ended for this rank. `waited` is how long its last call took, of all calls
    the longest is `longest`."""
    os.environ.update(job["environment"])
    longest = 0.0
    began = time.monotonic()
    leave: Callable[[], None] = hvd.shutdown
    phase, end, text = "start", "right", ""
    try:
        turn, leave = (model if job["model"] else collectives)(job)
        print(json.dumps({"up": time.monotonic() - began}), flush=True)
        phase = "running"
        first = time.monotonic()
        for number in range(len(job["turns"])):
            time.sleep(max(0.0, first + number * job["pace"] - time.monotonic()))
            began = time.monotonic()
            turn(number)
            longest = max(longest, time.monotonic() - began)
    except Wrong as error:
        end, text = "wrong", str(error)
    except OnnxparError as error:
        end, text = "error", str(error)
    except Exception as error:
        end, text = "traceback", repr(error)
    waited = time.monotonic() - began
    began = time.monotonic()
    with suppress(OnnxparError):
        leave()
    leaving = time.monotonic() - began
    return {
        **{"end": end, "text": text, "phase": phase},
        **{"waited": waited, "longest": longest, "leaving": leaving},
    }


def main() -> None:
    for line in sys.stdin:
        print(json.dumps(serve(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
