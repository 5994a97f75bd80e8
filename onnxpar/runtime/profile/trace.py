"""Traces of the ranks of a sharded model, in files for chrome://tracing and Perfetto.

The viewer shows each rank as a process with threads for runs, compute and communication. The `args`
of events and the key `onnxpar` have the data that `read_trace` needs.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import mean
from typing import Any

from onnxpar.base.errors import InputError
from onnxpar.base.unreadable import cannot_read
from onnxpar.base.write_file import whole_file

FORMAT = 1
NODE, RUN = "Node", "Run"
"""The categories of events in the file."""
_RUNS, _COMPUTE, _COMMUNICATION = range(3)
_LANES = ("runs", "compute", "communication")
"""The threads of a rank in the viewer; each further thread of onnxruntime adds a compute and a
communication thread."""
TRANSFER, _TRANSFERS = "Transfer", 1 << 16
"""The category, and the number of the first thread in the viewer, of collectives that threads of
the plugin ran while the rank computed. Each group of ranks has a thread there, because it may have
one in the plugin."""


@dataclass(frozen=True)
class Collective:
    """A call of a collective. None stands for unknown.

    kind      the op, e.g. AllReduce
    group     its ranks
    bytes     the bytes that a rank sends in the call
    tensor    the name of the tensor in the plan
    wait      seconds for which this rank waited for the last rank
    transfer  start and duration, in seconds, if a thread of the plugin ran the collective while the
              rank computed; the event is then its completion, and `wait` is unknown
    """

    kind: str
    group: tuple[int, ...]
    bytes: int | None = None
    tensor: str | None = None
    wait: float | None = None
    transfer: tuple[float, float] | None = None


@dataclass(frozen=True)
class Event:
    """One call of a node on one rank. Times are in seconds, from the start of the first run.

    rank   the rank
    run    the number of the run
    name   the name of the node that ran, onnxruntime's for a fused node
    op     its op type
    nodes  the nodes of the unsplit model that it computes, in whole or in part
    own    its seconds without the seconds of the nodes of its body (of an If, Loop or Scan)
    lane   the number of the onnxruntime thread that ran it, from 0
    rows   if the node splits rows by expert, the numbers of rows
    """

    rank: int
    run: int
    name: str
    op: str
    nodes: tuple[str, ...]
    start: float
    seconds: float
    own: float
    lane: int = 0
    collective: Collective | None = None
    rows: tuple[int, ...] | None = None

    @property
    def wait(self) -> float:
        """Seconds that the rank waited for other ranks; 0 if unknown."""
        return (self.collective and self.collective.wait) or 0.0

    @property
    def busy(self) -> tuple[float, float]:
        """(start, seconds) in which ranks communicated or computed: of the transfer, if a thread of
        the plugin ran the collective, else of the event."""
        transfer = self.collective and self.collective.transfer
        return transfer or (self.start, self.seconds)

    @property
    def hidden(self) -> float:
        """Seconds of the transfer during which the rank computed something else."""
        start, seconds = self.busy
        return min(max(self.start - start, 0.0), seconds)

    def shifted(self, seconds: float) -> Event:
        """Returns the event with all times `seconds` later."""
        collective = self.collective
        if collective is not None and collective.transfer is not None:
            start, length = collective.transfer
            collective = replace(collective, transfer=(start + seconds, length))
        return replace(self, start=self.start + seconds, collective=collective)


@dataclass(frozen=True)
class Span:
    """A run of a program on one rank. `program` is "" for the main program, or the name of another,
    such as the evaluation of a training step."""

    rank: int
    run: int
    program: str
    start: float
    seconds: float


@dataclass(frozen=True)
class ExpertLoad:
    """The rows that each expert of a mixture of experts computed in all recorded `runs`. `mixture`
    is the name of the mixture's result in the unsplit model."""

    mixture: str
    tokens: tuple[int, ...]
    runs: int


@dataclass(frozen=True)
class NodeTimes:
    """The calls of a node on one rank or on all ranks.

    nodes    the nodes of the unsplit model that the node computes
    calls    the number of calls
    seconds  the sum of the calls' own seconds, without the seconds of nodes in bodies
    wait     the sum of the seconds spent waiting for other ranks
    """

    name: str
    op: str
    nodes: tuple[str, ...]
    collective: Collective | None
    calls: int
    seconds: float
    wait: float

    @property
    def mean(self) -> float:
        """Seconds per call."""
        return self.seconds / self.calls


