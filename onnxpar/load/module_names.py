"""Names weights, nodes and their results after the PyTorch modules from which they were
exported."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from onnx import GraphProto

from onnxpar.base.names import Names
from onnxpar.graph.exported import TorchName, module_path
from onnxpar.graph.metadata import has_file_name, note_file_name
from onnxpar.graph.stored import nodes_of, rename_reads
from onnxpar.graph.used_names import names_in
from onnxpar.load.tie import names_in_torch


@dataclass(frozen=True)
class ModuleNames:
    """The names of a model's tensors.

    torch    the names of stored tensors in torch, where more is known than their own name
    in_file  for each renamed tensor, its name in the file, by its new name
    """

    torch: Mapping[str, TorchName] = field(default_factory=dict)
    in_file: Mapping[str, str] = field(default_factory=dict)


def use_module_names(graph: GraphProto, named: Mapping[str, TorchName]) -> ModuleNames:
    """Renames tensors and nodes, in place, and returns the names.

    Stored tensors get the names that they have in torch (`named`), as far as these are unique and
    free. Nodes get the path of their module and their op, as TorchScript's exporter does, where
    dynamo's exporter records it: `/layers.0/fc/MatMul`; their results get
    `/layers.0/fc/MatMul_output_0`. Inputs and outputs of the model keep their names.
    """
    names = names_in(graph)
    renamed = _name_nodes(graph, names)
    kept = {port.name for port in (*graph.input, *graph.output)}
    new: dict[str, str] = {}
    torch = _name_stored(graph, named, names, kept, new)
    for node in (each for each in graph.node if each.name in renamed):
        for i, result in enumerate(node.output):
            name = f"{node.name}_output_{i}"
            if result and result not in kept and names.free(name) == name:
                new[result] = node.output[i] = name
    rename_reads(graph, new)
    for entry in (*graph.initializer, *graph.value_info):
        entry.name = new.get(entry.name, entry.name)
    return ModuleNames(torch, {after: before for before, after in new.items()})


def _name_nodes(graph: GraphProto, names: Names) -> set[str]:
    """Names nodes after their modules, and returns the new names. In a training step, nodes have
    such names already, from when the loader read the model from which the step was made."""
    taken: set[str] = set()
    for node in nodes_of(graph):
        if (path := module_path(node)) is None or has_file_name(node):
            continue
        name = unique = f"{path}/{node.op_type}"
        number = 1
        while unique in taken or names.free(unique) != unique:
            unique, number = f"{name}_{number}", number + 1
        note_file_name(node)
        node.name = unique
        taken.add(unique)
    return taken


def _name_stored(
    graph: GraphProto,
    named: Mapping[str, TorchName],
    names: Names,
    kept: set[str],
    new: dict[str, str],
) -> dict[str, TorchName]:
    """Chooses new names for stored tensors, in `new`, by old name; returns what is known of each in
    torch, by its new name.

    named  the names in torch, by the tensor's old name
    names  the names in use
    kept   tensors that keep their names
    """
    claims = Counter(n for t in graph.initializer for n in names_in_torch(t.name, named))
    stored = {tensor.name for tensor in graph.initializer} - kept
    by_name: dict[str, TorchName] = {}
    for tensor, known in named.items():
        own = tuple(name for name in known.names if claims[name] == 1)
        known = replace(known, names=own, transposed=known.transposed and bool(own))
        free = [name for name in own if names.free(name) == name]
        if free and tensor in stored and tensor not in own:
            new[tensor] = free[0]
            known = replace(known, stored=known.stored or {tensor: False})
        if own or known.stored:
            by_name[new.get(tensor, tensor)] = known
    return by_name
