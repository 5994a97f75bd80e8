"""Starts the processes of a session's ranks. Imports nothing large: the command `run` starts ranks
first, and imports its modules while the ranks import theirs."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from onnxpar.base.memory_file import make_file
from onnxpar.runtime.ranks.cores import own_cores
from onnxpar.runtime.ranks.doorbell import Doorbell
from onnxpar.runtime.ranks.log import Log
from onnxpar.runtime.ranks.rank_process import RankProcess, call_in_lasting_thread

CLOSING = 5.0
"""Seconds that ranks get to end by themselves when the session closes, before they are killed."""


@dataclass
class StartedRanks:
    """Processes of ranks that wait for their first message.

    ranks    the processes
    bell     their doorbell, which signals calls
    inputs   the file descriptor of the shared memory for inputs that are copied for each run
    lasting  the file descriptor of the memory for inputs that are read in place
    ended    set when all have ended
    """

    ranks: list[RankProcess]
    bell: Doorbell
    inputs: int
    lasting: int
    ended: threading.Event

    @staticmethod
    def start(size: int, log_dir: str | os.PathLike[str] | None) -> StartedRanks:
        """Starts `size` processes; returns before they are ready. Errors: RankError; OnnxparError
        if `log_dir` cannot be written."""
        bell = Doorbell.create(size, spins=len(own_cores()) > size)
        inputs, lasting = make_file("onnxpar-inputs"), make_file("onnxpar-lasting")
        ended = threading.Event()
        logs = [Log.open(log_dir, rank) for rank in range(size)]
        ranks = call_in_lasting_thread(
            lambda: [
                RankProcess.start(rank, log, bell, inputs, lasting) for rank, log in enumerate(logs)
            ],
            ended,
        )
        return StartedRanks(ranks, bell, inputs, lasting, ended)

    def end(self) -> None:
        """Kills all processes and closes all files. May be called twice."""
        if self.ended.is_set():
            return
        for rank in self.ranks:
            rank.process.kill()
        for rank in self.ranks:
            rank.wait(CLOSING)
            rank.release()
        os.close(self.inputs)
        os.close(self.lasting)
        self.bell.close()
        self.ended.set()


_early: list[StartedRanks] = []
"""At most one element: ranks that no session has taken yet."""


@contextmanager
def started_early(size: int) -> Iterator[None]:
    """Context in which `size` ranks are already started, for the next session that has this size
    and no `log_dir`. Ends the ranks after the block if no session took them. Errors: RankError if a
    process cannot be started."""
    _early[:] = [StartedRanks.start(size, None)]
    try:
        yield
    finally:
        while _early:
            _early.pop().end()


def started(size: int, log_dir: str | os.PathLike[str] | None) -> StartedRanks:
    """Returns processes of `size` ranks: processes that were started early if there are any,
    otherwise new ones. Errors: RankError; OnnxparError if `log_dir` cannot be written."""
    if log_dir is None and _early and len(_early[0].ranks) == size:
        return _early.pop()
    return StartedRanks.start(size, log_dir)
