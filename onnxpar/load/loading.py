"""The options of the loader, and the state of a model while it is loaded."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import onnx
import onnx_graphsurgeon as gs
from onnx import TensorProto

from onnxpar.base.names import Names
from onnxpar.graph.annotations import Configuration
from onnxpar.graph.checker import Refusal
from onnxpar.graph.exported import TorchName
from onnxpar.graph.open_sizes import OpenDims, OpenSizes
from onnxpar.graph.training_spec import Step
from onnxpar.graph.typical import Typical
from onnxpar.load.importer import Importer
from onnxpar.load.module_names import ModuleNames
from onnxpar.load.stored_model import StoredModel
from onnxpar.load.unfuse import FusedNode

InferTypes = Callable[[onnx.ModelProto, Collection[str], bool], None]
"""Declares the types of a model in place, given the names of inputs with default values, and
whether the model is loaded for training."""


@dataclass(frozen=True)
class LoadRequest:
    """The options of the loader.

    dims          sizes of symbolic dimensions, by symbol; the others stay open
    states        (input, output) pairs whose output is fed to the input in the next run
    find_states   True to find more such pairs by their names and shapes
    least         smallest size at which open dimensions are sampled
    remainders    sizes are sampled with every remainder modulo this number
    typical       sizes at which costs of models with open sizes are computed
    shapes        shapes of inputs, by name, in place of open sizes
    for_training  True if a training step will be made of the model: weights stay as they are stored
    untied        True to give each node that reads a vector as its scale or bias a copy of its own
    page_size     tokens of a page, in which the caches of a decoder are put; 0: they stay as they
                  are
    kv_dtype      the type of the caches in pages; None: that of the model
    part          the part of an encoder-decoder to make of its files; None: the model as it is
    own_types     called with the training step that the model is (or None); returns a function that
                  declares types in place of the loader, for a model that is the program of one rank
    """

    dims: Mapping[str, int | str] | None = None
    states: Sequence[tuple[str, str]] = ()
    find_states: bool = True
    least: int = 2
    remainders: int = 0
    typical: Typical = field(default_factory=Typical)
    shapes: Mapping[str, Sequence[int]] | None = None
    for_training: bool = False
    untied: bool = False
    page_size: int = 0
    kv_dtype: str | None = None
    part: str | None = None
    own_types: Callable[[Step | None], InferTypes | None] = field(
        default=lambda step: None, compare=False
    )


class Loading:
    """A model while it is loaded: its `proto`, then its `graph`, and the findings of rewrites.

    states     (input, output) pairs whose output is fed to the input in the next run
    header    the model's metadata
    shared    numbers of nodes that read a vector as their scale or bias, if several do
    torch     the names of tensors in torch
    called    the names of tensors now, and in the file
    stored    names of the initializers of the file
    original  the model before rewrites that change what passes see
    written   names of the initializers of the file, or of a part of an encoder-decoder, before
              rewrites
    rewritten  the model once its caches are in pages, or one of its branches is taken, as a file
               in which the weights of the model are inputs; None if ranks compute its own graph
    refusal   why onnxruntime does not load the model; None if it does
    defaults  values of inputs that need not be fed
    fixed      inputs with a default value that are constants, as the value may decide shapes
    names     the names in the model
    fused     fused nodes of the file, which are taken apart
    sizes     the open sizes; None if there are none
    importer   makes graphs of models
    anew       returns a new graph of this model
    graph      the graph on which passes work, once it is imported
    """

    proto: onnx.ModelProto
    header: onnx.ModelProto
    exported: Mapping[str, str]
    called: ModuleNames
    written: set[str]
    stored: set[str]
    open_dims: OpenDims
    names: Names
    step: Step | None
    importer: Importer
    anew: Callable[[], gs.Graph]

    def __init__(self, path: Path, request: LoadRequest) -> None:
        self.path, self.request = path, request
        self.states = list(request.states)
        self.annotations: tuple[Configuration, ...] = ()
        self.shared: Mapping[str, int] = {}
        self.torch: dict[str, TorchName] = {}
        self.original: StoredModel | None = None
        self.rewritten: bytes | None = None
        self.refusal: Refusal | None = None
        self.defaults: dict[str, TensorProto] = {}
        self.fixed: list[str] = []
        self.fused: Sequence[FusedNode] = ()
        self.sizes: OpenSizes | None = None
        self.has_own_types = False
        self.graph: gs.Graph | None = None

    @property
    def content(self) -> onnx.ModelProto | gs.Graph:
        """The object that rewrites change now: the proto, or, once it is imported, the graph."""
        return self.proto if self.graph is None else self.graph

    @property
    def folder(self) -> Path:
        """The folder of external data."""
        return self.path.parent
