"""Forests: reduces the attributes of tree ensembles (ai.onnx.ml) to the trees in a rank's shard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

from onnxpar.graph.attribute_weights import numbers, tree_starts

Array = np.ndarray[Any, Any]

NODE_LISTS = (
    "nodes_treeids",
    "nodes_nodeids",
    "nodes_featureids",
    "nodes_values",
    "nodes_values_as_tensor",
    "nodes_hitrates",
    "nodes_hitrates_as_tensor",
    "nodes_modes",
    "nodes_truenodeids",
    "nodes_falsenodeids",
    "nodes_missing_value_tracks_true",
)
"""Attributes of TreeEnsembleRegressor and TreeEnsembleClassifier with one element per node."""
BRANCH_LISTS = (
    "nodes_featureids",
    "nodes_splits",
    "nodes_hitrates",
    "nodes_modes",
    "nodes_truenodeids",
    "nodes_trueleafs",
    "nodes_falsenodeids",
    "nodes_falseleafs",
    "nodes_missing_value_tracks_true",
)
"""Attributes of TreeEnsemble with one element per node that has branches."""
_MEMBER = 6
"""The mode of a TreeEnsemble's node that tests whether a value is in a set."""


class Trees:
    """The trees of a TreeEnsemble node of any version; their leaves give weights to `width` targets
    or classes, which the node adds, or takes the minimum or maximum of.

    count     the number of trees
    stand_in  the neutral weight of a minimum or maximum; None if weights are added
    """

    def __init__(self, node: gs.Node, count: int, width: int, stand_in: float | None) -> None:
        self.attrs: Mapping[str, Any] = dict(node.attrs)  # a copy: lowering changes node.attrs
        self.count, self.width, self.stand_in = count, width, stand_in
        self._last: tuple[bytes, dict[str, Any]] | None = None

    def cut(self, trees: Array, reaches_all: bool = False) -> dict[str, Any]:
        """Returns the attributes of a node that has only these `trees` (indices). Some get an extra
        leaf, which changes no result, for each target: with `stand_in`, always; if weights are
        added, one of weight 0 where there is no tree (a node must have one), or with `reaches_all`
        (each target must get a weight)."""
        key = bytes([reaches_all]) + trees.tobytes()
        if self._last is None or self._last[0] != key:
            of_sums = None if len(trees) and not reaches_all else 0.0
            weight = of_sums if self.stand_in is None else self.stand_in
            self._last = (key, self._taken(trees, weight))
        return self._last[1]

    def names(self) -> list[str]:
        """The names of the attributes that `cut` returns."""
        return list(self.cut(np.empty(0, np.int64)))

    @property
    def targets(self) -> Array:
        """The target of each weight of a leaf, as an array of ints."""
        raise NotImplementedError

    def given(self) -> Array:
        """Returns an array of bools: True for each target to which some leaf gives a weight."""
        return np.isin(np.arange(self.width), self.targets)

    def always(self) -> Array:
        """Returns an array of bools: True for each target that gets a weight for every row of the
        operand, because all leaves of some tree give it one."""
        raise NotImplementedError

    def _taken(self, trees: Array, stand_in: float | None) -> dict[str, Any]:
        """Returns the attributes of a node with these trees; if `stand_in` is not None, with extra
        leaves that give this weight to each target."""
        raise NotImplementedError


