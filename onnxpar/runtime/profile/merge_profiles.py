"""Merges the profiles of all ranks into one trace, with times on one clock, and the time that each
collective waited."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from onnxpar.graph.collectives import KINDS
from onnxpar.runtime.profile.expert_load import expert_loads
from onnxpar.runtime.profile.profile import Record
from onnxpar.runtime.profile.trace import Collective, Event, Span, Trace
from onnxpar.runtime.session.bundle import Bundle, Sizes

_Run = tuple[str, int]
"""The name of a program (an ONNX file), and the number of a run among that program's runs."""
_Call = tuple[str, int, int]
"""A call of a collective: the collective's name, the number of the run in the trace, and the number
of the call within that run."""


@dataclass
class _Rank:
    """The recordings of one rank, with times in seconds of its host's clock.

    host     an id of the host: ranks of one host share a clock
    spans    runs
    events   calls of nodes
    roots    the root of each collective that has one, by the collective's name
    sources  for each collective in which a rank reads from one other, the source of each rank
    """

    host: str
    spans: list[Span]
    events: list[Event]
    roots: Mapping[str, int]
    sources: Mapping[str, Sequence[int]]

    def shift(self, seconds: float) -> None:
        """Adds `seconds` to the start of every run and event."""
        self.spans = [replace(s, start=s.start + seconds) for s in self.spans]
        self.events = [e.shifted(seconds) for e in self.events]


def merge(
    bundle: Bundle,
    records: Sequence[Record],
    left_out: int = 0,
    sizes: Sequence[Sizes] = (),
    seconds: Sequence[float] = (),
) -> Trace:
    """Returns the trace of all ranks.

    records   the profile of each rank
    left_out  the number of first runs to leave out; the last run always stays
    sizes     the open sizes of each run
    seconds   the time of each run as the session measured it

    A run that onnxruntime dropped on any rank is left out on all ranks.
    """
    plan = json.loads((bundle.path / "plan.json").read_text(encoding="utf-8"))
    runs = _common_runs(records)
    left_out = max(min(left_out, len(runs) - 1), 0)
    numbers = {key: number for number, key in enumerate(runs) if number >= left_out}
    zero = _begin(records[0], min(numbers, key=numbers.__getitem__)) if numbers else 0
    mixtures = plan.get("mixtures", ())
    finders = {entry["node"] for entry in mixtures}
    ranks = [_rank(number, record, numbers, zero, finders) for number, record in enumerate(records)]
    _set_clocks(ranks)
    start = min((span.start for rank in ranks for span in rank.spans), default=0.0)
    planned = {entry["name"]: entry for entry in plan.get("collectives", ())}
    for rank in ranks:
        rank.shift(-start)
        rank.events = list(_with_plan(rank.events, planned, len(ranks)))
    begins: dict[_Call, dict[int, float]] = defaultdict(dict)
    for number, rank in enumerate(ranks):
        for call, event in _calls(rank.events):
            begins[call][number] = event.start
    dropped = sum(p["dropped"] for record in records for p in record["programs"].values())
    return Trace(
        plan["model"],
        bundle.mesh.shape,
        len(records),
        [span for rank in ranks for span in rank.spans],
        [event for rank in ranks for event in _with_waits(rank, begins)],
        left_out,
        dropped,
        _shares(bundle, [sizes[number] for number in numbers.values() if number < len(sizes)]),
        list(expert_loads(mixtures, bundle.mesh, [rank.events for rank in ranks])),
        {number: seconds[number] for number in numbers.values() if number < len(seconds)},
    )


def _shares(bundle: Bundle, sizes: Sequence[Sizes]) -> list[tuple[dict[str, int], float]]:
    """Returns (open sizes by symbol, fraction of runs with these sizes) for each combination that
    ran."""
    counts = Counter(sizes)
    return [
        (dict(zip(bundle.symbols, of, strict=True)), count / len(sizes))
        for of, count in counts.items()
    ]


