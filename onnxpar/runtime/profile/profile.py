"""Records the sessions of a rank with onnxruntime's profiler, and converts the profiler's files to
plain data that ranks can send.

Sessions without profiling do not use this module.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnxruntime as ort

from onnxpar.base.errors import ModelError, RankError

if TYPE_CHECKING:
    from onnx import NodeProto

Record = dict[str, Any]
"""The profile of a rank, JSON with `host`, `nodes` and `programs`, as `ProfiledSessions.end`
describes them."""

WEIGHTS = "session.optimized_model_external_initializers_file_name"
LEAST = "session.optimized_model_external_initializers_min_size_in_bytes"
_COMPILED = "it contains compiled nodes"
"""Part of onnxruntime's error where it cannot write an optimized graph, because a provider has
compiled parts of it."""
_ERRORS = 3
_SUFFIX = "_kernel_time"
_START, _COMPLETE = "Start", "Complete"
_TELL = ("Split", "AllToAllV", _COMPLETE)


@dataclass(frozen=True)
class _Recorded:
    """A session that records, the name of its program, and the entries of its nodes."""

    program: str
    session: ort.InferenceSession
    nodes: list[dict[str, Any]]


class ProfiledSessions:
    """The sessions of a rank that record profiles, one for each program (ONNX file)."""

    def __init__(self) -> None:
        self._recorded: list[_Recorded] = []

    def open(
        self,
        program: str,
        file: Path,
        folder: Path,
        options: ort.SessionOptions,
        make: Callable[[], ort.InferenceSession],
    ) -> ort.InferenceSession:
        """Opens and returns a session that records to `folder`, which must not exist.

        file     the program's ONNX file
        options  get the options of recording
        make     called then: must open `file` with these options
        """
        folder.mkdir()
        options.enable_profiling = True
        options.profile_file_prefix = str(folder / "profile")
        asked = options.optimized_model_filepath
        optimized = Path(asked or folder / "optimized.onnx")
        if not asked:
            # The file is written only to see which nodes onnxruntime fused. The log level hides
            # its warning that the file is valid for this machine only.
            options.log_severity_level = max(options.log_severity_level, _ERRORS)
            options.optimized_model_filepath = str(optimized)
            (folder / "weights").symlink_to(os.devnull)
            options.add_session_config_entry(WEIGHTS, "weights")
            options.add_session_config_entry(LEAST, "0")
        try:
            session = make()
        except ModelError as error:
            if asked or _COMPILED not in str(error):
                raise
            options.optimized_model_filepath = ""
            session, optimized = make(), file
        self._recorded.append(_Recorded(program, session, _nodes(file, optimized)))
        return session

    def end(self) -> Record:
        """Ends the recording; returns it, with times in whole microseconds of this host's clock.

        nodes     of each node: `name`, `op`, names of the global `nodes` that it computes; for a
                  collective, `group`, `root` and `sources`; for the completion of a collective, the
                  collective's (name, kind) as `started`
        programs  by name, `runs` [begin, duration], `events` [node, thread, begin, duration, told],
                  and the number of `dropped` events; `told` is data from the shapes of results
        """
        record: Record = {"host": host_id(), "nodes": [], "programs": {}}
        numbers: dict[tuple[str, str], int] = {}
        for each in self._recorded:
            for node in each.nodes:
                numbers.setdefault((node["name"], node["op"]), len(record["nodes"]))
                record["nodes"].append(node)
            start = each.session.get_profiling_start_time_ns() // 1000
            file = Path(each.session.end_profiling())
            if not file.is_file():
                raise RankError(f"onnxruntime wrote no profile to {file}")
            record["programs"][each.program] = _program(file, start, numbers, record["nodes"])
            file.unlink()
        self._recorded.clear()
        return record


def _program(
    file: Path, start: int, numbers: dict[tuple[str, str], int], nodes: list[dict[str, Any]]
) -> dict[str, Any]:
    """Returns the runs and events of one program, from onnxruntime's profile of it.

    start    the start of the profile, in microseconds
    numbers  the index in `nodes` of each (name, op); nodes that occur only in the profile are added
             to both
    """
    runs, events, dropped = [], [], 0
    for event in _lines(file):
        name, times = event["name"], [start + event["ts"], event["dur"]]
        if name == "model_run":
            runs.append(times)
        elif name == "profile_truncated":
            dropped = int(event["args"]["dropped_event_count"])
        elif event["cat"] == "Node" and name.endswith(_SUFFIX):
            key = name.removesuffix(_SUFFIX), event["args"]["op_name"]
            if key not in numbers:
                numbers[key] = len(nodes)
                nodes.append({"name": key[0], "op": key[1], "nodes": []})
            events.append([numbers[key], event["tid"], *times, _told(event["args"])])
    return {"runs": runs, "events": events, "dropped": dropped}


def _told(args: dict[str, Any]) -> int | list[int] | None:
    """Returns what the shapes of a node's results tell, because profiles have no values: the sizes
    of a Split's results; the bytes that an AllToAllV sent to others; for a Complete, how many
    microseconds before its end the collective began and ended, and then what the collective itself
    tells. None for any other node."""
    if args["op_name"] not in _TELL or not args.get("output_type_shape"):
        return None
    if args["op_name"] == "Split":
        shapes = [shape for port in args["output_type_shape"] for shape in port.values()]
        return [int(shape[0]) if shape else 1 for shape in shapes]
    (shape,) = args["output_type_shape"][-1].values()
    return list(map(int, shape[1:])) if args["op_name"] == _COMPLETE else int(shape[-1])


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    """Yields the events of a profile, one for each line of the file. Parsing line by line lets the
    rank's watch thread run in between."""
    with file.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            text = line.strip().rstrip(",")
            if text.startswith("{"):
                yield json.loads(text)


