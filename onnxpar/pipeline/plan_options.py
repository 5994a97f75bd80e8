"""The options of every function and command that makes plans: declared once, in the form that users
write."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from numbers import Integral, Real
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Any,
    Literal,
    TypedDict,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from onnxpar.base.custom_ops import use_libraries
from onnxpar.base.near_names import did_you_mean
from onnxpar.base.progress_line import progress_line
from onnxpar.calibration.host import host_topology
from onnxpar.canonicalize.page_caches import DTYPES
from onnxpar.compiler.pass_ import Pass
from onnxpar.cost.topology import Topology
from onnxpar.errors import StrategyError
from onnxpar.layout.mesh import Mesh
from onnxpar.open_sizes.typical import Typical
from onnxpar.pipeline.auto_parallel_context import options_of_context
from onnxpar.pipeline.dataset import read_dataset
from onnxpar.pipeline.options import Options, unknown_host
from onnxpar.pipeline.pass_registry import parse_placed
from onnxpar.pipeline.placed_passes import Placed
from onnxpar.pipeline.placed_tables import places_of
from onnxpar.pipeline.plugins import load_plugin
from onnxpar.pipeline.request import request_of
from onnxpar.presets.presets import Preset
from onnxpar.search.objective import Objective
from onnxpar.search.patience import Patience
from onnxpar.strategy.strategy import Strategy

Call = TypeVar("Call", bound=Callable[..., Any])


class LayoutOptions(TypedDict, total=False):
    """Options that decide the layouts of a model. They have the names of the flags of `onnxpar
    shard`; its --help says more.

    devices         number of ranks, if no mesh is given
    mesh            named axes, "dp=2,tp=4" or a Mesh
    preset          data-parallel, tensor-parallel, hybrid, and so on; manual for a model that is
                    the program of one rank
    search          auto, the default without a preset, a strategy and annotations: the fastest
                    strategy by the cost model of the topology
    strategy        a YAML file, or the same structure: {"shard": {...}, "tensors": {...}}
    dataset_strategy  layout of the data inputs: data_parallel (the first dimension over all ranks),
                    full_batch (whole), or numbers of shards by input: [[8, 1], [8]]
    configuration   which multi-device annotations of the model to follow, or "none"
    topology        what ranks run on: a file that `onnxpar calibrate` writes, its structure, or
                    machines by name, such as "8x64-core,25GbE". Default: this host, which is
                    measured once, and the result kept
    for_any_host    True: without a topology, costs are constants, so that each host makes the same
                    plan, which promises no times
    balance         True: parts in proportion to the speed and memory of devices that differ
    objective       what the search minimizes: latency (default) or throughput
    memory_limit    most bytes that a rank may hold at any time, or text such as "16GB"
    untied          True: the search decides each of several repeated blocks by itself
    dims            sizes of symbolic dimensions, by symbol: numbers, or expressions of others
    typical         for open sizes, those that runs usually have, by symbol, or as text such as
                    "batch=8,seq=128"; or several with weights: [({"seq": 1}, 0.9), ({"seq": 512},
                    0.1)]. Costs are for these
    states          outputs that are fed back, by input, or (input, output) pairs, in addition to
                    those that are found
    find_states     find state pairs by ops and by names (default); False: use only `states`
    page_size       puts the caches of a language model's decoder in pages of so many tokens, so
                    that texts of any lengths run together, as in `onnxpar serve`. Default for a
                    folder of a language model whose caches can be in pages: 16; else 0, which
                    leaves caches as the model has them
    kv_dtype        the type of caches in pages: float32, float16, or int8, where each key and value
                    has a scale; default: that of the model
    strict          True: an op without a sharding rule is an error
    plugin          modules with passes and sharding rules of your own, or files x.py
    libraries       custom-op libraries for onnxruntime, which this process then uses in all of its
                    sessions, such as libcustom.so
    verify          check the invariants after every pass (the commands always do)
    """

    devices: int | None
    mesh: str | Mesh | None
    preset: Preset | None
    search: Literal["auto", "data-parallel", "tensor-parallel", "exhaustive", "propagation"] | None
    strategy: str | os.PathLike[str] | Mapping[str, Any] | Strategy | None
    dataset_strategy: str | Sequence[Sequence[int]] | None
    configuration: str | None
    topology: str | os.PathLike[str] | Mapping[str, Any] | Topology | None
    for_any_host: bool
    balance: bool
    objective: Literal["latency", "throughput"] | None
    memory_limit: float | str | None
    untied: bool
    dims: Mapping[str, int | str] | None
    typical: str | Mapping[str, int] | Sequence[tuple[Mapping[str, int], float]] | Typical | None
    states: Mapping[str, str] | Sequence[tuple[str, str]]
    find_states: bool
    page_size: int | None
    kv_dtype: Literal["float32", "float16", "int8"] | None
    strict: bool
    plugin: Sequence[str]
    libraries: Sequence[str | os.PathLike[str]]
    verify: bool


class PlanOptions(LayoutOptions, total=False):
    """Options that decide a plan: those of `LayoutOptions`, and these.

    fusion          how collectives are joined: size, cost or none
    overlap         whether communication runs while ranks compute: auto (default: between hosts,
                    where it gains by the cost model), on or off
    bucket_mb       largest fused collective, in MiB
    compression     format in which ranks send gradients of a training step: float16, bfloat16,
                    2bit:THRESHOLD or none
    place           where tables are: {"*.tables.*": "host"}, or texts such as "*.tables.*=host".
                    On the host, they stay in mapped files, and ranks have in memory the rows that
                    they use
    passes          passes to run besides those of onnxpar (--add-pass), each with its place:
                    "NAME{option=value} before PASS" or `Placed(PASS, before="NAME")`; a pass that
                    rewrites the model needs no place
    """

    fusion: str | None
    overlap: Literal["auto", "on", "off"] | None
    bucket_mb: float | None
    compression: str | None
    place: Mapping[str, str] | Sequence[str]
    passes: Sequence[str | Pass | Placed]


DEFAULTS: Mapping[str, Any] = {
    "for_any_host": False,
    "balance": False,
    "untied": False,
    "states": (),
    "find_states": True,
    "strict": False,
    "plugin": (),
    "libraries": (),
    "place": (),
    "passes": (),
    "verify": False,
}
"""Defaults of the options whose default is not None."""


_ABSTRACT: Mapping[type, type] = {int: Integral, float: Real}
"""Abstract types, which also admit NumPy's numbers."""


