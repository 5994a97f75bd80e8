"""The search beside every preset and Megatron's plan on models in their real sizes: what each takes
by the cost model, as it is compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from bench import model_shapes

from onnxpar.cost.topology import Topology
from onnxpar.layout.mesh import Mesh
from onnxpar.planner.loader import Loader
from onnxpar.planner.options import Options
from onnxpar.report.compare_strategies import Candidate, try_candidate
from onnxpar.strategy.strategy import Strategy

SAME = 1e-6
"""What is slower by this share is as fast."""
HOSTS = Topology.of(
    {
        "levels": [
            {"name": "host", "size": 8, "latency": "10 us", "bandwidth": "20 GB/s"},
            {"name": "cluster", "latency": "50 us", "bandwidth": "3 GB/s"},
        ],
        "device": {"flops": "10 TFLOP/s", "memory_bandwidth": "500 GB/s", "launch": "5 us"},
    }
)
"""Accelerators, eight to a host, on a network that is slower than what joins those."""
TOPOLOGIES = {"one host": Topology.default(), "hosts of 8": HOSTS}


@dataclass(frozen=True)
class Workload:
    """A model and what it is fed. `megatron` has the layouts of weights (Shoeybi et al.,
    "Megatron-LM", 2019): columns, then rows, and a table split by its vocabulary; over up to
    `most` ranks, as there are so many heads of keys."""

    write: Callable[[Path], Path]
    megatron: Mapping[str, Any] = field(default_factory=dict)
    most: int = 1 << 20


def _columns_and_rows(columns: str, rows: str, vocabulary: str) -> dict[str, Any]:
    """Layouts of matrices `name.layer.w` and of the biases behind columns."""
    asked: dict[str, Any] = {vocabulary: ["tp", None]}
    for name in columns.split():
        asked |= {f"{name}.*.w": [None, "tp"], f"{name}.*.b": ["tp"]}
    return asked | {f"{name}.*.w": ["tp", None] for name in rows.split()}


_GPT2 = _columns_and_rows("qkv up", "o down", "wte")
BERT = _columns_and_rows("q k v up", "o down", "words")
LLAMA: dict[str, Any] = {
    **{f"{name}.*": [None, "tp"] for name in ("q", "k", "v", "gate", "up")},
    **{"o.*": ["tp", None], "down.*": ["tp", None], "head": [None, "tp"], "embed": ["tp", None]},
}
_gpt2 = partial(model_shapes.gpt2, layers=4, width=1600, heads=25)

WORKLOADS = {
    "GPT-2 XL, 1 x 16": Workload(partial(_gpt2, batch=1, seq=16), _GPT2),
    "GPT-2 XL, 1 x 512": Workload(partial(_gpt2, batch=1, seq=512), _GPT2),
    "GPT-2 XL, 1024 x 64": Workload(partial(_gpt2, batch=1024, seq=64), _GPT2),
    "Llama 3 8B, 1 x 1": Workload(partial(model_shapes.llama, batch=1, seq=1), LLAMA, 8),
    "Llama 3 8B, 1 x 512": Workload(partial(model_shapes.llama, batch=1, seq=512), LLAMA, 8),
    "Llama 3 8B, 1024 x 16": Workload(partial(model_shapes.llama, batch=1024, seq=16), LLAMA, 8),
    "BERT large, 1 x 128": Workload(partial(model_shapes.bert, batch=1, seq=128), BERT, 16),
    "BERT large, 1024 x 128": Workload(partial(model_shapes.bert, batch=1024, seq=128), BERT, 16),
    "GShard, 1 x 64": Workload(partial(model_shapes.gshard, batch=1, seq=64)),
    "GShard, 1024 x 64": Workload(partial(model_shapes.gshard, batch=1024, seq=64)),
    "Mixtral, 1 x 16": Workload(partial(model_shapes.mixtral, batch=1, seq=16)),
    "Mixtral, 1024 x 16": Workload(partial(model_shapes.mixtral, batch=1024, seq=16)),
    "DLRM, 1": Workload(partial(model_shapes.dlrm, batch=1)),
    "DLRM, 8192": Workload(partial(model_shapes.dlrm, batch=8192)),
    "ResNet-50, 1": Workload(partial(model_shapes.resnet, batch=1)),
    "ResNet-50, 1024": Workload(partial(model_shapes.resnet, batch=1024)),
}


def searched(path: Path, given: Options) -> Candidate:
    """What the search finds."""
    found = try_candidate(path, replace(given, search="auto"), Loader(path))
    assert isinstance(found, Candidate), found.reason
    return found


def rivals(work: Workload, path: Path, given: Options) -> dict[str, float]:
    """Seconds of a run, by each strategy that applies to the mesh."""
    loader = Loader(path)
    tried = {name: try_candidate(path, how, loader) for name, how in _rivals(work, given)}
    return {n: c.predicted.total for n, c in tried.items() if isinstance(c, Candidate)}


def _rivals(work: Workload, given: Options) -> Iterator[tuple[str, Options]]:
    assert given.mesh is not None
    sizes = given.mesh.sizes
    one_axis = ("data-parallel", "tensor-parallel", "expert-parallel")
    for preset in (*(("hybrid",) if "dp" in sizes else one_axis), "sequence-parallel"):
        yield preset, replace(given, preset=preset)
    if work.megatron and sizes["tp"] <= work.most:
        yield "megatron", replace(given, strategy=Strategy.of({"tensors": work.megatron}))


def meshes(ranks: int) -> Iterator[Mesh]:
    """Those of presets: one axis, and two of all sizes."""
    yield Mesh((("tp", ranks),))
    for major in range(2, ranks):
        if ranks % major == 0:
            yield Mesh((("dp", major), ("tp", ranks // major)))
