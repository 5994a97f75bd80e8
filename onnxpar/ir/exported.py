"""What torch's exporters wrote into a file: the kinds of a network's tensors, the call of torch
from which a node was made, and the names of parameters that are stored transposed."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass

import onnx_graphsurgeon as gs
from onnx import GraphProto

from onnxpar.ir.metadata import metadata_of

_SIGNATURE = "pkg.torch.export.ExportedProgram.graph_signature"
_ENTRY = re.compile(r"^\S+: (PARAMETER|BUFFER|CONSTANT_TENSOR) target='([^']+)'", re.MULTILINE)
PARAMETER = "PARAMETER"
_NODE = "pkg.torch.onnx.fx_node"
_SCOPES = "pkg.torch.onnx.name_scopes"
_LINEAR = re.compile(r"linear(_\d+)?")
"""Matches the names that torch.export gives to calls of torch.nn.functional.linear."""
_CALL = re.compile(
    r"\[target=torch\.ops\.aten\.(\w+)\.\w+\]\(args = \((.*)\), kwargs = ", re.DOTALL
)
_DETACHED = re.compile(r"detach_?(_\d+)?$")
"""Matches the names that torch.export gives to results of detach()."""
_PADDING = {"embedding": 2, "embedding_bag": 8}
"""The position of the argument `padding_idx`; -1 or None is none."""


@dataclass(frozen=True)
class Call:
    """A call of torch: the name of an op of ATen, and its arguments as text."""

    op: str
    arguments: str

    @property
    def tensors(self) -> list[str]:
        """The names of the tensors among the arguments, in order."""
        return re.findall(r"%(\w+)", self.arguments)

    @property
    def is_detach(self) -> bool:
        """True if the call cuts its result off from the gradient."""
        return self.op in ("detach", "detach_")

    @property
    def detached(self) -> list[int]:
        """The positions among `tensors` of those that an earlier call has cut off."""
        return [i for i, name in enumerate(self.tensors) if _DETACHED.match(name)]

    @property
    def padding_row(self) -> int | None:
        """The row that a lookup does not train; None if there is none."""
        given = self.arguments.split(", ")
        text = "".join(given[at : at + 1]) if (at := _PADDING.get(self.op)) is not None else ""
        return int(text) if text.isdigit() else None

    @property
    def scales_by_frequency(self) -> bool:
        """True if a lookup divides the gradient of a row by how often a batch has it."""
        return self.op == "embedding" and self.arguments.split(", ")[3:4] == ["True"]


def call_of(node: gs.Node) -> Call | None:
    """The call of torch from which a node was made; None if the file does not say it."""
    found = _CALL.search(metadata_of(node, _NODE) or "")
    return Call(found[1], found[2]) if found else None


def exported_kinds(graph: GraphProto) -> dict[str, str]:
    """PARAMETER, BUFFER or CONSTANT_TENSOR by name; empty if the exporter wrote no signature."""
    for entry in graph.metadata_props:
        if entry.key == _SIGNATURE:
            return {name: kind for kind, name in _ENTRY.findall(entry.value)}
    return {}


@dataclass(frozen=True)
class TorchName:
    """The name of a parameter in torch, where a file has another; `transposed` if the file has its
    value so."""

    name: str
    transposed: bool = False


def torch_names(nodes: Iterable[gs.Node]) -> dict[str, TorchName]:
    """Returns the names in torch of constants that have others: of the weights of Linears, which
    exporters store transposed, as a MatMul reads them; and of the copies `NAME@1`, `NAME@2` ... of
    an equal vector that several modules share in the file."""
    found: dict[str, TorchName] = {}
    for node in nodes:
        module, call = _place(node)
        for i, tensor in enumerate(node.inputs):
            if not isinstance(tensor, gs.Constant):
                continue
            shared, _, copy = str(tensor.name).rpartition("@")
            if node.op == "Identity" and copy.isdigit():  # named as what TorchScript's merged
                found[tensor.name] = TorchName(str(node.outputs[0].name).rpartition("@")[0])
            elif copy.isdigit() and module and "." in shared:
                found[tensor.name] = TorchName(f"{module}.{shared.rpartition('.')[2]}")
            elif not tensor.name.endswith(".weight") and _is_linear(node, call, i):
                found.setdefault(tensor.name, TorchName(f"{module}.weight", True))
    return found


def _is_linear(node: gs.Node, call: str, operand: int) -> bool:
    """True if an operand of a node is the weight of a Linear, transposed."""
    return node.op == "MatMul" and operand == 1 and _LINEAR.fullmatch(call) is not None


def _place(node: gs.Node) -> tuple[str, str]:
    """The path of the module in torch from which a node was made, and the name of the call there;
    empty if the file does not say it."""
    scopes = metadata_of(node, _SCOPES)
    if scopes is not None:
        try:
            *_, module, call = ast.literal_eval(scopes)
        except (ValueError, SyntaxError, TypeError):
            return "", ""
        return str(module), str(call)
    # TorchScript's exporter names a node by its module and op: /layers/layers.0/fc/MatMul
    if not node.name.startswith("/"):
        return "", ""
    *path, op = node.name[1:].split("/")
    return ".".join(path), "linear" if op == "MatMul" else op
