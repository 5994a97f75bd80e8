"""Facts that torch's exporters write into a model file: which tensors are parameters, which call of
torch became a node, and which parameters are stored transposed."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

import onnx_graphsurgeon as gs
from onnx import GraphProto, NodeProto

from onnxpar.graph.metadata import metadata_of
from onnxpar.graph.stored import nodes_of, stored_tensors

_SIGNATURE = "pkg.torch.export.ExportedProgram.graph_signature"
_ENTRY = re.compile(r"^(\S+): (PARAMETER|BUFFER|CONSTANT_TENSOR) target='([^']+)'", re.MULTILINE)
PARAMETER = "PARAMETER"
_NODE = "pkg.torch.onnx.fx_node"
_SCOPES = "pkg.torch.onnx.name_scopes"
_LINEAR = re.compile(r"(linear|MatMul)(_\d+)?")
"""Names that exporters give to calls of torch.nn.functional.linear."""
_CALL = re.compile(
    r"\[target=torch\.ops\.aten\.(\w+)\.\w+\]\(args = \((.*)\), kwargs = ", re.DOTALL
)
_MADE = re.compile(r"onnx::(?!Conv_)\w+_\d+")
"""Names that TorchScript's exporter gives to constants that it computed."""
_DETACHED = re.compile(r"detach_?(_\d+)?$")
"""Names that torch.export gives to results of detach()."""
_PADDING = {"embedding": 2, "embedding_bag": 8}
"""The position of the argument `padding_idx` of a call; -1 or None there means no padding."""


@dataclass(frozen=True)
class Call:
    """A call of torch: the name of an op of ATen, and the text of its arguments."""

    op: str
    arguments: str

    @property
    def tensors(self) -> list[str]:
        """The names of the tensors among the arguments, in order."""
        return re.findall(r"%(\w+)", self.arguments)

    @property
    def is_detach(self) -> bool:
        """True if no gradient flows back through the call."""
        return self.op in ("detach", "detach_")

    @property
    def detached(self) -> list[int]:
        """The indices in `tensors` of results of an earlier detach()."""
        return [i for i, name in enumerate(self.tensors) if _DETACHED.match(name)]

    @property
    def padding_row(self) -> int | None:
        """The row of an embedding's table that is not trained (padding_idx); None if there is
        none."""
        arguments = self.arguments.split(", ")
        text = "".join(arguments[at : at + 1]) if (at := _PADDING.get(self.op)) is not None else ""
        return int(text) if text.isdigit() else None

    @property
    def scales_by_frequency(self) -> bool:
        """True if an embedding divides the gradient of a row by how often the row occurs in the
        batch."""
        return self.op == "embedding" and self.arguments.split(", ")[3:4] == ["True"]


def call_of(node: gs.Node | NodeProto) -> Call | None:
    """Returns the call of torch from which a node was exported; None if the file does not record
    it."""
    match = _CALL.search(metadata_of(node, _NODE) or "")
    return Call(match[1], match[2]) if match else None


def exported_kinds(graph: GraphProto) -> dict[str, str]:
    """Returns the kind that torch.export gave to each tensor, by name: PARAMETER, BUFFER or
    CONSTANT_TENSOR; empty if the exporter wrote no signature."""
    for entry in graph.metadata_props:
        if entry.key == _SIGNATURE:
            return {name: kind for _, kind, name in _ENTRY.findall(entry.value)}
    return {}


@dataclass(frozen=True)
class TorchName:
    """The name of a stored tensor in torch, and its form in the file.

    names       the parameter's names in torch; several if modules share it
    transposed  True if the file has the transposed value
    is_certain  False if the file does not say which parameter it is
    stored      the tensors of the file that get their values from this parameter, True for a
                transposed one; empty if it is just the tensor of its own name
    """

    names: tuple[str, ...] = ()
    transposed: bool = False
    is_certain: bool = True
    stored: Mapping[str, bool] = field(default_factory=dict)


