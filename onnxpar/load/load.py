"""Loads a model: checks it, inlines functions, infers every shape, and leaves weights in their
files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import onnx
import onnx_graphsurgeon as gs

from onnxpar.base.names import Names
from onnxpar.base.pass_times import PassTimes
from onnxpar.graph.annotations import Configuration
from onnxpar.graph.checker import blaming
from onnxpar.graph.interchange import default_of
from onnxpar.graph.open_sizes import OpenSizes
from onnxpar.graph.rewriting import Rewrite, Show, run_rewrites, unseen
from onnxpar.graph.stored import densify, lift_constants
from onnxpar.graph.subgraphs import all_nodes
from onnxpar.graph.tensors import Whole
from onnxpar.graph.training_spec import Step
from onnxpar.graph.used_names import names_of
from onnxpar.load import rewrites
from onnxpar.load.bodies_for_training import add_bodies
from onnxpar.load.listed_tensors import read_listed
from onnxpar.load.loading import Loading, LoadRequest
from onnxpar.load.module_names import ModuleNames
from onnxpar.load.next_step import next_outputs
from onnxpar.load.spell_out import spell_out
from onnxpar.load.stored_model import StoredModel
from onnxpar.load.unfuse import FusedNode, unfuse
from onnxpar.load.untie import untie
from onnxpar.load.upgrade import upgrade


@dataclass
class Model:
    """A loaded model. `graph` is complete: static shapes, unique node names, lazy weights.

    states     (input, output) pairs whose output is fed to the input in the next run
    header     the model's metadata
    fixed      inputs with a default value that are constants here, as the value may decide shapes
    stored     names of the initializers of the file
    sizes      the open sizes; None if all sizes are known
    step       the roles of a training step's inputs and outputs; None for other models
    whole     nodes, and factors of them, that must not be split since sizes are open
    growing   dimensions of states, by input and axis, that have other sizes after a run at some
              open sizes
    exported  kinds that torch.export gave to tensors, by name
    on_host   weights and states that stay in files, as tables of which each run reads some rows,
              and the results that replace these states
    called    the names of tensors in torch, and in the file
    shared    numbers of nodes that read a vector as their scale or bias, if several do
    fused     fused nodes of the file, which `graph` has taken apart
    original   the model before these rewrites; None if passes may change what the graph computes
    rewritten  the model once its caches are in pages, or one of its branches is taken, as a file
               in which the weights of the model are inputs; None if ranks compute its own graph
    names      the names in the graph before passes
    anew       returns a new graph of the model, as it was before passes; None for a dump
    """

    path: Path
    graph: gs.Graph
    states: list[tuple[str, str]]
    header: onnx.ModelProto
    fixed: list[str]
    stored: set[str]
    annotations: tuple[Configuration, ...] = ()
    sizes: OpenSizes | None = None
    step: Step | None = None
    whole: Whole = field(default_factory=dict)
    growing: set[tuple[str, int]] = field(default_factory=set)
    exported: Mapping[str, str] = field(default_factory=dict)
    called: ModuleNames = field(default_factory=ModuleNames)
    shared: Mapping[str, int] = field(default_factory=dict)
    on_host: Sequence[str] = ()
    fused: Sequence[FusedNode] = ()
    original: StoredModel | None = None
    rewritten: bytes | None = None
    names: Names = field(default_factory=Names)
    anew: Callable[[], gs.Graph] | None = None

    def apart(self) -> Model:
        """Returns the model with the same graph, but copies of the tables that passes change."""
        return replace(self, whole={**self.whole}, growing={*self.growing})

    def fresh(self) -> Model:
        """Returns the model with a new graph, as it was before passes."""
        assert self.anew is not None
        return replace(self.apart(), graph=self.anew())

    def file_name(self, tensor: str) -> str:
        """Returns the name that a tensor has in the file, if the loader has renamed it; else its
        name."""
        return self.called.in_file.get(tensor, tensor)

    @property
    def folder(self) -> Path:
        """The folder of external data."""
        return self.path.parent


def _trains(to: Loading) -> bool:
    """True if a training step will be made of the model."""
    return to.request.for_training


def _take_apart(to: Loading) -> None:
    to.fused = unfuse(to.proto)


def _upgrade(to: Loading) -> None:
    to.proto = upgrade(to.proto, str(to.path))


AS_WRITTEN: Sequence[Rewrite[Loading]] = (
    Rewrite("read", rewrites.read),
    Rewrite("restate-tolerated", rewrites.restate_tolerated),
    Rewrite("untie", lambda to: untie(to.proto.graph), lambda to: to.request.untied),
    Rewrite("check-references", rewrites.check_as_written),
    Rewrite("bodies-for-training", lambda to: add_bodies(to.proto), _trains),
    Rewrite("inline-functions", rewrites.inline_functions),
    Rewrite("page-caches", rewrites.put_caches_in_pages, lambda to: to.request.page_size > 0),
    Rewrite("check-stored", rewrites.check_stored_tensors),
    Rewrite("tie", rewrites.tie_weights, _trains),
    Rewrite("use-module-names", rewrites.name_after_modules),
    Rewrite("keep-original", rewrites.keep_original),
)
"""The rewrites of a model as its exporter wrote it, in order."""
NORMALIZING: Sequence[Rewrite[Loading]] = (
    Rewrite("densify", lambda to: densify(to.proto.graph, to.folder)),
    Rewrite("lift-constants", lambda to: lift_constants(to.proto.graph)),
    Rewrite("settle-defaults", rewrites.settle_defaults),
    Rewrite("upgrade-opset", _upgrade),
    Rewrite("bind-sizes", rewrites.bind_sizes),
    Rewrite("unfuse", _take_apart),
    Rewrite("spell-out", lambda to: spell_out(to.proto)),
    Rewrite("read-listed", lambda to: read_listed(to.proto)),
    Rewrite("find-step", rewrites.find_step),
    Rewrite("infer-shapes", rewrites.infer_shapes),
    Rewrite(
        "add-up-bags",
        rewrites.add_bags_up,
        lambda to: not to.open_dims and not to.has_own_types,
    ),
    Rewrite("import", rewrites.import_model),
    Rewrite("find-states", rewrites.find_state_pairs),
)
"""The rewrites to basic ops of one opset, in order, and to the graph that passes see. If
onnxruntime does not load the model, an error in one of these may name the node."""


def load(
    path: str | Path,
    request: LoadRequest | None = None,
    show: Show = unseen,
    times: PassTimes | None = None,
) -> Model:
    """Reads a model and makes it ready for passes.

    request  the options of the loader
    show     called with the name of each rewrite and the result, for dumps
    times    collects the wall time of each rewrite

    Errors: ModelError for a file that cannot be used, StrategyError for a size whose symbol the
    model does not have; PassError for any other failure, naming the rewrite.
    """
    loading = Loading(Path(path), request or LoadRequest())
    run_rewrites(AS_WRITTEN, loading, _LOADER, show, times)
    with blaming(loading.refusal, loading.path):
        run_rewrites(NORMALIZING, loading, _LOADER, show, times)
    return _model(loading)


_LOADER = "the loader"


def _model(loading: Loading) -> Model:
    """Returns the loaded model, from what the rewrites have recorded in `loading`."""
    request, graph, step, sizes = loading.request, loading.graph, loading.step, loading.sizes
    assert graph is not None
    whole = dict(sizes.whole) if sizes is not None else {}
    if request.page_size:
        whole |= dict.fromkeys(next_outputs(graph))
    return Model(
        loading.path,
        graph,
        loading.states,
        loading.header,
        loading.fixed,
        loading.stored,
        loading.annotations,
        sizes,
        step,
        whole,
        exported=loading.exported,
        called=loading.called,
        shared=loading.shared,
        fused=loading.fused,
        original=loading.original if step is None and not loading.has_own_types else None,
        rewritten=loading.rewritten,
        names=names_of(graph),
        anew=loading.anew,
    )


def unread_inputs(model: Model) -> list[str]:
    """Returns the inputs that must be fed but that no node reads; none for a training step."""
    graph = model.graph
    read = {t.name for node in all_nodes(graph) for t in node.inputs}
    read |= {t.name for t in graph.outputs}
    fed = [str(t.name) for t in graph.inputs if default_of(t) is None]
    return [name for name in fed if name not in read] if model.step is None else []