@dataclass(frozen=True)
class Trace:
    """The recorded runs of all ranks.

    model     the name of the model
    mesh      the (name, size) of each mesh axis
    ranks     the number of ranks
    spans     the runs on each rank
    events    the calls of nodes
    left_out  the number of earlier runs that are not part of the trace
    dropped   the number of later events that onnxruntime could not record
    sizes     each combination of open sizes, with the fraction of runs that used it
    experts   the load of the experts of each mixture
    seconds   the time of each run as the session measured it
    """

    model: str
    mesh: tuple[tuple[str, int], ...]
    ranks: int
    spans: Sequence[Span]
    events: Sequence[Event]
    left_out: int = 0
    dropped: int = 0
    sizes: Sequence[tuple[Mapping[str, int], float]] = ()
    experts: Sequence[ExpertLoad] = ()
    seconds: Mapping[int, float] = field(default_factory=dict)

    def lengths(self, program: str = "") -> dict[int, float]:
        """Returns {number of a run: its seconds} for a program, from the start on the first rank
        that starts to the end on the last."""
        begin: dict[int, float] = {}
        end: dict[int, float] = {}
        for span in self.spans:
            if span.program == program:
                begin[span.run] = min(begin.get(span.run, span.start), span.start)
                end[span.run] = max(end.get(span.run, 0.0), span.start + span.seconds)
        return {run: end[run] - begin[run] for run in sorted(begin)}

    def parts(self, rank: int, program: str = "") -> dict[str, float]:
        """Returns a rank's mean seconds per run of a program, by activity: "compute",
        "communication", "waiting" (for other ranks), "idle" (nothing of these) and their sum,
        "total", which is the time from the start of the run on the first rank to its end on the
        last."""
        lengths = self.lengths(program)
        events = [event for event in self.of(rank) if event.run in lengths]
        compute, inside = (
            sum(e.own for e in events if (e.collective is None) is is_compute)
            for is_compute in (True, False)
        )
        waiting, total = sum(e.wait for e in events), sum(lengths.values())
        sums = {
            "compute": compute,
            "communication": inside - waiting,
            "waiting": waiting,
            "idle": max(total - compute - inside, 0.0),
            "total": total,
        }
        return {kind: seconds / len(lengths) for kind, seconds in sums.items()}

    def session(self, runs: Collection[int]) -> float | None:
        """Returns the mean seconds by which the session's time of these runs exceeds the time of
        the ranks: for checks, messages and copies. None if the session's times are not recorded."""
        lengths = self.lengths()
        apart = [self.seconds[run] - lengths[run] for run in runs if run in self.seconds]
        return max(mean(apart), 0.0) if apart else None

    def runs(self, program: str = "") -> list[int]:
        """Returns the numbers of a program's runs, ascending."""
        return sorted({span.run for span in self.spans if span.program == program})

    def of(self, rank: int) -> list[Event]:
        """Returns the events of a rank, in the order of their start."""
        return [event for event in self.events if event.rank == rank]

    def nodes(self, rank: int | None = None) -> list[NodeTimes]:
        """Returns the times of each node on a rank, or summed over all ranks if `rank` is None; the
        node with the longest total comes first."""
        calls: dict[tuple[str, str], list[Event]] = defaultdict(list)
        for event in self.events:
            if rank in (None, event.rank):
                calls[event.name, event.op].append(event)
        times = [
            NodeTimes(
                name,
                op,
                events[0].nodes,
                events[0].collective,
                len(events),
                sum(e.own for e in events),
                sum(e.wait for e in events),
            )
            for (name, op), events in calls.items()
        ]
        return sorted(times, key=lambda t: -t.seconds)