def torch_names(graph: GraphProto) -> dict[str, TorchName]:
    """Returns the torch names of stored tensors that have other names in the file: weights of
    Linears, which exporters store transposed for a MatMul; other operands of a MatMul (without
    names); the copies `NAME@1`, `NAME@2` of a vector that modules share; and tables with several
    names."""
    kinds, targets = exported_kinds(graph), parameters_of_calls(graph)
    stored = {t.name for t in stored_tensors(graph)}
    by_name: dict[str, TorchName] = {}
    for node in nodes_of(graph):
        for i, name in enumerate(node.input):
            if name in stored and (read := _read(node, i, kinds, targets)) is not None:
                known = by_name.get(name, read)
                if known.names[:1] == read.names[:1]:
                    read = replace(read, names=tuple(dict.fromkeys(known.names + read.names)))
                by_name[name] = known if known.is_certain > read.is_certain else read
    return by_name


def _read(
    node: NodeProto, operand: int, kinds: Mapping[str, str], targets: Mapping[str, str]
) -> TorchName | None:
    """Returns the torch name of the stored tensor that is operand number `operand` of a node; None
    if it is unknown, or equal to that in the file.

    kinds    the result of `exported_kinds`
    targets  the result of `parameters_of_calls`
    """
    name = node.input[operand]
    module, called = _place(node)
    shared, _, copy = name.rpartition("@")
    if copy.isdigit() and node.op_type == "Identity":  # has the name of the merged tensor
        return TorchName((node.output[0].rpartition("@")[0],))
    if copy.isdigit():
        own = shared.rpartition(".")
        return TorchName((f"{module}.{own[2]}",)) if module and own[0] else None
    weight = f"{module}.weight" if module else ""
    if node.op_type == "Gather" and operand == 0 and name in targets.values():
        return TorchName((name, weight)) if weight in targets.values() and weight != name else None
    is_made = name not in kinds if kinds else _MADE.fullmatch(name)
    if node.op_type != "MatMul" or not is_made:
        return None
    call = call_of(node)
    if operand == 1 and call is not None and call.op == "linear":
        target = targets.get((*call.tensors, "", "")[1])
        return TorchName((target,), True) if target else TorchName(is_certain=False)
    if operand == 1 and call is None and weight and _LINEAR.fullmatch(called):
        return TorchName((weight,), True, False)
    return TorchName(is_certain=False)


def parameters_of_calls(graph: GraphProto) -> dict[str, str]:
    """Returns the torch names of parameters (`layers.0.weight`) by their names in recorded calls
    (`p_layers_0_weight`)."""
    texts = [entry.value for entry in graph.metadata_props if entry.key == _SIGNATURE]
    entries = _ENTRY.findall("".join(texts))
    return {short: name for short, kind, name in entries if kind == PARAMETER}


def module_path(node: NodeProto) -> str | None:
    """Returns the path of the torch module whose call became a node, from the metadata of dynamo's
    exporter, in the notation of the older exporter: `/layers.0/fc`. None if the file does not
    record it."""
    scopes = _scopes(node)
    if scopes is None:
        return None
    steps = pairwise(scopes[:-1])
    return "".join("/" + inner.removeprefix(f"{outer}.") for outer, inner in steps)


def _scopes(node: NodeProto) -> list[str] | None:
    """Returns the paths of the modules around a node, the outermost first, and then the name of its
    call; None if the file does not record them."""
    try:
        scopes = ast.literal_eval(metadata_of(node, _SCOPES) or "")
    except (ValueError, SyntaxError, TypeError):
        return None
    is_list = isinstance(scopes, list) and len(scopes) > 1
    return scopes if is_list and all(isinstance(each, str) for each in scopes) else None


def _place(node: NodeProto) -> tuple[str, str]:
    """Returns (path of the torch module, name of the call in it) from which a node was made; empty
    texts if the file does not record them."""
    scopes = _scopes(node)
    if scopes is not None:
        return scopes[-2], scopes[-1]
    # TorchScript's exporter names a node by its module and op: /layers/layers.0/fc/MatMul_1
    if not node.name.startswith("/"):
        return "", ""
    *path, op = node.name[1:].split("/")
    return ".".join(path), op
