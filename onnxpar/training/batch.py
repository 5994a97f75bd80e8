"""Finds which dimension of each input numbers the samples of a batch.

It is the dimension from which the first dimension of the labels or of the target comes: the
sharding rules say how dimensions of operands and results share factors. If the loss is an output of
the model, the batch is the dimension that all nodes keep apart until a mean or sum over it ends in
the loss.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx_graphsurgeon as gs

from onnxpar.base.errors import StrategyError
from onnxpar.base.near_names import did_you_mean
from onnxpar.graph.clone import needed
from onnxpar.graph.subgraphs import read_by
from onnxpar.sharding.analysis import analyse
from onnxpar.sharding.factors import Links, OpFactors

_MEANS = (
    *("ReduceMean", "ReduceSum", "SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss"),
    *("ReduceSumSquare", "ReduceL1"),
)
_LINEAR = (
    *("Add", "Sub", "Mul", "Div", "Neg", "Sum", "Mean", "Cast", "Identity", "Reshape", "Squeeze"),
    *("Unsqueeze", "ReduceMean", "ReduceSum", "Max", "Clip"),
)
"""Ops that may be between a mean over samples and the loss."""

Atoms = tuple[int, ...]
"""The atoms of a dimension (parts that no op divides further), the outer first."""


@dataclass(frozen=True)
class Batch:
    """The batch of a model.

    size       the number of samples
    dims       the dimension that numbers samples, by input; an input that all samples share is not
               there
    of_labels  the dimension of the labels or of the target that numbers samples
    """

    size: int
    dims: Mapping[str, int]
    of_labels: int = 0


@dataclass(frozen=True)
class Compared:
    """The tensor that a loss compares with labels or a target.

    axes  its dimensions that the labels or the target have, too; empty if the tensor is the loss
          itself
    """

    tensor: gs.Tensor
    axes: Sequence[int] = ()


def find_batch(
    graph: gs.Graph,
    fed: Sequence[gs.Variable],
    compared: Compared,
    given: Mapping[str, int | None],
    one_program: bool = True,
    grows: bool = False,
) -> Batch | None:
    """Returns the batch of a model with the inputs `fed`; None if it has none.

    compared     the tensor that the loss compares with labels or a target
    given        the dimension that the user gives, by input, "labels" or "target"; None for an
                 input without a batch
    one_program  False for the program of one of several ranks: then only sizes tell the batch
    grows        True if a step has several such batches

    Errors: StrategyError if the batch cannot be told, or for a dimension that an input does not
    have.
    """
    _check(fed, compared, given)
    inputs = [t for t in fed if t.shape and given.get(t.name, 0) is not None]
    if not inputs:
        return None
    chosen = {t.name: k for t in inputs if (k := given.get(t.name)) is not None}
    search = _Search(graph, inputs, compared) if one_program else None
    atoms = search.atoms(chosen) if search else None
    if search is None or atoms is None:
        dims = _by_size(inputs, chosen, compared, grows)
    else:
        dims = search.dims(atoms) | chosen
    sizes = {name: int(t.shape[dims[name]]) for t in inputs if (name := t.name) in dims}
    if len(set(sizes.values())) > 1:
        text = ", ".join(f"{size} of {name!r}" for name, size in sizes.items())
        raise StrategyError(
            f"the inputs have different numbers of samples: {text}; give --batch-dim NAME=K with "
            "the dimension of each that numbers its samples, or NAME=none"
        )
    if not sizes:
        return None
    named = [given[n] for n in ("labels", "target") if n in given]
    at = named[0] if named else search.of_labels(atoms) if search and atoms else 0
    return Batch(next(iter(sizes.values())), dims, at or 0)


def _check(fed: Sequence[gs.Variable], compared: Compared, given: Mapping[str, int | None]) -> None:
    """Checks the dimensions that the user gives. Errors: StrategyError for an input or a dimension
    that the model does not have."""
    ranks = {t.name: len(t.shape or ()) for t in fed}
    ranks |= dict.fromkeys(("labels", "target"), len(compared.axes)) if compared.axes else {}
    for name, dim in given.items():
        if name not in ranks:
            raise StrategyError(
                f"--batch-dim {name}: there is no such input{did_you_mean(name, ranks)}"
            )
        if dim is not None and not 0 <= dim < ranks[name]:
            raise StrategyError(
                f"--batch-dim {name}={dim}: it has {ranks[name]} dimensions; give the number of "
                "one, from 0, or none"
            )


def _by_size(
    inputs: Sequence[gs.Variable], given: Mapping[str, int], compared: Compared, grows: bool
) -> dict[str, int]:
    """Returns the dimension that numbers samples, by input, from sizes alone: the first dimension
    of each input, if all inputs have the same size there. If they differ and the batch does not
    grow (`grows`), the first dimension of the inputs that have the size of the labels or the target
    there. Errors: StrategyError."""
    dims = {t.name: given.get(t.name, 0) for t in inputs}
    sizes = {t.name: int(t.shape[dims[t.name]]) for t in inputs}
    if len(set(sizes.values())) == 1 or len(given) == len(inputs):
        return dims
    labels = [int(compared.tensor.shape[axis]) for axis in compared.axes[:1]]
    own = {name: dims[name] for name, size in sizes.items() if [size] == labels or name in given}
    if own and not grows:
        return own
    shapes = ", ".join(f"{t.name} {list(t.shape)}" for t in inputs)
    raise StrategyError(
        f"it cannot be told which dimensions of the inputs number samples: {shapes}; give "
        "--batch-dim NAME=K for each, or NAME=none for one that all samples share"
    )


class _Search:
    """Follows the dimension of samples through a graph, by its atoms (parts of dimensions).

    moving  the tensors that depend on the inputs
    makers  the node that computes each tensor, by name
    """

    def __init__(self, graph: gs.Graph, inputs: Sequence[gs.Variable], compared: Compared) -> None:
        self.graph, self.inputs, self.compared = graph, inputs, compared
        self.factors = analyse(graph)
        self.tensors = self.factors.tensors
        self.moving = self._moving()
        self.makers: dict[str, OpFactors] = {}
        for op in self.factors.ops:
            self.makers |= {t.name: op for t in op.node.outputs if t.name}
            self.makers |= {t.name: op for body in op.bodies for t in body.graph.inputs}

    def _moving(self) -> set[str]:
        """Returns the names of the tensors that depend on the inputs."""
        moving, known = {t.name for t in self.inputs}, 0
        while len(moving) > known:  # nodes of a body come before the node that has it
            known = len(moving)
            for op in self.factors.ops:
                if any(t.name in moving for t in read_by(op.node)):
                    moving |= {t.name for t in op.node.outputs if t.name}
                    moving |= {t.name for body in op.bodies for t in body.graph.inputs}
        return moving

    def atoms(self, given: Mapping[str, int]) -> Atoms | None:
        """Returns the atoms (parts of dimensions) of the dimension that numbers samples; None if
        they cannot be told. `given` has dimensions that the user gives, by input."""
        if given:
            return next((atoms for name, k in given.items() if (atoms := self._of(name, k))), None)
        if not self.compared.axes:
            return self._of_loss()
        for axis in self.compared.axes:
            atoms = self._of(self.compared.tensor.name, axis)
            if not atoms:
                return None
            if any(atoms in self._dims(t.name) for t in self.inputs) and self._is_kept(atoms[0]):
                return atoms
        return None

    def dims(self, batch: Atoms) -> dict[str, int]:
        """Returns the dimension of each input that numbers samples. For an input that sharding
        rules do not connect with the batch, this is the first dimension, if it has the batch's
        size."""
        with_it = [t for t in self.tensors.values() if batch[0] in {x.atom for x in t.leaves}]
        beside = {x.atom for t in with_it for x in t.leaves} - set(batch)
        sizes = [
            int(t.shape[dims.index(batch)])
            for t in self.inputs
            if batch in (dims := self._dims(t.name))
        ]
        batch_dims = {}
        for tensor in self.inputs:
            dims = self._dims(tensor.name)
            if batch in dims:
                batch_dims[tensor.name] = dims.index(batch)
            elif sizes and tensor.shape[0] == sizes[0] and beside.isdisjoint(dims[0]):
                batch_dims[tensor.name] = 0
        return batch_dims

    def of_labels(self, batch: Atoms) -> int:
        """Returns the dimension of the labels or of the target that numbers samples; 0 if none is
        known."""
        own = [self._of(self.compared.tensor.name, axis) for axis in self.compared.axes]
        return own.index(batch) if batch in own else 0

    def _dims(self, name: str) -> list[Atoms]:
        """Returns the atoms (parts of dimensions) of each dimension of a tensor."""
        factors = self.tensors.get(name)
        return [self._of(name, axis) for axis in range(len(factors.dims))] if factors else [()]

    def _of(self, name: str, axis: int) -> Atoms:
        """Returns the atoms (parts of dimensions) of one dimension of a tensor."""
        factors = self.tensors.get(name)
        if factors is None:
            return ()
        each = zip(factors.leaves, factors.dim_of_leaf, strict=True)
        return tuple(leaf.atom for leaf, dim in each if dim == axis)

    def _has(self, name: str, atom: int) -> bool:
        """True if a tensor has this atom (a part of a dimension)."""
        return name in self.tensors and any(x.atom == atom for x in self.tensors[name].leaves)

    def _is_kept(self, atom: int) -> bool:
        """True if all nodes that compute the compared tensor compute each sample by itself, where
        `atom` is the atom (a part of a dimension) that numbers samples."""
        waiting, seen = [self.compared.tensor.name], set[str]()
        while waiting:
            name = waiting.pop()
            op = self.makers.get(name)
            if name in seen or op is None:
                continue
            seen.add(name)
            if not self._keeps(op, atom):
                return False
            read = [*op.node.inputs, *(t for body in op.bodies for t in body.graph.outputs)]
            waiting += [t.name for t in read if self._has(t.name, atom) and t.name in self.moving]
        return True

    def _keeps(self, op: OpFactors, atom: int, drops: bool = False) -> bool:
        """True if each element of a node's results along an atom (a part of a dimension) depends on
        the same element of its operands alone; with `drops`, also if results do not have the atom.
        The statistics of a BatchNormalization do not count."""
        if op.node.op == "BatchNormalization":
            return True
        produced = {i for links in op.outputs for i in links}
        for tensor, links in zip(op.node.inputs, op.inputs, strict=True):
            if tensor.name not in self.moving:
                continue
            for i in self._linked(tensor.name, links, atom):
                if i is None or op.leaves[i].factor in op.rule.communicating:
                    return False
                if i not in produced and not drops and not op.bodies:
                    return False
        return True

    def _linked(self, name: str, links: Links, atom: int) -> list[int | None]:
        """Returns the node's leaves for the leaves (parts of dimensions) of an operand that have
        this atom; None for a leaf that the node needs whole."""
        leaves = self.tensors[name].leaves if name in self.tensors else ()
        return [i for leaf, i in zip(leaves, links, strict=True) if leaf.atom == atom]

    def _of_loss(self) -> Atoms | None:
        """Returns the atoms (parts of dimensions) of the only dimension of inputs over which the
        loss is a mean or sum. If there are several such dimensions, the one that is the first
        dimension in all of its inputs. None if no such dimension remains, or several."""
        dims = [(d, k) for t in self.inputs for k, d in enumerate(self._dims(t.name)) if d]
        averaged = {d for d, _ in dims if self._is_averaged(d[0])}
        if len(averaged) > 1:
            averaged = {d for d in averaged if all(k == 0 for e, k in dims if e == d)}
        return next(iter(averaged)) if len(averaged) == 1 else None

    def _is_averaged(self, atom: int) -> bool:
        """True if nodes compute each element along an atom (a part of a dimension) by itself, until
        a sum or mean over them that ends in the loss."""
        end = self.compared.tensor.name
        on_way = {id(node) for node in needed(self.graph, [end])}
        dropped: set[str] = set()
        for op in self.factors.ops:
            if op.graph is self.graph and id(op.node) not in on_way:
                continue
            names = {t.name for t in read_by(op.node)} & self.moving
            results = [t.name for t in op.node.outputs if t.name]
            has_it = any(self._has(n, atom) for n in names)
            if has_it and not self._keeps(op, atom, drops=op.node.op in _MEANS):
                return False
            if names & dropped:
                if has_it or op.node.op not in _LINEAR:
                    return False
                dropped |= set(results)
            elif has_it and not any(self._has(n, atom) for n in results):
                dropped |= set(results)
        return end in dropped
