"""Runs of a mixture of experts over a slow link, with and without tokens that travel while ranks
compute.

    python tests/bench/bench_overlap_experts.py [CASE ...] [--layers 3] [--tokens 8192]

Each layer has a router that chooses one of 8 experts for each token, and a shared expert, which
computes after the others in the model (`last`) or before them (`first`). The layers run under
expert-parallel over two hosts of one rank. The link is simulated (ONNXPAR_LINK), and so slow that
it moves the tokens of a run in --share of the run's time. Runs with and without overlap take turns,
and must have the same bits. Prints what overlap takes off, the median over all turns, beside the
seconds in which the link works.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
from bench_overlap import LATENCY, Layers, in_turns, ops
from onnx import helper

import onnxpar

CASES = {"last": False, "first": True}
"""Whether the shared expert comes first in the model."""
EXPERTS = 8
EXCHANGES = 2
"""Of a layer: there and back."""


class Mixture(Layers):
    """Writes layers of a mixture of experts, each with a shared one, and their residuals; `first`:
    the shared expert comes before the router in the model."""

    def __init__(self, layers: int, width: int, tokens: int, first: bool) -> None:
        super().__init__(tokens, width)
        x = "x"
        for i in range(layers):
            parts = [self.shared, self.routed] if first else [self.routed, self.shared]
            left, right = (part(x, f"l{i}") for part in parts)
            x = self.add("Add", x, self.add("Tanh", self.add("Add", left, right)))
        self.nodes.append(helper.make_node("Identity", [x], ["y"], "y"))

    def shared(self, x: str, name: str) -> str:
        up = self.add("MatMul", x, self.weight(f"{name}.up", self.width, 2 * self.width))
        up = self.add("Tanh", up)
        return self.add("MatMul", up, self.weight(f"{name}.down", 2 * self.width, self.width))

    def routed(self, x: str, name: str) -> str:
        n, zero, two = (
            self.constant(f"{name}.{key}", value)
            for key, value in (
                ("experts", np.arange(EXPERTS).reshape(-1, 1, 1)),
                ("zero", np.array([0])),
                ("two", np.array([2])),
            )
        )
        nothing = self.constant(f"{name}.nothing", np.float32(0))
        scores = self.add("MatMul", x, self.weight(f"{name}.router", self.width, EXPERTS))
        ids = self.add("ArgMax", scores, axis=1, keepdims=1)
        hot = self.add("Equal", self.add("Unsqueeze", ids, zero), n)
        count = self.add("ReduceSum", self.add("Cast", hot, to=1), two, keepdims=1)
        chosen = self.add("Cast", count, to=9)
        rows = self.add("Where", chosen, x, nothing)
        up = self.weight(f"{name}.w1", EXPERTS, self.width, 2 * self.width)
        down = self.weight(f"{name}.w2", EXPERTS, 2 * self.width, self.width)
        done = self.add("MatMul", self.add("Tanh", self.add("MatMul", rows, up)), down)
        kept = self.add("Where", chosen, done, nothing)
        return self.add("ReduceSum", kept, zero, keepdims=0)


class Runs:
    """Runs of a sharded model, in processes of its own."""

    def __init__(self, par: Path, tokens: int, width: int, link: str) -> None:
        os.environ["ONNXPAR_LINK"] = link
        self.session = onnxpar.InferenceSession(par)
        os.environ.pop("ONNXPAR_LINK")
        x = np.random.default_rng(0).standard_normal((tokens, width), np.float32)
        self.feeds = {"x": x}

    def seconds(self) -> float:
        """Runs once; how long it took."""
        start = time.perf_counter()
        (self.y,) = self.session.run(None, self.feeds)
        return time.perf_counter() - start


def bench(folder: Path, case: str, options: argparse.Namespace) -> None:
    """Prints the line of a case. The plan over the slow link has the bytes that tokens take."""
    model, tokens, width = folder / f"{case}.onnx", options.tokens, options.width
    Mixture(options.layers, width, tokens, CASES[case]).save(model)
    how = {"mesh": "ep=2", "preset": "expert-parallel"}
    host = {"name": "host", "size": 1, "latency": "50 us", "bandwidth": "2 GB/s"}
    latency, bandwidth = f"{LATENCY * 1e6:.0f} us", 50e6
    pars = {name: folder / f"{case}-{name}.par" for name in ("auto", "off")}
    for _ in range(2):  # the second time over the link that suits the first
        network = {"name": "network", "latency": latency, "bandwidth": f"{bandwidth:.0f} B/s"}
        for name, par in pars.items():
            shutil.rmtree(par, ignore_errors=True)
            topology = {"levels": [host, network]}
            plan = onnxpar.shard(model, par, overlap=name, topology=topology, **how)
        assert "AllToAllV" in {c.kind for c in plan.collectives}, "no tokens travel"
        sent, before = sum(c.bytes for c in plan.collectives), bandwidth
        fast = Runs(pars["off"], tokens, width, "")
        with fast.session:
            seconds = np.median(in_turns({"fast": fast}, 5)["fast"])
        bandwidth = sent / (options.share * seconds)
    started = ops(pars["auto"]).count("StartAllToAllV")
    assert started > 0, "nothing is started"
    text = f"latency={latency.replace(' ', '')},bandwidth={before:.0f}B/s,ranks_per_host=1"
    runners = {name: Runs(par, tokens, width, text) for name, par in pars.items()}
    with runners["auto"].session, runners["off"].session:
        times = in_turns(runners, options.rounds)
        np.testing.assert_array_equal(runners["auto"].y, runners["off"].y)
    hidden = np.median(times["off"] - times["auto"])
    print(
        f"shared expert {case}: {started} of {EXCHANGES * options.layers} exchanges are started; "
        f"{np.median(times['off']) * 1e3:.1f} ms a run, of which the link works "
        f"{sent / before * 1e3:.1f} ms; {hidden * 1e3:.1f} ms are hidden",
        flush=True,
    )


def main() -> None:
    """Prints a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", default=list(CASES), help=", ".join(CASES))
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--share", type=float, default=0.25)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for case in options.cases:
            bench(Path(folder), case, options)


if __name__ == "__main__":
    main()
