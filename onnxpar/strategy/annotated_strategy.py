"""Reads ONNX's multi-device annotations as a strategy: their mesh, and the axes of each node."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import NoReturn

import onnx_graphsurgeon as gs

from onnxpar.base.errors import StrategyError
from onnxpar.graph.annotations import (
    AXES,
    PARTIAL,
    PREFIX,
    TENSORS,
    Configuration,
    NodeConfiguration,
    TensorSharding,
)
from onnxpar.layout.layout import Dim, Product
from onnxpar.layout.mesh import Axes, Mesh, parts_over
from onnxpar.sharding.factors import OpFactors
from onnxpar.sharding.state import ShardingState, overlaps
from onnxpar.strategy.device_lists import Digit, axes_of, mesh_of_digits, shard_digits
from onnxpar.strategy.spread import spread_dim
from onnxpar.strategy.standard_shardings import axes_text, node_shardings, parse_axes
from onnxpar.strategy.strategy import Annotation, NodeAnnotation, TensorAnnotation

MESH, PARTS = PREFIX + "mesh", PREFIX + "parts"
"""Keys of metadata: in the model, its mesh; in a node, the sizes by hand of the parts of its
factors."""


def annotated_mesh(annotated: Configuration, requested: Mesh | None) -> Mesh:
    """Returns the mesh for a model's annotations: `requested` if not None, else the mesh in the
    model's metadata, else the coarsest mesh on which the annotations' device lists are axes.
    Errors: StrategyError if no mesh fits."""
    written = annotated.metadata.get(MESH)
    if requested is not None:
        if requested.size != annotated.devices or (written and Mesh.parse(written) != requested):
            raise StrategyError(
                f"the model is annotated for {written or f'{annotated.devices} devices'}, not for "
                f"{requested}; use that mesh, or ignore the annotations with --configuration none"
            )
        return requested
    if written:
        return Mesh.parse(written)
    used = []
    for note in annotated.nodes.values():
        for tensor, tensor_sharding in note.shardings.items():
            what = f"{note.what}, tensor {tensor!r}"
            used += [(what, d) for digits in _listed(tensor_sharding, what) or () for d in digits]
    return mesh_of_digits(annotated.devices, used)


def onnx_annotations(annotated: Configuration, sharding: ShardingState) -> Iterator[Annotation]:
    """Yields the requests of a model's ONNX multi-device annotations: first for nodes, then for
    tensors. `sharding` has the factors of the graph and the mesh.

    Errors: StrategyError for an annotation that cannot be met; it names the node and the tensor.
    """
    stages = {note.stage for note in annotated.nodes.values()} - {None}
    if len(stages) > 1:
        warnings.warn(
            f"the model is annotated with {len(stages)} pipeline stages; every rank runs all of "
            "them",
            stacklevel=2,
        )
    _warn_of_gone(annotated, sharding)
    inner = json.loads(annotated.metadata.get(AXES, "{}"))
    for op in sharding.factors.ops:
        if node_key(op.node) in inner:
            axes = parse_axes(inner[node_key(op.node)], sharding.mesh)
            if len(axes) == len(op.leaves):
                yield NodeAnnotation(op, dict(enumerate(axes)), {})
        note = annotated.nodes.get(node_key(op.node))
        if note is not None and AXES in note.metadata:
            yield _exact_annotation(op, note, sharding)
        elif note is not None:
            names = [t.name for t in (*op.node.inputs, *op.node.outputs)]
            yield from _NodeReader(op, names, note, sharding).annotations()
    for name, entry in json.loads(annotated.metadata.get(TENSORS, "{}")).items():
        tensor = sharding.factors.tensors.get(name)
        axes = parse_axes(entry, sharding.mesh)
        if tensor is None or len(tensor.leaves) != len(axes):
            raise StrategyError(
                f"metadata {TENSORS} does not fit the tensor {name!r}; annotate the model again"
            )
        yield TensorAnnotation(name, axes, pin=True)


def _warn_of_gone(annotated: Configuration, sharding: ShardingState) -> None:
    """Warns about each annotated node that is no longer in the graph: it was folded or fused."""
    known = {node_key(op.node) for op in sharding.factors.ops}
    for key, note in annotated.nodes.items():
        if key not in known and any(
            tensor_sharding.dims for tensor_sharding in note.shardings.values()
        ):
            warnings.warn(
                f"{note.what}: its annotation has no effect, because the node is folded into a "
                "constant or fused with another",
                stacklevel=2,
            )


def check_agreement(
    annotations: Sequence[Annotation], strategy: Sequence[Annotation], mesh: Mesh
) -> None:
    """Compares the requests of the model's annotations with those of the user's strategy. Errors:
    StrategyError if both split a leaf (a part of a dimension) of a node over different axes."""
    annotated = {a.op.node.name: a for a in annotations if isinstance(a, NodeAnnotation)}
    for annotation in strategy:
        if not isinstance(annotation, NodeAnnotation) or annotation.op.node.name not in annotated:
            continue
        model_annotation = annotated[annotation.op.node.name]
        for leaf in annotation.axes.keys() & model_annotation.axes.keys():
            if annotation.axes[leaf] != model_annotation.axes[leaf]:
                tensor = next(t for t, links in annotation.op.operands() if leaf in links)
                requested, present = (
                    axes_text(a.axes[leaf], mesh) for a in (annotation, model_annotation)
                )
                raise StrategyError(
                    f"{annotation.op.node.op} '{annotation.op.node.name}', tensor {tensor.name!r}: "
                    f"the strategy splits it over {requested}, the model's annotation over "
                    f"{present}; drop one of them, or ignore the annotations with --configuration "
                    "none"
                )


def node_key(node: gs.Node) -> str:
    """Returns the name that identifies a node in annotations: the name of its first result."""
    return next((str(t.name) for t in node.outputs if t.name), "")


def read_axes(
    op: OpFactors, names: Sequence[str], note: NodeConfiguration, sharding: ShardingState
) -> dict[int, Axes] | None:
    """Returns the axes that the standard part of an annotation (without onnxpar's metadata) gives
    to each leaf (a part of a dimension) of a node, by index of the leaf. None if the annotation
    also requests a result in a layout that the node does not produce. `names` are the names of the
    node's operands and results."""
    reader = _NodeReader(op, names, note, sharding)
    return reader.axes if len(list(reader.annotations())) == 1 else None


def _listed(tensor_sharding: TensorSharding, what: str) -> list[list[Digit]] | None:
    """Returns the digits of the rank (`device_lists.py`) that number the shards of each component
    of a sharding, from its list of devices; None if it has no list. `what` names the tensor in
    errors."""
    counts = [n for components in tensor_sharding.dims.values() for _, n in components]
    return shard_digits(tensor_sharding.devices, counts, what) if tensor_sharding.devices else None


def _exact_annotation(
    op: OpFactors, note: NodeConfiguration, sharding: ShardingState
) -> NodeAnnotation:
    """Returns the request that onnxpar's own metadata in an annotation has: axes and sizes by hand
    for every leaf (a part of a dimension). Errors: StrategyError if the standard part of the
    annotation contradicts the metadata."""
    axes = dict(enumerate(parse_axes(json.loads(note.metadata[AXES]), sharding.mesh)))
    parts = {int(k): tuple(v) for k, v in json.loads(note.metadata.get(PARTS, "{}")).items()}
    if len(axes) == len(op.leaves):
        names = [t.name for t in (*op.node.inputs, *op.node.outputs)]
        standard = {s.tensor: s for s in node_shardings(op, names, axes, sharding)}
        if all(s.agrees(standard.get(tensor)) for tensor, s in note.shardings.items()):
            return NodeAnnotation(op, axes, parts)
    raise StrategyError(
        f"{note.what}: its annotation and its metadata {AXES} disagree, because one of them or the "
        "model was changed; remove the metadata, or annotate the model again"
    )


class _NodeReader:
    """Reads the standard part of one node's annotation, without onnxpar's metadata.

    names  the names of the node's operands and results
    axes   the axes of the node's leaves as decided so far, by index of the leaf
    """

    def __init__(
        self, op: OpFactors, names: Sequence[str], note: NodeConfiguration, sharding: ShardingState
    ) -> None:
        self.op = op
        self.inputs = list(zip(names, op.inputs, strict=False))
        self.outputs = list(zip(names[len(op.inputs) :], op.outputs, strict=True))
        self.note = note
        self.sharding = sharding
        self.axes: dict[int, Axes] = {}
        self.parts_in_use = 1

    def annotations(self) -> Iterator[Annotation]:
        """Yields a request for the node, then a request for each result whose annotated layout
        differs from the layout that the node produces."""
        for name, links in self.inputs:
            blocked = frozenset(j for j, k in enumerate(links) if k is None)
            for link, over in zip(
                links, self._annotated_axes(name, links, blocked) or (), strict=False
            ):
                if link is not None:
                    self._decide(name, link, over)
        results: list[Annotation] = []
        for name, links in self.outputs:
            requested = self._annotated_axes(name, links, frozenset())
            if requested is not None and not self._produces(name, links, requested):
                results.append(TensorAnnotation(name, requested, pin=True))
        yield NodeAnnotation(self.op, self.axes, {})
        yield from results

    def _decide(self, name: str, leaf: int, over: Axes) -> None:
        """Splits a leaf (a part of a dimension) of the node over axes. Errors: StrategyError if a
        tensor before has split the leaf over other axes."""
        present = self.axes.setdefault(leaf, over)
        if present != over:
            mesh = self.sharding.mesh
            self._fail(
                name,
                f"{self.op.leaves[leaf].factor} is split over {axes_text(over, mesh)}, but in the "
                f"tensors before it over {axes_text(present, mesh)} (- is whole); split it the "
                "same way in all",
            )

    def _produces(self, name: str, links: Sequence[int | None], requested: Sequence[Axes]) -> bool:
        """True if the node can produce the result `name` in the requested layout (axes of each
        leaf). If so, splits the leaves (parts of dimensions) of the node that are still undecided
        as the layout requires."""
        decided = dict(self.axes)
        for link, over in zip(links, requested, strict=True):
            if (over and link is None) or (link is not None and decided.get(link, over) != over):
                return False
            if link is not None and link not in decided:
                if overlaps(over, [a for axes in decided.values() for a in axes]):
                    return False
                decided[link] = over
        reduced = any(axes and self.op.reduction(i) for i, axes in decided.items())
        if reduced and name not in json.loads(self.note.metadata.get(PARTIAL, "{}")):
            return False
        self.axes = decided
        return True

    def _annotated_axes(
        self, name: str, links: Sequence[int | None], blocked: frozenset[int]
    ) -> list[Axes] | None:
        """Returns the annotated axes of each leaf (a part of a dimension) of a tensor; None if the
        tensor has no annotation. `blocked` has the indices of the tensor's leaves that the node
        needs whole."""
        annotation = self.note.shardings.get(name)
        factors = self.sharding.factors.tensors.get(name)
        if annotation is None or factors is None:
            return None
        rank = len(factors.dims)
        if any(not -rank <= axis < rank for axis in annotation.dims):
            self._fail(
                name,
                f"has {rank} dimensions, but its annotation is for dimensions "
                f"{sorted(annotation.dims)}; annotate the model again",
            )
        digits = _listed(annotation, f"{self.note.what}, tensor {name!r}")
        listed = iter(digits or ())
        by_axis: dict[int, list[Axes]] = {}
        for axis, components in annotation.dims.items():
            at = [j for j, d in enumerate(factors.dim_of_leaf) if d == axis % rank]
            leaf_links = {j: links[j] for j in at}
            component_axes: list[tuple[int | None, Axes]] = []
            for size, count in components:
                is_open = digits is None
                over = (
                    self._open(name, count, leaf_links)
                    if is_open
                    else self._over(name, next(listed))
                )
                component_axes.append((size, over))
            dim = factors.dims[axis % rank]
            by_axis[axis % rank] = self._spread(
                name, axis, dim, component_axes, leaf_links, blocked
            )
        out: list[Axes] = []
        for axis in range(rank):
            out += by_axis.get(axis) or [()] * factors.dim_of_leaf.count(axis)
        pairs = ((i, j) for i in range(len(out)) for j in range(i) if (i, j) not in factors.apart)
        if any(overlaps(out[i], out[j]) for i, j in pairs):
            self._fail(
                name,
                "two of its dimensions are split over the same devices; split only one over them",
            )
        return out

    def _over(self, name: str, digits: Sequence[Digit]) -> Axes:
        """Returns the axes of the mesh that have these digits of the rank."""
        return axes_of(digits, self.sharding.mesh, f"{self.note.what}, tensor {name!r}")

    def _open(self, name: str, count: int, links: Mapping[int, int | None]) -> Axes:
        """Returns the axes for a component with `count` shards but without a list of devices: the
        axes that its factor already has, or else the next axes of a row-major view of the ranks, as
        for MindSpore's tuples. `links` has the node's leaf (a part of a dimension) for each leaf of
        the dimension."""
        for link in links.values():
            known = () if link is None else self.axes.get(link, ())
            if count > 1 and known and parts_over(known) == count:
                return known
        try:
            over = self.sharding.mesh.flat(self.parts_in_use, count)
        except StrategyError as error:
            self._fail(name, str(error))
        self.parts_in_use *= count
        return over

    def _spread(
        self,
        name: str,
        axis: int,
        dim: Dim,
        component_axes: Sequence[tuple[int | None, Axes]],
        links: Mapping[int, int | None],
        blocked: frozenset[int],
    ) -> list[Axes]:
        """Returns the axes for each leaf (a part of a dimension) of a dimension, in the order of
        `links`.

        axis            the dimension's index
        component_axes  (size or None, axes) of each component in the annotation
        links           the node's leaf for each leaf of the dimension
        """
        decided = [() if k is None else self.axes.get(k, ()) for k in links.values()]
        if len(component_axes) == 1 and [a for axes in decided for a in axes] == [
            *component_axes[0][1]
        ]:
            return decided
        sizes = [size for size, _ in component_axes if size is not None]
        if len(sizes) == len(component_axes) and math.prod(sizes) != dim.size:
            self._fail(
                name,
                f"has {dim.size} elements along axis {axis}, but the sizes in its annotation are "
                f"{sizes}",
            )
        if any(over for _, over in component_axes) and links and blocked >= links.keys():
            reasons = "; ".join(dict.fromkeys(self.op.whole.values())) or "it has no factor"
            self._fail(name, f"must stay whole along axis {axis} ({reasons})")
        components = (
            [dim]
            if not any(over for _, over in component_axes[1:])
            else _components(dim, component_axes)
        )
        if components is None:
            self._fail(name, f"does not consist of components of sizes {sizes} along axis {axis}")
        out: list[Axes] = []
        for component, (_, over) in zip(components, component_axes, strict=False):
            at = min(links, default=0) + len(out)
            spread = spread_dim(component, over, frozenset(j - at for j in blocked if j >= at))
            if spread is None:
                self._fail(
                    name,
                    f"{component.size} elements of axis {axis} do not split into "
                    f"{parts_over(over)} shards; annotate it with fewer",
                )
            out += spread
        return out

    def _fail(self, tensor: str, reason: str) -> NoReturn:
        raise StrategyError(f"{self.note.what}, tensor {tensor!r}: {reason}")


def _components(dim: Dim, component_axes: Sequence[tuple[int | None, Axes]]) -> list[Dim] | None:
    """Cuts a dimension into components of these sizes, each a factor or a product of consecutive
    factors; one size may be None. Returns None if no factors make up a component: 8 = 2 * 4 has no
    component of size 1 or 8 beside one of size 4."""
    known = math.prod(size for size, _ in component_axes if size is not None)
    rest = list(dim.children) if isinstance(dim, Product) else [dim]
    out: list[Dim] = []
    for size, _ in component_axes:
        needed = dim.size // known if size is None else size
        component: list[Dim] = []
        while rest and math.prod(d.size for d in component) < needed:
            component.append(rest.pop(0))
        if math.prod(d.size for d in component) != needed:
            return None
        out.append(component[0] if len(component) == 1 else Product(tuple(component)))
    return None if rest else out
