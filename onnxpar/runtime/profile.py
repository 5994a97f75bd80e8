"""What onnxruntime records of a rank's sessions, as plain data that the ranks hand over.

Recording costs nothing where it is off: then nothing here runs.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnxruntime as ort

from onnxpar.errors import RankError

if TYPE_CHECKING:
    from onnx import NodeProto

Record = dict[str, Any]
"""Of a rank: its `host`, `nodes` and what its `programs` did, as `ProfiledSessions.end` says."""

WEIGHTS = "session.optimized_model_external_initializers_file_name"
LEAST = "session.optimized_model_external_initializers_min_size_in_bytes"
_ERRORS = 3
_SUFFIX = "_kernel_time"


@dataclass(frozen=True)
class _Recorded:
    program: str
    session: ort.InferenceSession
    nodes: list[dict[str, Any]]


class ProfiledSessions:
    """The sessions of a rank whose work is recorded, one per program."""

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
        """Makes a session that records what it does to a new file in the folder, of which it is the
        only user. `make` makes it of `file` with these options, which are changed."""
        folder.mkdir()
        options.enable_profiling = True
        options.profile_file_prefix = str(folder / "profile")
        optimized = Path(options.optimized_model_filepath or folder / "optimized.onnx")
        if not options.optimized_model_filepath:
            # Only its nodes are wanted: which ones onnxruntime has made of others. It warns of such
            # a file that it is good for this machine alone.
            options.log_severity_level = max(options.log_severity_level, _ERRORS)
            options.optimized_model_filepath = str(optimized)
            (folder / "weights").symlink_to(os.devnull)
            options.add_session_config_entry(WEIGHTS, "weights")
            options.add_session_config_entry(LEAST, "0")
        session = make()
        self._recorded.append(_Recorded(program, session, _nodes(file, optimized)))
        return session

    def end(self) -> Record:
        """Ends recording. `nodes` have a name and an op, the names of the global `nodes` that they
        compute and, if they are collectives, a group and a root. A program has its `runs` [begin,
        duration], `events` [node, thread, begin, duration], and how many were `dropped`; times are
        whole microseconds of this host's clock."""
        record: Record = {"host": _host(), "nodes": [], "programs": {}}
        numbers: dict[tuple[str, str], int] = {}
        for each in self._recorded:
            for node in each.nodes:
                numbers.setdefault((node["name"], node["op"]), len(record["nodes"]))
                record["nodes"].append(node)
            start = each.session.get_profiling_start_time_ns() // 1000
            file = Path(each.session.end_profiling())
            if not file.is_file():
                raise RankError(f"onnxruntime has written no profile to {file}")
            record["programs"][each.program] = _program(file, start, numbers, record["nodes"])
            file.unlink()
        self._recorded.clear()
        return record


def _program(
    file: Path, start: int, numbers: dict[tuple[str, str], int], nodes: list[dict[str, Any]]
) -> dict[str, Any]:
    """The runs and events in a file of onnxruntime's."""
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
            events.append([numbers[key], event["tid"], *times])
    return {"runs": runs, "events": events, "dropped": dropped}


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    """The events in a file, which has one a line: so the rank's watch gets its turns meanwhile."""
    with file.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            text = line.strip().rstrip(",")
            if text.startswith("{"):
                yield json.loads(text)


def _nodes(file: Path, optimized: Path) -> list[dict[str, Any]]:
    """What is known of the nodes that onnxruntime has made of a rank's graph."""
    import onnx  # ranks need it for this alone

    from onnxpar.ir.origin import origin_of
    from onnxpar.runtime.fused import Fused, nodes_in

    graph, run = (onnx.load(f, load_external_data=False).graph for f in (file, optimized))
    members = Fused(graph, run).members()
    return [
        {
            "name": node.name,
            "op": node.op_type,
            "nodes": list(dict.fromkeys(map(origin_of, members[node.name]))),
            **_meeting(node),
        }
        for node in nodes_in(run)
        if node.name
    ]


def _meeting(node: NodeProto) -> dict[str, Any]:
    """Of a collective, which is what has a tag, its group, which is empty where all ranks meet, and
    its root."""
    attributes = {a.name: a for a in node.attribute}
    if node.domain != "onnxpar" or "tag" not in attributes:
        return {}
    group, root = attributes.get("group"), attributes.get("root")
    return {"group": list(group.ints) if group else [], "root": root.i if root else 0}


def _host() -> str:
    """What ranks of one host have in common: they share a clock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return platform.node()
