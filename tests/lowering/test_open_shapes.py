"""The shapes that a rank's graph declares are those that its tensors have, at any sizes, so that
onnxruntime fuses what it fuses in the unsplit model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from committed import MODELS

from onnxpar.api import shard
from onnxpar.runtime.ranks.executor import SIZES
from onnxpar.runtime.ranks.groups import World, session_options, thread_worlds
from onnxpar.runtime.session.bundle import Bundle
from onnxpar.runtime.session.feeds import make_feeds
from onnxpar.runtime.session.shards import PortParts

EXPORTS = ["bert", "gpt2", "vit", "unet"]


@pytest.fixture
def worlds_of() -> Iterator[Callable[[int], list[World]]]:
    """Worlds of threads, which are closed at the end."""
    with ExitStack() as stack:
        yield lambda ranks: [stack.enter_context(world) for world in thread_worlds(ranks)]


def feeds_of(par: Path, sizes: dict[str, int]) -> dict[str, np.ndarray]:
    """Random inputs; indices are small."""
    bundle = Bundle.load(par)
    specs = [(n, kind, bundle.inputs[n].shape_at(sizes)) for n, kind, _ in bundle.input_specs]
    return make_feeds(specs, {}, 0)


def sizes_of(par: Path, least: int) -> dict[str, int]:
    return {symbol: least + i for i, symbol in enumerate(Bundle.load(par).symbols)}


def shapes_in(
    path: Path, folder: Path, world: World, feeds: dict[str, np.ndarray]
) -> list[tuple[str, list[int | str | None], tuple[int, ...]]]:
    """Name, declared shape and true shape of each tensor that a rank's graph declares."""
    model = onnx.load(path, load_external_data=False)
    declared = {v.name: v for v in model.graph.value_info}
    model.graph.output.extend(declared.values())
    exposed = path.with_suffix(f".{world.rank}.exposed.onnx")
    onnx.save(model, exposed)
    options = session_options(world)
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(exposed, options, providers=["CPUExecutionProvider"])
    found = session.run(list(declared), feeds)
    return [
        (
            name,
            [
                d.dim_param or (d.dim_value if d.HasField("dim_value") else None)
                for d in declared[name].type.tensor_type.shape.dim
            ],
            np.shape(value),
        )
        for name, value in zip(declared, found, strict=True)
    ]


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("preset", ["data-parallel", "tensor-parallel"])
@pytest.mark.parametrize("model", EXPORTS)
def test_declared_shapes_are_true(
    model: str, preset: str, tmp_path: Path, worlds_of: Callable[[int], list[World]]
) -> None:
    par = tmp_path / "m.par"
    shard(MODELS / f"{model}.dynamo.dynamic.onnx", par, devices=2, preset=preset)
    bundle = Bundle.load(par)
    for least in (1, 2, 5):
        sizes = sizes_of(par, least)
        values = tuple(sizes[symbol] for symbol in bundle.symbols)
        whole, parts = feeds_of(par, sizes), PortParts(bundle).at(values)
        worlds = worlds_of(2)

        def of(rank: int) -> list[tuple[str, list[int | str | None], tuple[int, ...]]]:
            own = {n: parts[n].take(a, rank) for n, a in whole.items()}  # noqa: B023
            own[SIZES] = np.array(values, np.int64)  # noqa: B023
            return shapes_in(bundle.rank_file(rank), tmp_path, worlds[rank], own)  # noqa: B023

        with ThreadPoolExecutor(2) as pool:
            for found in pool.map(of, range(2)):
                assert len(found) > 50
                named: dict[str, int] = {}
                for tensor, declared, shape in found:
                    assert len(declared) == len(shape), tensor
                    for wanted, size in zip(declared, shape, strict=True):
                        if isinstance(wanted, str):
                            assert named.setdefault(wanted, size) == size, tensor
                        else:
                            assert wanted in (size, None), tensor


def fused(path: Path, folder: Path, options: ort.SessionOptions) -> Counter[str]:
    """The ops of a model after onnxruntime's optimizations."""
    options.optimized_model_filepath = str(folder / "optimized.onnx")
    ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    nodes = onnx.load(folder / "optimized.onnx", load_external_data=False).graph.node
    return Counter(node.op_type for node in nodes)


@pytest.mark.slow
@pytest.mark.matrix
@pytest.mark.parametrize("model", EXPORTS)
def test_ranks_fuse_what_the_unsplit_model_fuses(
    model: str, tmp_path: Path, worlds_of: Callable[[int], list[World]]
) -> None:
    path, par = MODELS / f"{model}.dynamo.dynamic.onnx", tmp_path / "m.par"
    shard(path, par, devices=2, preset="data-parallel")
    unsplit = fused(path, tmp_path, ort.SessionOptions())
    world = worlds_of(2)[1]
    split = fused(Bundle.load(par).rank_file(1), tmp_path, session_options(world))
    ops = ("SkipLayerNormalization", "LayerNormalization", "BiasGelu", "FusedMatMul", "Gelu")
    assert {op: split[op] for op in ops} == {op: unsplit[op] for op in ops}