def _nodes(file: Path, optimized: Path) -> list[dict[str, Any]]:
    """Returns the entries of a record's `nodes` for the nodes of onnxruntime's optimized graph."""
    import onnx  # ranks need it only here

    from onnxpar.graph.origin import origins_of
    from onnxpar.runtime.profile.fused import Fused, nodes_in

    graph, run = (onnx.load(f, load_external_data=False).graph for f in (file, optimized))
    members = Fused(graph, run).members()
    makers = {name: node for node in run.node for name in node.output}
    return [
        {
            "name": node.name,
            "op": node.op_type,
            "nodes": list(dict.fromkeys(o for m in members[node.name] for o in origins_of(m))),
            **_meeting(node, makers),
        }
        for node in nodes_in(run)
        if node.name
    ]


def _meeting(node: NodeProto, makers: Mapping[str, NodeProto]) -> dict[str, Any]:
    """Returns the fields of a node's entry that say which ranks meet in it: `group`, `root` and
    `sources` of a collective, `started` for a node that completes one. An empty group stands for
    all ranks. Empty for any other node."""
    if node.domain == "onnxpar" and node.op_type == _COMPLETE:
        start = makers[node.input[0]]
        kind = start.op_type.removeprefix(_START)
        return {**_of_collective(start), "started": [start.name, kind]}
    return {} if node.op_type.startswith(_START) else _of_collective(node)


def _of_collective(node: NodeProto) -> dict[str, Any]:
    """Returns `group`, `root` and `sources` of a collective; empty for another node."""
    attributes = {a.name: a for a in node.attribute}
    if node.domain != "onnxpar" or "tag" not in attributes:
        return {}
    root = attributes.get("root")
    lists = {
        key: list(attributes[key].ints) if key in attributes else [] for key in ("group", "sources")
    }
    return {**lists, "root": root.i if root else 0}


def host_id() -> str:
    """Returns an id of this host, the same for all processes on it; ranks on one host share a
    clock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return platform.node()