def write_trace(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Writes a trace to a file that `read_trace`, chrome://tracing and Perfetto can read; an error
    leaves no half-written file. Errors: InputError if the file cannot be written."""
    file = Path(path)
    check_place(file)
    head = {
        "displayTimeUnit": "ms",
        "onnxpar": {
            "format": FORMAT,
            "model": trace.model,
            "mesh": trace.mesh,
            "ranks": trace.ranks,
            "left_out": trace.left_out,
            "dropped": trace.dropped,
            "sizes": [[dict(sizes), share] for sizes, share in trace.sizes],
            "experts": [asdict(load) for load in trace.experts],
            "seconds": [[run, seconds] for run, seconds in trace.seconds.items()],
        },
    }
    with whole_file(file) as sink:
        sink.write(json.dumps(head)[:-1] + ', "traceEvents": [\n')
        for i, event in enumerate(_chrome(trace)):
            sink.write((",\n" if i else "") + json.dumps(event))
        sink.write("\n]}\n")


def check_place(path: str | os.PathLike[str]) -> None:
    """Raises an InputError if no file can be written at `path`."""
    file = Path(path)
    if not file.parent.is_dir():
        raise InputError(f"{file}: there is no folder {file.parent}; make it first")
    if file.is_dir():
        raise InputError(f"{file} is a folder; name a file: {file / 'trace.json'}")
    if not os.access(file.parent, os.W_OK):
        raise InputError(f"{file}: no file can be written to {file.parent}")


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """Reads a trace that `write_trace` wrote. Errors: InputError, which names the file."""
    file = Path(path)
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
        head = data["onnxpar"]
        if head["format"] != FORMAT:
            raise InputError(
                f"{file} has format {head['format']}, but this onnxpar reads {FORMAT}; record the "
                "trace again"
            )
        events = data["traceEvents"]
        return Trace(
            head["model"],
            tuple((name, size) for name, size in head["mesh"]),
            head["ranks"],
            [_span(e) for e in events if e.get("cat") == RUN],
            [_event(e) for e in events if e.get("cat") == NODE],
            head["left_out"],
            head["dropped"],
            [(dict(sizes), share) for sizes, share in head.get("sizes", ())],
            [
                ExpertLoad(load["mixture"], tuple(load["tokens"]), load["runs"])
                for load in head.get("experts", ())
            ],
            dict(head.get("seconds", ())),
        )
    except OSError as error:
        raise InputError(cannot_read(file, error)) from None
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{file} is not a trace of onnxpar ({type(error).__name__}: {error}); write one with "
            "`onnxpar run --profile`"
        ) from None


def _chrome(trace: Trace) -> Iterator[dict[str, Any]]:
    """Yields the events in Chrome's trace format, with times in microseconds."""
    lanes = {(e.rank, _thread(e)) for e in trace.events} | {(s.rank, _RUNS) for s in trace.spans}
    sent = [(e, e.collective.group) for e in trace.events if e.collective and e.collective.transfer]
    for rank in range(trace.ranks):
        yield _named("process_name", rank, 0, name=f"rank {rank}")
        yield _named("process_sort_index", rank, 0, sort_index=rank)
    for rank, thread in sorted(lanes):
        lane = (thread - 1) // 2
        name = _LANES[thread - 2 * max(lane, 0)] + (f" {lane}" if lane > 0 else "")
        yield _named("thread_name", rank, thread, name=name)
        yield _named("thread_sort_index", rank, thread, sort_index=thread)
    transfers = sorted({(e.rank, group) for e, group in sent})
    for number, (rank, group) in enumerate(transfers, _TRANSFERS):
        yield _named("thread_name", rank, number, name=f"transfers {list(group)}")
        yield _named("thread_sort_index", rank, number, sort_index=number)
    for event, group in sent:
        thread = _TRANSFERS + transfers.index((event.rank, group))
        what = {"run": event.run, "hidden_us": _us(event.hidden)}
        yield _complete(TRANSFER, event.name, event.rank, thread, *event.busy, what)
    for span in trace.spans:
        name = f"{span.program or 'run'} {span.run}"
        args = {"run": span.run, "program": span.program}
        yield _complete(RUN, name, span.rank, _RUNS, span.start, span.seconds, args)
    for event in trace.events:
        yield _complete(
            NODE, event.name, event.rank, _thread(event), event.start, event.seconds, _args(event)
        )


def _thread(event: Event) -> int:
    """The thread in the viewer to which an event belongs."""
    return 2 * event.lane + (_COMPUTE if event.collective is None else _COMMUNICATION)


def _args(event: Event) -> dict[str, Any]:
    """The `args` of an event in the file, from which `_event` restores the event."""
    args: dict[str, Any] = {
        "op": event.op,
        "nodes": event.nodes,
        "run": event.run,
        "own_us": _us(event.own),
    }
    comm = event.collective
    if event.rows is not None:
        args["rows"] = event.rows
    if comm is None:
        return args
    args |= {"kind": comm.kind, "group": comm.group, "bytes": comm.bytes, "tensor": comm.tensor}
    if comm.transfer is not None:
        args["transfer"] = [_us(each) for each in comm.transfer]
    if comm.wait is not None:
        args |= {"wait_us": _us(comm.wait), "transfer_us": _us(event.seconds - comm.wait)}
    return args


def _complete(
    category: str, name: str, rank: int, thread: int, start: float, seconds: float, args: Any
) -> dict[str, Any]:
    """An event with a duration, in Chrome's trace format."""
    what = {"ph": "X", "cat": category, "name": name, "pid": rank, "tid": thread}
    return {**what, "ts": _us(start), "dur": _us(seconds), "args": args}


def _named(what: str, rank: int, thread: int, **args: Any) -> dict[str, Any]:
    """Metadata of a process or thread, in Chrome's trace format."""
    return {"ph": "M", "name": what, "pid": rank, "tid": thread, "args": args}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _span(e: dict[str, Any]) -> Span:
    """A run, from its event in the file."""
    args = e["args"]
    return Span(e["pid"], args["run"], args["program"], e["ts"] / 1e6, e["dur"] / 1e6)


def _event(e: dict[str, Any]) -> Event:
    """A call of a node, from its event in the file."""
    args = e["args"]
    collective = None
    if "kind" in args:
        wait = args.get("wait_us")
        collective = Collective(
            args["kind"],
            tuple(args["group"]),
            args["bytes"],
            args["tensor"],
            None if wait is None else wait / 1e6,
            _transfer(args.get("transfer")),
        )
    return Event(
        e["pid"],
        args["run"],
        e["name"],
        args["op"],
        tuple(args["nodes"]),
        e["ts"] / 1e6,
        e["dur"] / 1e6,
        args["own_us"] / 1e6,
        (e["tid"] - 1) // 2,
        collective,
        tuple(args["rows"]) if "rows" in args else None,
    )


def _transfer(us: Sequence[float] | None) -> tuple[float, float] | None:
    """(start, duration) in seconds, from microseconds."""
    return None if us is None else (us[0] / 1e6, us[1] / 1e6)