class Forest(Trees):
    """The trees of a TreeEnsembleRegressor or TreeEnsembleClassifier. `side` is "target" or
    "class", the prefix of its attributes of weights. `cut` returns attributes of a
    TreeEnsembleRegressor."""

    def __init__(self, node: gs.Node, width: int, stand_in: float | None = None) -> None:
        self.side = "class" if node.op == "TreeEnsembleClassifier" else "target"
        starts = tree_starts(node)
        self._tree_of_node = np.zeros(len(node.attrs["nodes_treeids"]), np.int64)
        self._tree_of_node[starts[1:]] = 1
        self._tree_of_node = np.cumsum(self._tree_of_node)
        ids = numbers(node.attrs["nodes_treeids"])[starts]
        places = {int(tree): place for place, tree in enumerate(ids)}
        owners = node.attrs[f"{self.side}_treeids"]
        self._tree_of_weight = np.array([places.get(tree, -1) for tree in owners], np.int64)
        super().__init__(node, len(starts), width, stand_in)

    @property
    def targets(self) -> Array:
        return numbers(self.attrs[f"{self.side}_ids"]).astype(np.int64)

    @property
    def weights(self) -> Array:
        """The weights of all leaves, as an array."""
        names = (f"{self.side}_weights", f"{self.side}_weights_as_tensor")
        candidates = [numbers(self.attrs[name]) for name in names if name in self.attrs]
        return max(candidates, key=len)

    def always(self) -> Array:
        leaves = np.array([mode in ("LEAF", b"LEAF") for mode in self.attrs["nodes_modes"]])
        per_tree = np.bincount(self._tree_of_node[leaves], minlength=self.count)
        counts = np.zeros((self.count, self.width), np.int64)
        nodes = numbers(self.attrs[f"{self.side}_nodeids"])
        leaf_targets = np.stack([self._tree_of_weight, nodes, self.targets], axis=1)
        unique = np.unique(leaf_targets, axis=0)
        np.add.at(counts, (unique[:, 0], unique[:, 2]), 1)
        result: Array = (counts == per_tree[:, None]).any(axis=0)
        return result

    def _taken(self, trees: Array, stand_in: float | None) -> dict[str, Any]:
        is_held = np.zeros(self.count, bool)
        is_held[trees] = True
        nodes = np.flatnonzero(is_held[self._tree_of_node])
        weights = np.flatnonzero(is_held[self._tree_of_weight])
        attrs = {
            key: _pick(self.attrs[key], nodes)
            for key in NODE_LISTS
            if key in self.attrs and len(numbers(self.attrs[key])) == len(self._tree_of_node)
        }
        for name in ("treeids", "nodeids", "ids", "weights", "weights_as_tensor"):
            if len(numbers(self.attrs.get(f"{self.side}_{name}", ()))):
                attrs[f"target_{name}"] = _pick(self.attrs[f"{self.side}_{name}"], weights)
        if stand_in is not None:
            _add_leaf(attrs, stand_in, self.width, int(max(self.attrs["nodes_treeids"])) + 1)
        return attrs


def _add_leaf(attrs: dict[str, Any], weight: float, count: int, tree: int) -> None:
    """Adds a tree with the id `tree` to the attributes: a single leaf that gives `weight` to each
    of `count` targets."""
    values = {"nodes_treeids": tree, "nodes_modes": "LEAF", "target_treeids": tree}
    for name, value in attrs.items():
        added: list[Any] = [values.get(name, 0)]
        if name.startswith("target"):
            added = [values.get(name, 0)] * count
        if name == "target_ids":
            added = list(range(count))
        if name.startswith("target_weights"):
            added = [float(weight)] * count
        if isinstance(value, gs.Tensor):
            joined = np.concatenate([value.values, np.array(added, value.values.dtype)])
            attrs[name] = gs.Constant("", joined)
        else:
            is_float = name in ("nodes_values", "nodes_hitrates")
            attrs[name] = [*value, *(map(float, added) if is_float else added)]


def _pick(value: Any, at: Array) -> Any:
    """Returns the elements of an attribute at the indices `at`, as a list or a constant, as the
    attribute is."""
    if isinstance(value, gs.Tensor):
        return gs.Constant("", np.ascontiguousarray(np.asarray(value.values)[at]))
    return [value[i] for i in at.tolist()]


