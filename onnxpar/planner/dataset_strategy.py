"""The option --dataset-strategy: the layouts of all data inputs together, as in MindSpore."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from onnxpar.base.errors import StrategyError
from onnxpar.graph.annotations import choose_configuration
from onnxpar.graph.tensors import tensor_shape
from onnxpar.load.load import Model
from onnxpar.planner.options import Dataset, Options, wanted_mesh
from onnxpar.search.search import AUTO
from onnxpar.strategy.annotated_strategy import annotated_mesh
from onnxpar.strategy.manual import MANUAL
from onnxpar.strategy.strategy import Strategy

DATA_PARALLEL, FULL_BATCH = "data_parallel", "full_batch"
_FORMS = (
    f"give {DATA_PARALLEL}, {FULL_BATCH}, or the numbers of shards of each data input's "
    "dimensions: [[8, 1], [8]]"
)


def read_dataset(value: str | Sequence[Sequence[int]] | None) -> Dataset:
    """Returns the option's value: one of two names, or numbers of shards, by input and dimension,
    which may be JSON text. Errors: StrategyError."""
    if value is None or value in (DATA_PARALLEL, FULL_BATCH):
        return value
    try:
        counts = counts_of(json.loads(value) if isinstance(value, str) else value)
    except (ValueError, RecursionError):
        counts = None
    if counts is None:
        raise StrategyError(f"--dataset-strategy {value!s:.60}: {_FORMS}")
    return counts


def counts_of(value: object) -> tuple[tuple[int, ...], ...] | None:
    """Returns numbers of shards by input and dimension as tuples: [[8, 1], [8]] becomes ((8, 1),
    (8,)). None if the value is anything else."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        return None
    if not all(isinstance(numbers, Sequence) for numbers in value):
        return None
    counts = tuple(tuple(numbers) for numbers in value)
    return counts if all(type(n) is int and n > 0 for c in counts for n in c) else None


def with_dataset(options: Options, model: Model) -> Options:
    """Returns the options with an entry in the strategy for each data input: in a training step,
    the inputs of a batch; else all inputs that are no states. Entries of the user's strategy
    overrule these. Errors: StrategyError."""
    dataset = options.dataset
    if dataset is None:
        return options
    if options.preset == MANUAL:
        raise StrategyError(
            "--dataset-strategy: the tensors of --strategy say how the inputs of a manual program "
            "are cut; leave it out"
        )
    ranks = _ranks(options, model)
    shapes = _data_shapes(model)
    if not isinstance(dataset, str) and len(dataset) != len(shapes):
        raise StrategyError(
            f"--dataset-strategy lists {len(dataset)} inputs; the data inputs are "
            f"{', '.join(shapes) or 'none'}"
        )
    entries = {}
    for number, (name, rank) in enumerate(shapes.items()):
        dim = model.step.batch.get(name) if model.step is not None else 0
        counts = _counts(dataset, rank, dim, ranks) if isinstance(dataset, str) else dataset[number]
        if len(counts) != rank:
            raise StrategyError(
                f"--dataset-strategy: {name} has {rank} dimensions, but {len(counts)} numbers of "
                "shards are given"
            )
        entries[name] = list(counts)
    strategy = options.strategy or Strategy(source="--dataset-strategy")
    is_open = options.strategy is None and options.preset is None and options.search is None
    return replace(
        options,
        dataset=None,
        strategy=replace(strategy, tensors={**entries, **strategy.tensors}),
        search=AUTO if is_open else options.search,
    )


def _ranks(options: Options, model: Model) -> int:
    """Returns the number of ranks that the options or the model's annotations ask for; 1 if neither
    does, because then the choice of the mesh fails with the right error."""
    mesh = wanted_mesh(options)
    if mesh is None and options.devices is None:
        annotated = choose_configuration(model.annotations, options.configuration, None)
        mesh = annotated_mesh(annotated, None) if annotated is not None else None
    return mesh.size if mesh is not None else options.devices or 1


def _counts(dataset: str, rank: int, dim: int | None, ranks: int) -> list[int]:
    """Returns the number of shards of each of the `rank` dimensions of an input: with
    "data_parallel", dimension `dim` is split over all ranks."""
    counts = [1] * rank
    if rank and dim is not None and dataset == DATA_PARALLEL:
        counts[dim] = ranks
    return counts


def _data_shapes(model: Model) -> dict[str, int]:
    """Returns the number of dimensions of each data input, in the order of the inputs."""
    states = {source for source, _ in model.states}
    names = model.step.data if model.step is not None else None
    shapes = ((t.name, tensor_shape(t)) for t in model.graph.inputs)
    return {
        name: len(shape)
        for name, shape in shapes
        if shape is not None and (name in names if names is not None else name not in states)
    }
