"""The compiler's options for `shard`, `plan` and `check`; and the mesh, preset or search that
follow from them."""

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
"""Measures this host: returns its topology; None if it is unknown."""
Dataset = str | tuple[tuple[int, ...], ...] | None
"""The layout of all data inputs: a name, or numbers of shards by input and dimension."""


def unknown_host() -> None:
    """The `Host` that knows nothing, and returns None."""


@dataclass(frozen=True)
class Options:
    """The options that `shard`, `plan` and `check` share; `onnxpar shard --help` explains the
    options of users.

    pages_if_possible  True: a decoder whose caches cannot be in pages keeps them as they are
    part         the part of an encoder-decoder to load from its folder; None: any other model
    replicas     True: a manual program also returns the replicas of its outputs, to compare them
    exposed      inner tensors to make outputs, by name
    compared     True: the plan is one of several that are compared by the objective
    place        where tables are, by glob: HOST for files
    shares       the share of the work of each rank, with `balance`; empty: by the speed of devices
    dataset      the layouts of the data inputs, which `with_dataset` turns into entries of the
                 strategy
    page_size    tokens of a page of a decoder's caches; 0 or None: the caches stay as in the model
    kv_dtype     dtype of caches in pages; None: as in the model
    on_any_host  True: the plan must not depend on this host, and promises no times for it
    host         called if costs are needed and there is no `topology`; None: costs are those of the
                 default topology
    times        collects the wall time of each pass
    request      the user's options for plan.json; None if they cannot be written as JSON
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
    check_layouts: bool = False
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
    """Returns the mesh of the user's options or strategy; None if there is none. Errors:
    StrategyError if it has another number of ranks than --devices."""
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
    """Returns the preset or the kind of search that the user named; None if there is none, or for
    the search `propagation`. Errors: StrategyError if the user named both."""
    search, preset = options.search, options.preset
    if search is None:
        return preset
    if search not in SEARCHES:
        raise StrategyError(f"--search {search!r}: give one of {', '.join(SEARCHES)}")
    if preset is not None:
        raise StrategyError(f"--search {search} and --preset {preset}: give only one of them")
    return None if search == PROPAGATION else search


def least_size(options: Options) -> int:
    """Returns the smallest size at which open dimensions are sampled: large enough for every rank
    to get an element."""
    mesh = wanted_mesh(options)
    if options.devices is not None:
        check_ranks(options.devices)
    return max(2, options.devices or 1, mesh.size if mesh else 1)


def manual_of(options: Options, step: Step | None = None) -> Manual | None:
    """Returns how tensors of a manual program are sharded; None for any other preset. Errors:
    StrategyError if a training step was made for another mesh."""
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