Kind = type[LayoutOptions] | type[PlanOptions]


_type_hints = cache(get_type_hints)


def _hints(kind: Kind) -> Mapping[str, Any]:
    return _type_hints(cast(Any, kind))


def option_names(kind: Kind = PlanOptions) -> tuple[str, ...]:
    """The names of all options, in order."""
    return tuple(_hints(kind))


def options_of(
    asked: Mapping[str, Any], caller: str = "options_of", kind: Kind = PlanOptions
) -> Options:
    """Converts the options that a user gives to those of the pipeline.

    Errors: TypeError for a name that `caller` does not have, as in any Python call; StrategyError
    for a value of the wrong type, or one that cannot be read.
    """
    hints = _hints(kind)
    for name, value in asked.items():
        _check(name, value, caller, hints)
    strategy = Strategy.given(asked.get("strategy"))
    if strategy is not None and strategy.context:
        asked = _with_context(asked, strategy, hints)
    for module in asked.get("plugin", ()):
        load_plugin(module)
    use_libraries(asked.get("libraries", ()))
    added = asked.get("passes", ())
    mesh, bucket_mb = asked.get("mesh"), asked.get("bucket_mb")
    mesh = Mesh.parse(mesh) if isinstance(mesh, str) else mesh
    return Options(
        devices=asked.get("devices"),
        mesh=mesh,
        preset=asked.get("preset"),
        search=asked.get("search"),
        strategy=strategy,
        dataset=read_dataset(asked.get("dataset_strategy")),
        configuration=asked.get("configuration"),
        topology=Topology.given(asked.get("topology"), mesh.size if mesh else asked.get("devices")),
        host=unknown_host if asked.get("for_any_host") else partial(host_topology, shard_batch),
        on_any_host=asked.get("for_any_host", False),
        balance=asked.get("balance", False),
        objective=Objective.given(
            asked.get("objective"),
            asked.get("memory_limit"),
            asked.get("untied", False),
            Patience(tell=progress_line("search")),
        ),
        dims=asked.get("dims"),
        typical=Typical.given(asked.get("typical")),
        states=_pairs(asked.get("states") or ()),
        find_states=asked.get("find_states", True),
        page_size=_page_size(asked.get("page_size")),
        kv_dtype=_kv_dtype(asked.get("kv_dtype")),
        fusion=asked.get("fusion"),
        overlap=asked.get("overlap"),
        bucket_bytes=None if bucket_mb is None else int(bucket_mb * (1 << 20)),
        compression=asked.get("compression"),
        place=places_of(asked.get("place", ())),
        strict=asked.get("strict", False),
        passes=[parse_placed(each) if isinstance(each, str) else each for each in added],
        verify=asked.get("verify", False),
        request=request_of(asked),
    )


