"""`serve` under a launcher: rank 0 serves, and the other ranks repeat its runs."""

from __future__ import annotations

import argparse
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from onnxpar.base.errors import InputError, OnnxparError
from onnxpar.base.interrupts import Terminated, end_at_next_signal
from onnxpar.base.quick_imports import quick_imports
from onnxpar.runtime.launch.launch import Launched
from onnxpar.runtime.ranks.cores import BINDINGS
from onnxpar.runtime.ranks.redirect import redirect_output
from onnxpar.runtime.session.checks import check_timeout

if TYPE_CHECKING:
    from onnxpar.runtime.launch.lead import Lead
    from onnxpar.runtime.ranks.orders import Orders


def check_launched(args: argparse.Namespace) -> None:
    """Checks the options on each rank. Errors: InputError for options of ranks that this process
    would start itself, such as --replicas."""
    check_timeout(args.timeout)
    options = (
        ("--replicas", args.replicas != 1, "each replica needs ranks of its own"),
        ("--ranks-per-numa", args.ranks_per_numa is not None, "the launcher places ranks"),
        ("--bind", args.bind != BINDINGS[0], "the launcher binds ranks"),
    )
    for flag, is_set, why in options:
        if is_set:
            raise InputError(f"{flag}: a launcher has started the ranks, and {why}; leave it out")


def serve_launched(
    args: argparse.Namespace, launched: Launched, serve: Callable[[Lead], None]
) -> int:
    """On rank 0, calls `serve` with a `Lead`, through which the other ranks repeat each run; on
    other ranks, follows rank 0. Returns the exit status, which is the same on all ranks. Errors:
    those of `serve`; RankError."""
    if args.log_dir is not None:
        redirect_output(args.log_dir, launched, stdout=launched.rank != 0)
    with quick_imports():
        from onnxpar.runtime.launch.lead import Lead
        from onnxpar.runtime.ranks.orders import Orders

    orders = Orders(launched, args.timeout)
    if launched.rank:
        return _follow(orders, Path(args.par))
    orders.fetch(Path(args.par))
    with Lead(orders) as lead:
        try:
            serve(lead)
        except OnnxparError:
            lead.check()  # the first failure says more than its consequences
            raise
        lead.check()
    return 0


def _follow(orders: Orders, par: Path) -> int:
    """Repeats the runs of rank 0 until it ends; returns the exit status. A signal reaches all
    processes, and rank 0 ends after it; a second signal ends this process at once."""
    following = _Following(orders, par)
    try:
        return following.wait()
    except (KeyboardInterrupt, Terminated):
        end_at_next_signal()
        return following.wait()


class _Following:
    """Follows rank 0 in a thread, so that the main thread is free to handle signals."""

    def __init__(self, orders: Orders, par: Path) -> None:
        self._orders, self._par = orders, par
        self._outcome: int | BaseException = 0
        self._is_over = threading.Event()  # a thread whose `join` a signal ends counts as ended
        threading.Thread(target=self._run, name="onnxpar-follow", daemon=True).start()

    def wait(self) -> int:
        """Waits until rank 0 ends; returns the exit status. Errors: as `follow`."""
        while not self._is_over.wait(1.0):
            pass
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        return self._outcome

    def _run(self) -> None:
        from onnxpar.runtime.launch.follow import follow

        try:
            self._orders.fetch(self._par)
            self._outcome = follow(self._orders)
        except BaseException as error:  # the main thread raises it
            self._outcome = error
        self._is_over.set()
