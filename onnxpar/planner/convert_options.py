"""Converts the options of the command line and of Python's functions to the compiler's
`Options`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from onnxpar.base.custom_ops import use_libraries
from onnxpar.base.errors import StrategyError
from onnxpar.base.progress_line import progress_line
from onnxpar.cost.host import host_topology
from onnxpar.cost.topology import Topology
from onnxpar.graph.typical import Typical
from onnxpar.layout.mesh import Mesh
from onnxpar.load.page_caches import DTYPES
from onnxpar.planner.auto_parallel_context import options_of_context
from onnxpar.planner.dataset_strategy import read_dataset
from onnxpar.planner.option_entry import check_options, table, with_defaults
from onnxpar.planner.option_table import Kind, PlanOptions
from onnxpar.planner.options import Options, unknown_host
from onnxpar.planner.pass_registry import parse_placed
from onnxpar.planner.placed_tables import places_of
from onnxpar.planner.plugins import load_plugin
from onnxpar.planner.request import request_of
from onnxpar.search.objective import Objective
from onnxpar.search.patience import Patience
from onnxpar.strategy.strategy import Strategy


def options_of(
    user_options: Mapping[str, Any], caller: str = "options_of", kind: Kind = PlanOptions
) -> Options:
    """Returns the compiler's options.

    user_options  the user's, by name; options that are left out have their defaults
    caller        the function's name in errors
    kind          the table of options that the function takes

    Errors: TypeError for a name that the function does not have; StrategyError for a value of the
    wrong type, or a value that cannot be read.
    """
    check_options(user_options, kind, caller)
    strategy = Strategy.from_argument(user_options.get("strategy"))
    if strategy is not None and strategy.context:
        user_options = _with_context(user_options, strategy, table(kind))
    values = with_defaults(user_options, PlanOptions)
    for module in values["plugin"]:
        load_plugin(module)
    use_libraries(values["libraries"])
    mesh, bucket_mb = Mesh.from_argument(values["mesh"]), values["bucket_mb"]
    limits = values["objective"], values["memory_limit"], values["untied"]
    return Options(
        mesh=mesh,
        strategy=strategy,
        dataset=read_dataset(values["dataset_strategy"]),
        topology=Topology.from_argument(
            values["topology"], mesh.size if mesh else values["devices"]
        ),
        host=unknown_host if values["for_any_host"] else partial(host_topology, shard_batch),
        on_any_host=values["for_any_host"],
        objective=Objective.from_argument(*limits, Patience(tell=progress_line("search"))),
        typical=Typical.from_argument(values["typical"]),
        states=_pairs(values["states"] or ()),
        page_size=_page_size(values["page_size"]),
        kv_dtype=_kv_dtype(values["kv_dtype"]),
        bucket_bytes=None if bucket_mb is None else int(bucket_mb * (1 << 20)),
        place=places_of(values["place"]),
        passes=[parse_placed(p) if isinstance(p, str) else p for p in values["passes"]],
        request=request_of(user_options),
        **{name: values[name] for name in _AS_GIVEN},
    )


_AS_GIVEN = (
    *("devices", "preset", "search", "configuration", "balance", "dims", "find_states"),
    *("fusion", "overlap", "compression", "strict", "check_layouts"),
)
"""Options whose values are the same in `Options`."""


def shard_batch(model: Path, par: Path, ranks: int) -> None:
    """Splits the batch of a model over ranks and writes the result to `par`. The calibration
    measures a session with it."""
    from onnxpar.planner.sharder import shard  # most commands do not shard

    shard(model, par, Options(ranks, preset="data-parallel"))


def _page_size(size: int | None) -> int | None:
    """Returns the size of pages of caches. Errors: StrategyError for a negative size."""
    if size is not None and size < 0:
        raise StrategyError(f"--page-size {size}: a page has at least one token; 0 is for none")
    return size


def _kv_dtype(dtype: str | None) -> str | None:
    """Returns the dtype of caches in pages. Errors: StrategyError for one that caches cannot
    have."""
    if dtype is not None and dtype not in DTYPES:
        raise StrategyError(f"--kv-dtype {dtype}: give {', '.join(DTYPES)}")
    return dtype


def _with_context(
    options: Mapping[str, Any], strategy: Strategy, known: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Returns the options together with the settings of the section `context` of a strategy file.
    Settings that the function does not take are left out: `annotate` fuses nothing. `known` is the
    table of its options. Errors: StrategyError for a setting that an option contradicts, or that a
    strategy cannot have."""
    source = f"{strategy.source}: context"
    new = options_of_context(strategy.context, source)
    every = table(PlanOptions)
    new = {name: value for name, value in new.items() if name in known or name not in every}
    for name, value in new.items():
        if name not in known or name == "strategy":
            flag = f"--{name.replace('_', '-')}"
            raise StrategyError(f"{source}: files belong to the command; give {flag} {value} there")
        if options.get(name) not in (None, value):
            raise StrategyError(
                f"{source} asks for {name}={value!r}, and the option for {options[name]!r}; give "
                "one of them"
            )
    return {**options, **new}


def _pairs(given: Mapping[str, str] | Sequence[tuple[str, str]]) -> Sequence[tuple[str, str]]:
    return list(given.items()) if isinstance(given, Mapping) else given
