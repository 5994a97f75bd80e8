"""Declares the shapes of a rank's tensors where sizes are open: onnxruntime fuses some ops only if
it knows that shapes are equal."""

from __future__ import annotations

import onnx_graphsurgeon as gs
from onnx import GraphProto, helper

from onnxpar.layout.layout import Dim, leaves, local_size
from onnxpar.lowering.open_constants import OpenConstants

Bound = tuple[Dim, ...]
"""The layouts of one tensor dimension, one for each binding."""


class OpenShapes:
    """The shapes of the tensors of a lowered graph, by name. Dimensions with equal layouts at all
    bindings (values of the open sizes) share the name of a size, if their sizes have a closed form.

    No shapes are declared if inputs may have other sizes than the symbols say.
    """

    def __init__(self, opened: OpenConstants) -> None:
        self._mesh = opened.mesh
        self._formula = opened.sizes.formula
        self._names: dict[Bound, str | None] = {}
        self._dims: dict[str, tuple[int, list[Bound]]] = {}
        nodes = [] if opened.sizes.free else opened.base.graph.nodes
        outputs = {t.name for t in opened.base.graph.outputs}
        for tensor in (t for node in nodes for t in node.outputs if t.name not in outputs):
            every = [lowered.layouts.get(tensor.name) for lowered in opened.all]
            layouts = [layout for layout in every if layout is not None]
            if len(layouts) == len(every) and tensor.dtype not in (None, object):
                element = gs.exporters.onnx_exporter.dtype_to_onnx(tensor.dtype)
                dims = list(zip(*(layout.dims for layout in layouts), strict=True))
                self._dims[tensor.name] = element, dims

    def declare(self, graph: GraphProto, rank: int) -> None:
        """Adds the shapes of a rank's tensors to the rank's graph, as `value_info`."""
        for name in (name for node in graph.node for name in node.output if name in self._dims):
            element, dims = self._dims[name]
            shape = [self._size(bound, rank) for bound in dims]
            graph.value_info.append(helper.make_tensor_value_info(name, element, shape))

    def _size(self, bound: Bound, rank: int) -> int | str | None:
        """Returns a rank's size of a dimension: a number, the name of an open size, or None if the
        size depends on data or has no closed form."""
        if len(set(bound)) == 1:
            size = local_size(bound[0], self._mesh, rank)
            return size if size >= 0 else None
        if bound not in self._names:
            sizes = [[leaf.size for leaf in leaves(dim)] for dim in bound]
            columns = zip(*sizes, strict=True) if len({*map(len, sizes)}) == 1 else [(-1,)]
            is_known = all(min(s) >= 0 and self._formula(s) is not None for s in columns)
            self._names[bound] = f"onnxpar.{len(self._names)}" if is_known else None
        return self._names[bound]