def _common_runs(records: Sequence[Record]) -> list[_Run]:
    """Returns the runs that the profiles of all ranks contain, in order of time."""
    counts = {
        program: min(len(record["programs"][program]["runs"]) for record in records)
        for program in records[0]["programs"]
    }
    runs = [(program, k) for program, count in counts.items() for k in range(count)]
    return sorted(runs, key=lambda run: _begin(records[0], run))


def _begin(record: Record, run: _Run) -> int:
    """The start of a run, in microseconds of the host's clock."""
    program, k = run
    begin: int = record["programs"][program]["runs"][k][0]
    return begin


def _rank(
    rank: int, record: Record, numbers: Mapping[_Run, int], zero: int, finders: Collection[str]
) -> _Rank:
    """Returns a rank's recordings as runs and events.

    numbers  the runs to take, with their numbers in the trace
    zero     the time that becomes 0, in microseconds of rank 0's clock
    finders  names of nodes that split rows by expert: their events get the numbers of rows
    """
    spans, events = [], []
    for program, recorded in record["programs"].items():
        runs = recorded["runs"]
        begins = [begin for begin, _ in runs]
        for k, (begin, length) in enumerate(runs):
            if (number := numbers.get((program, k))) is not None:
                spans.append(Span(rank, number, program, (begin - zero) / 1e6, length / 1e6))
        lanes: dict[int, int] = {}
        for at, thread, begin, length, told, own in _with_own(recorded["events"]):
            k = bisect_right(begins, begin) - 1
            run = numbers.get((program, k))
            if run is None or begin > sum(runs[k]):
                continue
            node = record["nodes"][at]
            name, collective = _collective(node, begin + length - zero, told)
            events.append(
                Event(
                    rank,
                    run,
                    name,
                    node["op"],
                    tuple(node["nodes"]),
                    (begin - zero) / 1e6,
                    length / 1e6,
                    own / 1e6,
                    lanes.setdefault(thread, len(lanes)),
                    collective,
                    tuple(told) if node["name"] in finders else None,
                )
            )
    roots = {node["name"]: node["root"] for node in record["nodes"] if "root" in node}
    sources = {node["name"]: node["sources"] for node in record["nodes"] if "sources" in node}
    return _Rank(record["host"], spans, sorted(events, key=lambda e: e.start), roots, sources)


def _collective(node: Mapping[str, Any], end: int, told: Any) -> tuple[str, Collective | None]:
    """Returns (name, collective) of the event of a recorded node; (name, None) for a node that is
    no collective. The node that completes a collective has the name of the collective.

    end   when the event ended, in microseconds
    told  what the recorder read from shapes: when a thread ran the collective, in microseconds
          before `end`, and the bytes sent if these depend on data
    """
    if "group" not in node:
        return node["name"], None
    name, kind = node.get("started", (node["name"], node["op"]))
    group = tuple(node["group"])
    if "started" not in node:
        return name, Collective(kind, group, told)
    began, ended, *sent = told
    transfer = (end - began) / 1e6, (began - ended) / 1e6
    return name, Collective(kind, group, sent[0] if sent else None, transfer=transfer)


def _with_own(events: Sequence[Sequence[Any]]) -> Iterator[list[Any]]:
    """Yields each event [node, thread, begin, duration, told] with one more element, its own time:
    its duration minus the durations of events nested in it. A nested event is cut at the end of the
    outer event, because onnxruntime rounds both."""
    by_thread = defaultdict(list)
    for i, event in enumerate(events):
        by_thread[event[1]].append((event[2], -event[3], -i, event))
    for entries in by_thread.values():
        around: list[list[int]] = []
        for begin, negative, _, event in sorted(entries):
            length = -negative
            while around and around[-1][2] + around[-1][3] <= begin:
                yield around.pop()
            if around:
                length = min(length, around[-1][2] + around[-1][3] - begin)
                around[-1][5] -= length
            around.append([*event[:3], length, event[4], length])
        yield from around


