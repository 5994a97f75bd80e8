"""Options of `shard`, `plan` and `check`, and the mesh, preset or search that follow from them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from onnxpar.base.errors import StrategyError
from onnxpar.base.pass_times import PassTimes
from onnxpar.compiler.pass_ import Pass
from onnxpar.cost.topology import Topology
from onnxpar.graph.training_spec import Step
from onnxpar.graph.typical import Typical
from onnxpar.layout.mesh import Mesh, check_ranks
from onnxpar.planner.placed_passes import Placed
from onnxpar.search.objective import Objective
from onnxpar.search.search import PROPAGATION, SEARCHES
from onnxpar.strategy.manual import MANUAL, Manual
from onnxpar.strategy.presets import preset_mesh
from onnxpar.strategy.strategy import Strategy

Host = Callable[[], Topology | None]
"""Returns the topology of this host; None if it is unknown."""
Dataset = str | tuple[tuple[int, ...], ...] | None
"""The layout of all data inputs: a name, or numbers of shards by input and dimension."""


def unknown_host() -> None:
    """A `Host` that returns None."""


@dataclass(frozen=True)
class Options:
    """The options that `shard`, `plan` and `check` share; see `onnxpar shard --help`.

    dataset    the layout of the data inputs, which `with_dataset` adds to the strategy
    balance    True: ranks share the work in proportion to the speed of their devices
    shares     the shares to take with `balance`; if empty, they follow from the speeds
    place      where tables are, by glob: HOST
    page_size  tokens of a page of a decoder's caches; 0 or None: the caches stay as in the model
    pages_if_possible  true if a decoder whose caches cannot be in pages keeps them as they are
    kv_dtype   the type of these caches; None: as in the model
    part       the part of an encoder-decoder that is loaded from its folder; None: any other model
    compared   true if the plan is one of several that are compared by the objective
    on_any_host  true if the plan must not depend on this host, and promises no times for it
    host       called when costs are needed and there is no `topology`; if it returns None, costs
               are those of the default topology
    times      collects the wall time of each pass
    request    the user's options in a form for plan.json; None if they have no such form
    """

    devices: int | None = None
    mesh: Mesh | None = None
    preset: str | None = None
    strategy: Strategy | None = None
    dims: Mapping[str, int | str] | None = None
    states: Sequence[tuple[str, str]] = ()
    find_states: bool = True
    page_size: int | None = None
    pages_if_possible: bool = False
    kv_dtype: str | None = None
    part: str | None = None
    strict: bool = False
    verify: bool = False
    configuration: str | None = None
    compression: str | None = None
    replicas: bool = False
    exposed: Collection[str] = ()
    fusion: str | None = None
    overlap: str | None = None
    bucket_bytes: int | None = None
    topology: Topology | None = None
    search: str | None = None
    objective: Objective = field(default_factory=Objective)
    passes: Sequence[Pass | Placed] = ()
    compared: bool = False
    place: Mapping[str, str] = field(default_factory=dict)
    balance: bool = False
    shares: tuple[float, ...] = ()
    dataset: Dataset = None
    typical: Typical = field(default_factory=Typical)
    on_any_host: bool = False
    host: Host = unknown_host
    times: PassTimes = field(default_factory=PassTimes, compare=False)
    request: Mapping[str, object] | None = None


NO_RANKS = "how many ranks? give --devices N or --mesh dp=..,tp=.."


def wanted_mesh(options: Options) -> Mesh | None:
    """The mesh in the user's options or strategy; None if neither has a mesh. Errors: StrategyError
    for another number of ranks than in --devices."""
    mesh, strategy = options.mesh, options.strategy
    whose = "the mesh"
    if mesh is None and strategy is not None and strategy.mesh is not None:
        mesh, whose = strategy.mesh, f"the mesh of {strategy.source}"
    if mesh is not None and options.devices not in (None, mesh.size):
        raise StrategyError(
            f"{whose}, {mesh}, has {mesh.size} ranks, but --devices is {options.devices}; leave "
            "--devices out, or give another --mesh"
        )
    return mesh


def preset_or_search(options: Options) -> str | None:
    """The preset or the kind of search that the user names; None for neither, and for the search
    `propagation`. Errors: StrategyError if the user names both."""
    search, preset = options.search, options.preset
    if search is None:
        return preset
    if search not in SEARCHES:
        raise StrategyError(f"--search {search!r}: give one of {', '.join(SEARCHES)}")
    if preset is not None:
        raise StrategyError(f"--search {search} and --preset {preset}: give only one of them")
    return None if search == PROPAGATION else search


def least_size(options: Options) -> int:
    """The least size at which to sample an open dimension, so that every rank can have an element
    of it."""
    mesh = wanted_mesh(options)
    if options.devices is not None:
        check_ranks(options.devices)
    return max(2, options.devices or 1, mesh.size if mesh else 1)


def manual_of(options: Options, step: Step | None = None) -> Manual | None:
    """The shards of a manual program's tensors; None for any other preset. Errors: StrategyError if
    a training step was made for other shards."""
    deal = step.deal if step is not None else None
    if options.preset != MANUAL:
        if deal is not None:
            raise StrategyError(
                "the training step is a manual program (one rank's graph): give --preset manual"
            )
        return None
    mesh = wanted_mesh(options)
    if deal is not None:
        step_mesh = Mesh.of((name, size) for name, size in deal.mesh)
        if mesh not in (None, step_mesh) or options.devices not in (None, step_mesh.size):
            raise StrategyError(
                f"the training step was written for the mesh {step_mesh}; give that mesh, or write "
                "the step again with `onnxpar grad`"
            )
        return Manual(step_mesh, options.strategy or Strategy(), deal)
    if mesh is None and options.devices is None:
        raise StrategyError(NO_RANKS)
    mesh = mesh or preset_mesh(MANUAL, options.devices or 1)
    return Manual(mesh, options.strategy or Strategy())
