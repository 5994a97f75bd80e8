"""`init`, which connects this process with the other ranks, and its settings from the
environment."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

from onnxpar.base.errors import InputError, RankError
from onnxpar.hvd.autotune import Autotune, number
from onnxpar.hvd.communicator import connect, current, is_initialized
from onnxpar.hvd.cycles import Cycles
from onnxpar.hvd.fusion import default_threshold
from onnxpar.hvd.process_sets import Members, ProcessSet, add_process_set
from onnxpar.hvd.timeline import Timeline
from onnxpar.runtime.launch.launch import Launched, launched_rank

_last: dict[str, Any] = {}
"""The arguments of the last `init`."""


def init(
    comm: Sequence[int] | None = None,
    process_sets: Sequence[ProcessSet] | str | None = None,
    *,
    timeout: float | None = None,
    cycle_time_ms: float | None = None,
) -> None:
    """Connects this process with the others that mpirun, srun or torchrun started, or that the
    environment variables in `onnxpar.runtime.launch.launch.HELP` describe. Without a launcher, this
    process is the only rank.

    comm          None, or a list of all ranks
    process_sets  process sets to add; "dynamic" is accepted, as sets can always be added later
    timeout       limit in seconds of this and every later wait for another rank; the default is
                  the environment variable ONNXPAR_TIMEOUT, or 60
    cycle_time_ms milliseconds between cycles, in which ranks run the collectives that all of them
                   have started, with allreduces fused; the default is the environment variable
                   HOROVOD_CYCLE_TIME, or no cycles. `join` and autotuning need cycles

    The environment variable HOROVOD_TIMELINE names a file for the timeline, HOROVOD_AUTOTUNE=1
    tunes the fusion threshold and the cycle time. A second call only adds process sets, and cycles.
    Errors: RankError if another process does not connect in time.
    """
    global _last
    if isinstance(process_sets, str):
        if process_sets.lower() != "dynamic":
            raise InputError(f'process_sets={process_sets!r}: give a list of sets, or "dynamic"')
        process_sets = []
    if not is_initialized():
        launched = launched_rank() or Launched(0, 1, 1, "hash:alone")
        if comm is not None and not _are_all(comm, launched.size):
            raise InputError(
                f"comm={comm!r} must be None or list all {launched.size} ranks; for some of them, "
                "use process_sets=[hvd.ProcessSet([...])]"
            )
        connect(launched, _timeout() if timeout is None else timeout)
        if path := os.environ.get("HOROVOD_TIMELINE"):
            start_timeline(path, os.environ.get("HOROVOD_TIMELINE_MARK_CYCLES", "0") != "0")
        _last = {"comm": comm, "process_sets": process_sets, "timeout": timeout}
        _last["cycle_time_ms"] = cycle_time_ms
    registered = current().process_sets
    for each in process_sets or ():
        if registered.get(each.process_set_id or -1) != tuple(each.ranks):
            add_process_set(each)
    _start_cycles(cycle_time_ms)


def again() -> None:
    """Connects again, after `shutdown`, with the arguments of the last `init`. Errors: RankError as
    for `init`, and for ranks that are threads (`run_on_threads` connects them only once)."""
    if is_initialized():
        raise RankError("ranks that are threads cannot connect again; use processes")
    init(**_last)


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Starts to record the collectives of rank 0 in `file_path`, in Chrome's trace format.

    All ranks may call it; the others do nothing. `mark_cycles` also marks the start of each piece
    of work. An earlier timeline ends. Errors: InputError if the file cannot be written.
    """
    here = current()
    if here.rank == 0:
        stop_timeline()
        here.timeline = Timeline(file_path, mark_cycles)


def stop_timeline() -> None:
    """Ends the timeline and closes its file; without cycles, after all work that was started."""
    here = current()
    if here.timeline is not None:
        if here.cycles is None:  # with them, only what all ranks start can wait its turn
            here.ordered(here.timeline.close)
        here.timeline.close()
        here.timeline = None


def _start_cycles(milliseconds: float | None) -> None:
    """Starts cycles, so many milliseconds apart, if the argument or the environment requests cycles
    and this rank has none."""
    here = current()
    tune = Autotune.of_environment()
    if milliseconds is None and (os.environ.get("HOROVOD_CYCLE_TIME") or tune):
        milliseconds = number("HOROVOD_CYCLE_TIME", 1.0)
    if milliseconds is None or here.cycles is not None:
        return
    if not 0 <= milliseconds < math.inf:
        raise InputError(f"cycle_time_ms={milliseconds} must be a number of at least 0")
    members = Members(here, here.process_sets[0])
    tune = tune if here.rank == 0 else None
    here.cycles = Cycles(members, default_threshold(), milliseconds, tune)


def _are_all(comm: Any, size: int) -> bool:
    """True if `comm` is an empty list, or lists all ranks from 0 to `size` - 1."""
    try:
        return list(comm) in ([], list(range(size)))
    except TypeError:
        return False


def _timeout() -> float:
    """Returns the seconds that ONNXPAR_TIMEOUT sets, or 60. Errors: InputError unless they are a
    number above 0."""
    text = os.environ.get("ONNXPAR_TIMEOUT") or "60"
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        raise InputError(f"ONNXPAR_TIMEOUT={text!r}: give a number of seconds above 0")
    return seconds