def _set_clocks(ranks: Sequence[_Rank]) -> None:
    """Converts the times of all ranks to the clock of rank 0's host, by the assumption that a
    collective ends on all ranks at the same time. A host that has no collective in common with the
    others keeps its clock."""
    done = {ranks[0].host}
    while True:
        known = _ends([r for r in ranks if r.host in done])
        for host in dict.fromkeys(r.host for r in ranks if r.host not in done):
            own = _ends([r for r in ranks if r.host == host])
            differences = [known[call] - end for call, end in own.items() if call in known]
            if differences:
                for rank in ranks:
                    if rank.host == host:
                        rank.shift(float(np.median(differences)))
                done.add(host)
                break
        else:
            return


def _ends(ranks: Sequence[_Rank]) -> dict[_Call, float]:
    """Returns when each call of a collective ended: the latest end on these ranks. Only for kinds
    of collectives that end on all members at once."""
    ends: dict[_Call, float] = {}
    for rank in ranks:
        for call, event in _calls(rank.events):
            if event.collective and KINDS[event.collective.kind].ends_together:
                ends[call] = max(ends.get(call, event.busy[0]), sum(event.busy))
    return ends


def _calls(events: Sequence[Event]) -> Iterator[tuple[_Call, Event]]:
    """Yields (call, event) for each call of a collective among a rank's events."""
    counts: Counter[tuple[str, int]] = Counter()
    for event in events:
        if event.collective is not None:
            key = event.name, event.run
            yield (*key, counts[key]), event
            counts[key] += 1


def _with_plan(
    events: Sequence[Event], planned: Mapping[str, Mapping[str, Any]], ranks: int
) -> Iterator[Event]:
    """Yields the events; events of collectives get the tensor, group and bytes that the plan has
    for them, unless the bytes depend on data. The plan has the bytes of a run, which are divided
    among its calls.

    planned  the plan's entries of collectives, by name
    ranks    the number of ranks
    """
    calls = Counter((e.name, e.run) for e in events if e.collective)
    for event in events:
        collective = event.collective
        if collective is None:
            yield event
            continue
        entry = planned.get(event.name, {})
        of_run, sent = entry.get("bytes"), collective.bytes
        if sent is None and of_run is not None:
            sent = of_run // calls[event.name, event.run]
        yield replace(
            event,
            collective=replace(
                collective,
                group=collective.group or tuple(range(ranks)),
                bytes=sent,
                tensor=entry.get("tensor"),
            ),
        )


def _with_waits(rank: _Rank, begins: Mapping[_Call, Mapping[int, float]]) -> Iterator[Event]:
    """Yields a rank's events; events of collectives get the time that they waited for the last
    member, if their kind waits for others. `begins` has the start of each call on each rank."""
    calls = {id(event): call for call, event in _calls(rank.events)}
    for event in rank.events:
        collective = event.collective
        if collective is None or collective.transfer or KINDS[collective.kind].awaits is None:
            yield event
            continue
        others = begins[calls[id(event)]]
        awaited = [others.get(r, event.start) for r in _awaited(event, collective, rank)]
        wait = min(max(max(awaited) - event.start, 0.0), event.seconds)
        yield replace(event, collective=replace(collective, wait=wait))


def _awaited(event: Event, collective: Collective, rank: _Rank) -> Sequence[int]:
    """Returns the ranks that must have started this collective before it can end on the event's
    rank."""
    group, me = collective.group, collective.group.index(event.rank)
    awaits = KINDS[collective.kind].awaits
    if awaits == "neighbors":
        return group[max(me - 1, 0) : me + 2]
    if awaits == "root":
        return [group[rank.roots[event.name]]]
    if awaits == "source":
        source = rank.sources[event.name][me]
        return [event.rank if source < 0 else group[source]]
    return group
