"""Rule of If, Loop and Scan: a value has the same layout outside the node and inside its bodies."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_graphsurgeon as gs

from onnxpar.graph.subgraphs import bodies
from onnxpar.graph.tensors import Size, tensor_shape
from onnxpar.rules.notation import Spec, Var
from onnxpar.rules.rule import Rule, names, rule

_STEPS = "its steps run one after the other"


@rule("If Loop Scan", ranks_known=False)
def control_flow(node: gs.Node) -> Rule:
    """Sharding rule of If, Loop, Scan: returns one rule over all `ports`, the tensors of the node
    and of its bodies, that gives a value one layout everywhere. A dimension along which steps scan
    stays whole."""
    paths = _Paths(node)
    inner = bodies(node)
    if node.op == "If":
        for i in range(len(node.outputs)):
            second = len(inner[0].outputs) + i
            paths.join((paths.back + i, None), (paths.back + second, None), (paths.out + i, None))
        return paths.rule()
    is_loop = node.op == "Loop"
    carried = len(inner[0].inputs) - (2 if is_loop else node.attrs["num_scan_inputs"])
    first, second = (2, 1) if is_loop else (0, 0)  # a Loop's counter and condition come first
    for i in range(carried):
        at = (first + i, paths.given + first + i, paths.back + second + i, paths.out + i)
        paths.join(*((slot, None) for slot in at))
    for i in range(node.attrs.get("num_scan_inputs", 0)):
        axis = (node.attrs.get("scan_input_axes") or {i: 0})[i]
        paths.join((carried + i, axis), (paths.given + carried + i, None))
    for i in range(len(node.outputs) - carried):
        axis = 0 if is_loop else (node.attrs.get("scan_output_axes") or {i: 0})[i]
        paths.join((paths.back + second + carried + i, None), (paths.out + carried + i, axis))
    return paths.rule()


def ports(node: gs.Node, inner: Sequence[gs.Graph]) -> tuple[list[gs.Tensor], list[gs.Tensor]]:
    """Returns (tensors that a node with bodies reads, tensors that it produces), in the order in
    which its rule names them: operands, then the results of the bodies `inner`; results, then the
    operands of the bodies."""
    operands = [*node.inputs, *(t for body in inner for t in body.outputs)]
    return operands, [*node.outputs, *(t for body in inner for t in body.inputs)]


class _Paths:
    """Builds the rule of a node with bodies. A path is a group of ports through which one value
    passes, e.g. a Loop's operand, the body's operand and result, and the Loop's result. A port is
    an index into the tensors of `ports`."""

    def __init__(self, node: gs.Node) -> None:
        operands, results = ports(node, bodies(node))
        self.ports = [*operands, *results]
        self.back = len(node.inputs)
        self.out = len(operands)
        self.given = len(operands) + len(node.outputs)
        self.specs: list[Spec | None] = [None] * len(self.ports)
        self.sizes: dict[str, Size] = {}
        self.whole: dict[str, str] = {}

    def join(self, *path: tuple[int, int | None]) -> None:
        """Gives all tensors on a path the same factors in all dimensions, except the dimension of
        steps. Does nothing if a tensor's number of dimensions is unknown, or changes on the path.

        path  (port, dimension along which steps scan that tensor) for each; None: no such dimension
        """
        used = [(slot, axis) for slot, axis in path if self.ports[slot].name]
        shapes = [list(tensor_shape(self.ports[slot]) or ()) for slot, _ in used]
        is_known = all(tensor_shape(self.ports[slot]) is not None for slot, _ in used)
        ranks = {len(s) - (a is not None) for s, (_, a) in zip(shapes, used, strict=True)}
        if not is_known or len(ranks) != 1:
            return
        dims = names(f"p{used[0][0]}_", ranks.pop())
        for (slot, axis), shape in zip(used, shapes, strict=True):
            port_dims = list(dims)
            if axis is not None:
                port_dims.insert(axis % len(shape), f"s{slot}")
                self.whole[f"s{slot}"] = _STEPS
            for dim, size in zip(port_dims, shape, strict=True):
                self.sizes[dim] = None if size is None else self.sizes.get(dim, size)
            self.specs[slot] = tuple(map(Var, port_dims))

    def rule(self) -> Rule:
        """Returns the rule of the node, with all ports that the node or a body reads from outside
        as operands, and the others as results."""
        operands, results = self.specs[: self.out], self.specs[self.out :]
        return Rule.of(tuple(operands), tuple(results), self.sizes, whole=self.whole)
