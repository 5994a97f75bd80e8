"""Random forests as attributes of nodes of ai.onnx.ml."""

from typing import Any

import numpy as np
import onnx_graphsurgeon as gs

MODES = ("BRANCH_LEQ", "BRANCH_LT", "BRANCH_GTE", "BRANCH_GT")


def forest(trees, targets, side="target", features=3, signs=True, only=None, seed=0, **attrs):
    """The attributes of a TreeEnsembleRegressor (`side` "target") or -Classifier ("class"), of
    trees with three leaves, each of which gives a weight to the targets `only` (by default all).
    This can be a function of the tree and the leaf, 2 to 4."""
    rng = np.random.default_rng(seed)
    lists: dict[str, list[Any]] = {}

    def put(**values):
        for name, value in values.items():
            lists.setdefault(name, []).append(value)

    for tree in range(trees):
        for node, (left, right) in enumerate([(1, 2), (3, 4), (0, 0), (0, 0), (0, 0)]):
            put(
                nodes_treeids=tree * 2 + 1,
                nodes_nodeids=node,
                nodes_featureids=int(rng.integers(features)) if left else 0,
                nodes_values=float(rng.normal() / 2) if left else 0.0,
                nodes_modes=MODES[0] if left else "LEAF",
                nodes_truenodeids=left,
                nodes_falsenodeids=right,
                nodes_missing_value_tracks_true=tree % 2,
                nodes_hitrates=1.0,
            )
            given = only(tree, node) if callable(only) else only or range(targets)
            for target in () if left else given:
                weight = float(np.float32(rng.normal()))
                put(
                    **{
                        f"{side}_treeids": tree * 2 + 1,
                        f"{side}_nodeids": node,
                        f"{side}_ids": target,
                        f"{side}_weights": weight if signs else abs(weight) / 2 / trees,
                    }
                )
    if side == "target":
        lists["n_targets"] = targets
    return {**lists, **attrs}


def doubles(attrs):
    """The same attributes with thresholds and weights in tensors of float64."""
    made = dict(attrs)
    names = ("nodes_values", "target_weights", "class_weights", "nodes_hitrates", "base_values")
    for name in names:
        if name in made:
            made[f"{name}_as_tensor"] = gs.Constant("", np.array(made.pop(name), np.float64))
    return made


def ensemble(trees, targets, features=3, dtype=np.float32, seed=0, members=False, **attrs):
    """The attributes of a TreeEnsemble of trees with two nodes and three leaves."""
    rng = np.random.default_rng(seed)
    count = 2 * trees
    lists: dict[str, Any] = {
        "n_targets": targets,
        "nodes_featureids": rng.integers(features, size=count).tolist(),
        "nodes_truenodeids": [n + 1 if n % 2 == 0 else 3 * (n // 2) for n in range(count)],
        "nodes_trueleafs": [n % 2 for n in range(count)],
        "nodes_falsenodeids": [3 * (n // 2) + (2 if n % 2 == 0 else 1) for n in range(count)],
        "nodes_falseleafs": [1] * count,
        "tree_roots": list(range(0, count, 2)),
        "leaf_targetids": [leaf // 3 % targets for leaf in range(3 * trees)],
        "nodes_missing_value_tracks_true": [n % 3 % 2 for n in range(count)],
    }
    modes = np.array([6 if members and n % 2 else n % 4 for n in range(count)], np.uint8)
    splits = (rng.normal(size=count) / 2).astype(dtype)
    if members:
        sets = [[float(n % 3), 1.0, np.nan] for n in range(count) if n % 2]
        lists["membership_values"] = gs.Constant("", np.array(sets, dtype).reshape(-1))
    lists["nodes_modes"] = gs.Constant("", modes)
    lists["nodes_splits"] = gs.Constant("", splits)
    lists["leaf_weights"] = gs.Constant("", rng.normal(size=3 * trees).astype(dtype))
    return {**lists, **attrs}