def shard_batch(model: Path, par: Path, ranks: int) -> None:
    """Writes a model over ranks, in parts of its batch, as measuring a session needs it."""
    from onnxpar.pipeline.pipeline import shard  # most commands write none

    shard(model, par, Options(ranks, preset="data-parallel"))


def _page_size(asked: int | None) -> int | None:
    """Errors: StrategyError for a negative size."""
    if asked is not None and asked < 0:
        raise StrategyError(f"--page-size {asked}: a page has at least one token; 0 is for none")
    return asked


def _kv_dtype(asked: str | None) -> str | None:
    """Errors: StrategyError for a type that caches cannot have."""
    if asked is not None and asked not in DTYPES:
        raise StrategyError(f"--kv-dtype {asked}: give {', '.join(DTYPES)}")
    return asked


def _with_context(
    asked: Mapping[str, Any], strategy: Strategy, known: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Returns the options with those of a strategy's section `context`, as far as the call has
    them: `annotate` fuses nothing. Errors: StrategyError for a setting that an option contradicts,
    or that a strategy cannot have."""
    source = f"{strategy.source}: context"
    found = options_of_context(strategy.context, source)
    every = _hints(PlanOptions)
    found = {name: value for name, value in found.items() if name in known or name not in every}
    for name, value in found.items():
        if name not in known or name == "strategy":
            flag = f"--{name.replace('_', '-')}"
            raise StrategyError(f"{source}: files belong to the command; give {flag} {value} there")
        if asked.get(name) not in (None, value):
            raise StrategyError(
                f"{source} asks for {name}={value!r}, and the option for {asked[name]!r}; give one "
                "of them"
            )
    return {**asked, **found}


def lists(kind: Kind) -> Callable[[Call], Call]:
    """Decorator: lists each option in the signature of a function that takes **options, for help()
    and editors."""
    options = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=DEFAULTS.get(name),
            annotation=getattr(annotation, "__forward_arg__", annotation),
        )
        for name, annotation in kind.__annotations__.items()
    ]

    def shown(function: Call) -> Call:
        own = inspect.signature(function)
        parameters = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
        signature = own.replace(parameters=[*parameters, *options])
        function.__signature__ = signature  # type: ignore[attr-defined]
        return function

    return shown


def _check(name: str, value: Any, caller: str, hints: Mapping[str, Any]) -> None:
    if name not in hints:
        raise TypeError(f"{caller}() has no option {name!r}{did_you_mean(name, hints)}")
    kinds = tuple(_kinds(hints[name]))
    is_list = (
        not isinstance(value, str) or str in kinds
    )  # a string is a Sequence, but not a valid list
    if not is_list or not isinstance(value, tuple(_ABSTRACT.get(kind, kind) for kind in kinds)):
        wanted = ", ".join(kind.__name__ for kind in kinds if kind is not NoneType)
        raise StrategyError(
            f"{name}={value!r:.60} is of type {type(value).__name__}; give {wanted}"
        )


def _pairs(given: Mapping[str, str] | Sequence[tuple[str, str]]) -> Sequence[tuple[str, str]]:
    return list(given.items()) if isinstance(given, Mapping) else given


def _kinds(hint: Any) -> Iterable[type]:
    """The classes that a type annotation admits."""
    if get_origin(hint) in (Union, UnionType):
        for each in get_args(hint):
            yield from _kinds(each)
        return
    yield str if get_origin(hint) is Literal else get_origin(hint) or hint