class Ensemble(Trees):
    """The trees of a TreeEnsemble (version 5); `cut` returns attributes of a TreeEnsemble."""

    def __init__(self, node: gs.Node, width: int, stand_in: float | None = None) -> None:
        super().__init__(node, len(node.attrs["tree_roots"]), width, stand_in)
        self._true, self._false = (
            (numbers(node.attrs[f"nodes_{side}nodeids"]), numbers(node.attrs[f"nodes_{side}leafs"]))
            for side in ("true", "false")
        )

    @property
    def targets(self) -> Array:
        return numbers(self.attrs["leaf_targetids"]).astype(np.int64)

    def always(self) -> Array:
        result = np.zeros(self.width, bool)
        for root in self.attrs["tree_roots"]:
            targets = np.unique(self.targets[self._reached([root])[1]])
            if len(targets) == 1:
                result[targets] = True
        return result

    def _reached(self, roots: Any) -> tuple[Array, Array]:
        """Returns (indices of the nodes with branches, indices of the leaves) of the trees with
        these roots, both ascending."""
        nodes = np.zeros(len(self._true[0]), bool)
        leaves = np.zeros(len(self.targets), bool)
        front = np.unique(np.asarray(roots, np.int64))
        while len(front):
            nodes[front] = True
            following = []
            for ids, is_leaf in (self._true, self._false):
                to_leaf = is_leaf[front].astype(bool)
                leaves[ids[front][to_leaf]] = True
                following.append(ids[front][~to_leaf])
            front = np.unique(np.concatenate(following))
            front = front[~nodes[front]]
        return np.flatnonzero(nodes), np.flatnonzero(leaves)

    def _taken(self, trees: Array, stand_in: float | None) -> dict[str, Any]:
        roots = numbers(self.attrs["tree_roots"])[trees]
        nodes, leaves = self._reached(roots)
        place, leaf_place = (np.zeros(n, np.int64) for n in (len(self._true[0]), len(self.targets)))
        place[nodes], leaf_place[leaves] = np.arange(len(nodes)), np.arange(len(leaves))
        attrs = {
            key: _pick(self.attrs[key], nodes)
            for key in BRANCH_LISTS
            if key in self.attrs and len(numbers(self.attrs[key])) == len(self._true[0])
        }
        for side, (ids, is_leaf) in (("true", self._true), ("false", self._false)):
            to_leaf, new = is_leaf[nodes].astype(bool), ids[nodes]
            new[to_leaf] = leaf_place[new[to_leaf]]
            new[~to_leaf] = place[new[~to_leaf]]
            attrs[f"nodes_{side}nodeids"] = new.tolist()
        attrs["tree_roots"] = place[roots].tolist()
        for name in ("leaf_targetids", "leaf_weights"):
            attrs[name] = _pick(self.attrs[name], leaves)
        if len(numbers(self.attrs.get("membership_values", ()))):
            attrs["membership_values"] = self._members(nodes)
        if stand_in is not None:
            for target in range(self.width):
                _add_stump(attrs, stand_in, target)
        return attrs

    def _members(self, nodes: Array) -> Any:
        """Returns `membership_values` of these nodes: the sets of values that nodes test membership
        in, each of which ends with NaN."""
        values = numbers(self.attrs["membership_values"])
        ends = np.flatnonzero(np.isnan(values))
        asks = np.flatnonzero(numbers(self.attrs["nodes_modes"]) == _MEMBER)
        sets = dict(zip(asks.tolist(), np.split(values, ends + 1), strict=False))
        kept_sets = [sets[n] for n in nodes.tolist() if n in sets]
        return gs.Constant("", np.concatenate([*kept_sets, values[:0]]))


def _add_stump(attrs: dict[str, Any], weight: float, target: int) -> None:
    """Adds a tree to the attributes: one node, both branches of which lead to one leaf that gives
    `weight` to the target."""
    at, leaf = len(attrs["nodes_featureids"]), len(attrs["leaf_targetids"])
    values: dict[str, Any] = {
        "nodes_truenodeids": leaf,
        "nodes_falsenodeids": leaf,
        "nodes_trueleafs": 1,
        "nodes_falseleafs": 1,
        "tree_roots": at,
        "leaf_targetids": target,
        "leaf_weights": weight,
    }
    for name, value in attrs.items():
        if name == "membership_values":
            continue
        added = values.get(name, 0)
        if isinstance(value, gs.Tensor):
            attrs[name] = gs.Constant("", np.append(value.values, value.values.dtype.type(added)))
        else:
            attrs[name] = [*value, added]
