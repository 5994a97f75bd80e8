"""Steps over a slow link, with and without communication while ranks compute.

    python tests/bench/bench_overlap.py [CASE ...] [--layers 6] [--width 256] [--share 0.25]

A step of an encoder, under data-parallel and zero3 over two hosts of one rank, and under hybrid
over two hosts of two ranks: there, sums of tensor parallelism stay on a host, and gradients cross
hosts in a stream of their own. The link is simulated (ONNXPAR_LINK), and so slow that it moves the
bytes of a step in --share of the step's time. Steps with and without overlap take turns, so that
what else the machine does falls on both. Hidden is what overlap takes off, the median over all
turns.

How long the simulated link works in a step is known. What a step without overlap takes beyond that
is compute. A part of the communication has nothing to hide behind: the gradients that are computed
last, the parameters that are read first. `least_time.py` computes a bound from what nodes depend
on: no schedule, however it fuses collectives, takes less than so many seconds. What a step without
overlap takes beyond the bound can be hidden. On one host, overlap must change no op. Fails where
less than 80 % of what can be hidden is hidden.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import onnx
import onnx_graphsurgeon as gs
from bench_training import Runner
from least_time import Job, least_seconds
from onnx import TensorProto, helper, numpy_helper

import onnxpar
from onnxpar.compiler.pass_ import LOCAL, Pass, PassContext, Stage
from onnxpar.cost.cost import messages
from onnxpar.graph.subgraphs import read_by
from onnxpar.lowering.streams import groups_of
from onnxpar.planner.placed_passes import Placed
from onnxpar.training import grad

HOSTS = 2


@dataclass(frozen=True)
class Case:
    """How to split a step over two hosts: the mesh, the ranks of a host, and the bytes that a rank
    sends to the other host in a step, as a multiple of those of all parameters."""

    mesh: str
    ranks_per_host: int
    sent: float


CASES = {
    "data-parallel": Case("dp=2", 1, 1.0),
    "zero3": Case("dp=2", 1, 1.5),
    "hybrid": Case("dp=2,tp=2", 2, 0.5),
}
"""By preset."""
LATENCY = 200e-6
LEAST = 0.8
WARM, SEQUENCE, HEADS = 3, 64, 4


class Layers:
    """Writes a model from x to y, both of one shape, node by node."""

    def __init__(self, *shape: int) -> None:
        self.draw = np.random.default_rng(0)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[TensorProto] = []
        self.shape, self.width = shape, shape[-1]

    def add(self, op: str, *inputs: str, **attributes: Any) -> str:
        name = f"{op}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(inputs), [name], name, **attributes))
        return name

    def constant(self, name: str, value: Any) -> str:
        self.weights.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def weight(self, name: str, *shape: int) -> str:
        scale = np.float32(shape[-2] ** -0.5)
        return self.constant(name, self.draw.standard_normal(shape, np.float32) * scale)

    def save(self, path: Path) -> int:
        """Writes the model; returns the bytes of its parameters."""
        ports = [helper.make_tensor_value_info(n, TensorProto.FLOAT, self.shape) for n in "xy"]
        graph = helper.make_graph(self.nodes, "layers", ports[:1], ports[1:], self.weights)
        opsets = [helper.make_opsetid("", 17)]
        onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), path)
        return sum(len(w.raw_data) for w in self.weights if w.data_type == TensorProto.FLOAT)


class Encoder(Layers):
    """Writes an encoder with norms before its layers; the first dimension of x counts samples."""

    def __init__(self, layers: int, width: int, batch: int) -> None:
        super().__init__(batch, SEQUENCE, width)
        x = "x"
        for i in range(layers):
            x = self.add("Add", x, self.attention(self.norm(x, f"a{i}"), f"l{i}"))
            up = self.add("Relu", self.linear(self.norm(x, f"f{i}"), f"up{i}", width, 4 * width))
            x = self.add("Add", x, self.linear(up, f"down{i}", 4 * width, width))
        self.nodes.append(helper.make_node("Identity", [x], ["y"], "y"))

    def norm(self, x: str, name: str) -> str:
        scale = self.constant(f"{name}.scale", np.ones(self.width, np.float32))
        shift = self.constant(f"{name}.shift", np.zeros(self.width, np.float32))
        return self.add("LayerNormalization", x, scale, shift, axis=-1)

    def linear(self, x: str, name: str, wide: int, narrow: int) -> str:
        return self.add("MatMul", x, self.weight(f"{name}.weight", wide, narrow))

    def attention(self, x: str, name: str) -> str:
        shape = self.constant(f"{name}.heads", np.array([0, 0, HEADS, -1], np.int64))
        q, k, v = (
            self.add(
                "Transpose",
                self.add("Reshape", self.linear(x, f"{name}.{n}", self.width, self.width), shape),
                perm=perm,
            )
            for n, perm in (("q", [0, 2, 1, 3]), ("k", [0, 2, 3, 1]), ("v", [0, 2, 1, 3]))
        )
        each = np.float32((self.width // HEADS) ** -0.5)
        scores = self.add("Mul", self.add("MatMul", q, k), self.constant(f"{name}.scale", each))
        mixed = self.add("MatMul", self.add("Softmax", scores, axis=-1), v)
        flat = self.constant(f"{name}.flat", np.array([0, 0, self.width], np.int64))
        joined = self.add("Reshape", self.add("Transpose", mixed, perm=[0, 2, 1, 3]), flat)
        return self.linear(joined, f"{name}.o", self.width, self.width)


class Timed(Protocol):
    """Measures one step or run."""

    def seconds(self) -> float: ...


class Steps(Runner):
    """A sharded step whose batch are sequences."""

    def __init__(self, par: Path, batch: int, width: int, link: str) -> None:
        os.environ["ONNXPAR_LINK"] = link
        super().__init__(par, batch, width)
        os.environ.pop("ONNXPAR_LINK")
        x = np.random.default_rng(0).standard_normal((batch, SEQUENCE, width), np.float32)
        self.batch = {"x": x, "target": np.zeros_like(x)}


class NoteJobs(Pass):
    """Notes the nodes of a rank that compute, with predicted seconds, and the collectives between
    hosts, with the rounds of messages and the bytes that a rank sends. Changes nothing."""

    name: ClassVar[str] = "note-jobs"
    stage = Stage.LOWER
    requires = (LOCAL,)

    def __init__(self, ranks_per_host: int) -> None:
        self.ranks_per_host = ranks_per_host
        self.compute: list[float] = []
        self.sent: list[tuple[int, float]] = []
        self.needs: list[list[int]] = []

    def run(self, graph: gs.Graph, ctx: PassContext) -> bool:
        groups = groups_of(ctx.lowered.per_rank, ctx.sharding.mesh.size)
        planned = {entry.name: entry for entry in ctx.lowered.collectives}
        makers: dict[int, int] = {}
        for i, node in enumerate(graph.nodes):
            entry = planned.get(node.name)
            group = groups(node).each[0] if entry is not None else ()
            crosses = len({rank // self.ranks_per_host for rank in group}) > 1
            is_sent = entry is not None and crosses
            self.sent.append(
                messages(entry.kind, len(group), entry.operand) if is_sent else (0, 0.0)
            )
            self.compute.append(0.0 if entry else ctx.lowered.seconds.get(node.name, 0.0))
            self.needs.append([makers[id(t)] for t in read_by(node) if id(t) in makers])
            makers |= {id(t): i for t in node.outputs}
        return False

    def least(self, seconds: float, bandwidth: float) -> float:
        """The bound of a step that computes for so many seconds."""
        each = zip(self.compute, self.sent, self.needs, strict=True)
        scale = seconds / sum(self.compute)
        return least_seconds(
            [
                Job(sent / bandwidth, True, needs) if sent else Job(scale * own, False, needs)
                for own, (_, sent), needs in each
            ]
        )

    def link(self, bandwidth: float) -> float:
        """The seconds in which the link works."""
        return sum(rounds * LATENCY + sent / bandwidth for rounds, sent in self.sent)


def in_turns(runners: Mapping[str, Timed], rounds: int) -> dict[str, Any]:
    """Seconds of the steps or runs of each, which take theirs in turns."""
    times: dict[str, list[float]] = {name: [] for name in runners}
    for number in range(WARM + rounds):
        for name, runner in runners.items():
            seconds = runner.seconds()
            if number >= WARM:
                times[name].append(seconds)
    return {name: np.array(each) for name, each in times.items()}


def ops(par: Path) -> list[str]:
    """The ops of rank 0, in order."""
    model = onnx.load(par / "rank_0000.onnx", load_external_data=False)
    return [node.op_type for node in model.graph.node]


def bench(folder: Path, preset: str, size: int, options: argparse.Namespace) -> float:
    """Prints the lines of a preset; returns the share of communication that is hidden."""
    step, batch, width = folder / "step.onnx", options.batch * HOSTS, options.width
    case = CASES[preset]
    how: dict[str, Any] = {"mesh": case.mesh, "preset": preset}
    hosts = [folder / f"{preset}-{overlap}-here.par" for overlap in ("auto", "off")]
    for par, overlap in zip(hosts, ("auto", "off"), strict=True):
        onnxpar.shard(step, par, overlap=overlap, **how)
    assert ops(hosts[0]) == ops(hosts[1]), "overlap changes what ranks do on one host"

    fast = Steps(hosts[1], batch, width, "")
    with fast.trainer:
        seconds = np.median(in_turns({"fast": fast}, 5)["fast"])
    bandwidth = case.sent * size / (options.share * seconds)
    link = {"latency": f"{LATENCY * 1e6:.0f} us", "bandwidth": f"{bandwidth / 1e6:.1f} MB/s"}
    speed = {"latency": "50 us", "bandwidth": "2 GB/s"}
    host = {"name": "host", "size": case.ranks_per_host, **speed}
    topology = {"levels": [host, {"name": "network", **link}]}
    pars = {name: folder / f"{preset}-{name}.par" for name in ("auto", "off")}
    for name, par in pars.items():
        onnxpar.shard(step, par, overlap=name, topology=topology, **how)
    text = ",".join(f"{key}={value.replace(' ', '')}" for key, value in link.items())
    text += f",ranks_per_host={case.ranks_per_host}"
    runners = {name: Steps(par, batch, width, text) for name, par in pars.items()}
    with runners["auto"].trainer, runners["off"].trainer:
        times = in_turns(runners, options.rounds)
    apart, whole = (NoteJobs(case.ranks_per_host) for _ in range(2))
    for jobs, fusion in ((apart, "none"), (whole, None)):
        passes = [Placed(jobs, before="overlap-collectives")]
        how |= {"overlap": "off", "fusion": fusion, "passes": passes, "topology": topology}
        onnxpar.plan(step, **how)
    off, added = np.median(times["off"]), whole.link(bandwidth)
    least = apart.least(off - added, bandwidth)
    hidden = np.median(times["off"] - times["auto"])
    share = hidden / (off - least)
    print(
        f"{preset:14} over {text}: {off * 1e3:.0f} ms a step, of which the link works "
        f"{added * 1e3:.0f} ms; no schedule takes less than {least * 1e3:.0f} ms; of "
        f"{(off - least) * 1e3:.0f} ms that can be hidden, {hidden * 1e3:.0f} ms are: {share:.0%}",
        flush=True,
    )
    return share


def main() -> int:
    """Prints lines for each preset; fails if too little is hidden."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=list(CASES), help=", ".join(CASES))
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=8, help="samples of each host")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--share", type=float, default=0.25)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = Encoder(options.layers, options.width, options.batch * HOSTS)
        size = model.save(Path(folder) / "model.onnx")
        grad(f"{folder}/model.onnx", f"{folder}/step.onnx", loss="mse", optimizer="sgd")
        print(f"{size / 1e6:.0f} MB of parameters, {HOSTS} hosts", flush=True)
        shares = [bench(Path(folder), preset, size, options) for preset in options.cases]
    return int(min(shares) < LEAST)


if __name__ == "__main__":
    sys.exit(main())
