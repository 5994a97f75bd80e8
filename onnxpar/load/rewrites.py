"""The rewrites of the loader, as functions that change a `Loading`; `load.py` has their order."""

from __future__ import annotations

from functools import partial
from typing import Any

import onnx
from onnx import TensorProto

from onnxpar.base.errors import ModelError
from onnxpar.graph.annotations import read_annotations
from onnxpar.graph.checker import MIN_IR, check_bound, check_references, check_standard
from onnxpar.graph.exported import exported_kinds, torch_names
from onnxpar.graph.infer_model import infer
from onnxpar.graph.input_sizes import bind_dims, fix_shapes
from onnxpar.graph.interchange import header_of
from onnxpar.graph.open_sizes import infer_open
from onnxpar.graph.state_pairs import find_states, given_states
from onnxpar.graph.stored import (
    check_text,
    is_folded,
    stored_tensors,
)
from onnxpar.graph.training_spec import Step
from onnxpar.graph.typical import check_closed
from onnxpar.graph.used_names import names_in
from onnxpar.load.embedding_bags import add_up_bags
from onnxpar.load.encoder_decoder import ENCODER, read_part, weight_files
from onnxpar.load.functions import inlined
from onnxpar.load.importer import Importer
from onnxpar.load.kept_ranges import keep_ranges
from onnxpar.load.loading import Loading
from onnxpar.load.module_names import use_module_names
from onnxpar.load.page_caches import page_caches
from onnxpar.load.read_file import check_all_stored, read_proto
from onnxpar.load.stored_model import StoredModel
from onnxpar.load.tie import tie
from onnxpar.load.tolerated import restate, restate_flags
from onnxpar.load.untie import shared_vectors
from onnxpar.load.without_weights import without_weights

_COUNTS = (TensorProto.INT64, TensorProto.INT32, TensorProto.BOOL)
"""Dtypes from which shapes are computed."""


def read(loading: Loading) -> None:
    """Reads the file; of an encoder-decoder, takes the requested part."""
    request = loading.request
    loading.proto = read_proto(loading.path)
    if request.part is not None:
        loading.proto, pairs = read_part(loading.proto, request.part, loading.path)
        loading.states += pairs
    loading.written = {tensor.name for tensor in loading.proto.graph.initializer}
    if request.part is not None:
        _write_rewritten(loading)
    check_text(loading.proto, loading.path)
    loading.annotations = read_annotations(loading.proto)


def restate_tolerated(loading: Loading) -> None:
    """Rewrites violations of the standard that onnxruntime tolerates as standard ONNX."""
    restate(loading.proto)
    loading.header = header_of(loading.proto)
    loading.exported = exported_kinds(loading.proto.graph)


def check_as_written(loading: Loading) -> None:
    """Checks that nodes read existing tensors, and, for training, counts the readers of shared
    vectors."""
    if loading.request.for_training:
        loading.shared = shared_vectors(loading.proto.graph)
    check_references(loading.proto.graph, loading.path)


def inline_functions(loading: Loading) -> None:
    """Puts the nodes of functions in place of their calls."""
    loading.proto = inlined(loading.proto, loading.path)
    restate_flags(loading.proto.graph)
    keep_ranges(loading.proto.graph)


def put_caches_in_pages(loading: Loading) -> None:
    """Puts the caches of a decoder in pages."""
    request = loading.request
    loading.states += page_caches(loading.proto, request.page_size, request.kv_dtype)
    _write_rewritten(loading)


def _write_rewritten(loading: Loading) -> None:
    """Keeps the graph as it is now, which is no longer that of the file, for a proof."""
    files = weight_files(loading.request.part, loading.path)
    loading.rewritten = without_weights(loading.proto, loading.written, files, loading.states)


def tie_weights(loading: Loading) -> None:
    """Merges copies of one weight that the exporter stored."""
    loading.torch = tie(loading.proto.graph, loading.torch, loading.folder)


def name_after_modules(loading: Loading) -> None:
    """Gives tensors the names that they have in torch's modules."""
    loading.called = use_module_names(loading.proto.graph, loading.torch)
    new_names = {old: new for new, old in loading.called.in_file.items()}
    loading.annotations = tuple(each.renamed(new_names) for each in loading.annotations)


def check_stored_tensors(loading: Loading) -> None:
    """Checks the stored tensors, and records their names."""
    check_all_stored(loading.proto, loading.path)
    loading.torch = torch_names(loading.proto.graph)


def keep_original(loading: Loading) -> None:
    """Keeps the model as it is now, for ranks that run it whole, and records whether onnxruntime
    loads it."""
    request, proto = loading.request, loading.proto
    loading.stored = {t.name for t in stored_tensors(proto.graph)} - {""}
    if not (request.for_training or request.page_size or request.part == ENCODER):
        sizes = request.dims or {}, request.shapes or {}
        loading.original = StoredModel.of(proto, loading.path, *sizes)
    loading.refusal = check_standard(proto, loading.path)


def settle_defaults(loading: Loading) -> None:
    """Makes each initializer that is also an input either the default value of that input, or a
    constant."""
    feedable = not loading.request.for_training
    loading.defaults, loading.fixed = _settled(loading.proto, feedable)


def bind_sizes(loading: Loading) -> None:
    """Puts the user's sizes in place of their symbols; the others stay open."""
    request, proto = loading.request, loading.proto
    fix_shapes(proto.graph, request.shapes or {})
    loading.open_dims = bind_dims(proto.graph, request.dims or {}, loading.path)
    if loading.refusal is None:
        check_bound(proto, request.dims or {}, loading.path)
    loading.names = names_in(proto.graph)


def find_step(loading: Loading) -> None:
    """Reads the roles of a training step's inputs and outputs, if the model is one. Errors:
    ModelError if a step is to be made of a step; StrategyError for typical sizes of symbols that
    the model does not have."""
    request = loading.request
    if not loading.open_dims:
        check_closed(request.typical, loading.path)
    loading.step = step = Step.of(loading.header)
    if step is not None and request.for_training:
        raise ModelError(
            f"{loading.path} is already a training step; give the model that it was made from"
        )
    if step is not None and step.samples is not None:
        # onnxruntime warns of defaults; a Trainer feeds it
        loading.defaults.pop(step.samples, None)


def infer_shapes(loading: Loading) -> None:
    """Infers all types, and folds constants. A model with open sizes is inferred at several samples
    of the sizes, any other once; the program of one rank has types of its own (`own_types`)."""
    request, proto = loading.request, loading.proto
    kinds = (bool(loading.open_dims), request.for_training, request.part == ENCODER)
    arguments = proto, loading.path, loading.defaults, loading.names
    loading.importer = Importer(*arguments, *kinds)
    loading.anew = partial(loading.importer.graph, proto)
    own_types = request.own_types(loading.step)
    loading.has_own_types = own_types is not None
    if own_types is not None:
        own_types(proto, loading.defaults, request.for_training)
    elif loading.open_dims:
        least = max([request.least, *(c.devices for c in loading.annotations)])
        sampled = least, loading.importer.graph, request.typical, request.remainders
        loading.sizes = infer_open(proto, loading.open_dims, *sampled)
        loading.anew = partial(loading.sizes.graph, 0)
    else:
        infer(proto, loading.stored if request.for_training else None)


def add_bags_up(loading: Loading) -> None:
    """Replaces each loop over bags of embeddings (`nn.EmbeddingBag`) by a lookup and a
    reduction."""
    if add_up_bags(loading.proto):
        keep = loading.stored if loading.request.for_training else None
        infer(loading.proto, keep)  # shapes behind the bags


def import_model(loading: Loading) -> None:
    """Makes the graph on which passes work."""
    loading.graph = loading.anew()


def find_state_pairs(loading: Loading) -> None:
    """Records the (input, output) pairs of states, whose outputs are fed back in the next run."""
    step, graph = loading.step, loading.graph
    assert graph is not None
    known = [*((s.input, s.output) for s in (step.slots if step else ())), *loading.states]
    loading.states = given_states(graph, known)
    if loading.request.find_states:
        loading.states = find_states(graph, known, step is not None)


def _settled(proto: onnx.ModelProto, feedable: bool) -> tuple[dict[str, TensorProto], list[str]]:
    """Makes each initializer that is also an input either a default value of the input, or a
    constant, in place. Returns the default values by name, and the names of inputs that became
    constants though they could have been fed.

    Before IR 4, all initializers had to be inputs, and none of them can be fed. Since IR 4 they can
    be, as in onnxruntime, if `feedable`; but initializers that may decide shapes become constants.
    """
    graph = proto.graph
    inputs = {i.name: i for i in graph.input}
    both = [t for t in graph.initializer if t.name in inputs]
    fed = both if feedable and proto.ir_version >= MIN_IR else []
    fixed = [t.name for t in fed if is_folded(t) and t.data_type in _COUNTS]
    defaults = {t.name: t for t in fed if t.name not in fixed}
    for name, tensor in defaults.items():
        shape = list(tensor.dims)
        inputs[name].type.CopyFrom(onnx.helper.make_tensor_type_proto(tensor.data_type, shape))
    constants = {t.name for t in both} - defaults.keys()
    _keep(graph.input, [i for i in graph.input if i.name not in constants])
    _keep(graph.initializer, [t for t in graph.initializer if t.name not in defaults])
    proto.ir_version = max(proto.ir_version, MIN_IR)
    return defaults, fixed


def _keep(field: Any, messages: list[Any]) -> None:
    del field[:]
    field.extend(messages)
