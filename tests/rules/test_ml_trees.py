"""Rules of forests."""

import numpy as np
import onnx_graphsurgeon as gs
import pytest

from onnxpar.testing.case import Case
from tests.rules.forests import doubles, ensemble, forest

ML = "ai.onnx.ml"
X = (5, 3)
RNG = np.random.default_rng(3)
GAPS = RNG.normal(size=X).astype(np.float32)
GAPS[1, 0] = GAPS[4, 2] = np.nan
CLASSES = [4, 7, 5]
TEXTS = ["no", "yes", "some"]


def case(op, attrs, x=X, version=3, outputs=1):
    fed = [] if isinstance(x, tuple) else [0]
    return Case(op, [x], attrs, fed, outputs, domain=ML, version=version)


def regressor(trees, targets, x=X, **attrs):
    return case("TreeEnsembleRegressor", forest(trees, targets, **attrs), x)


SUM, MEAN = "n f, t b -> n c {sum: t, whole: f c b}", {"aggregate_function": "AVERAGE"}
TALK = "n f, t b -> n c {communicating: t, whole: f c b}"
REGRESSORS = [
    (regressor(4, 1), SUM),
    (regressor(4, 1, GAPS), SUM),
    (regressor(5, 2, base_values=[0.5, -1.0]), SUM),
    (regressor(2, 1, base_values=[0.5]), SUM),
    (case("TreeEnsembleRegressor", doubles(forest(4, 2)), GAPS.astype(np.float64)), SUM),
    (regressor(4, 2, aggregate_function="MIN"), "n f, t b -> n c {min: t, whole: f c b}"),
    (
        regressor(4, 1, aggregate_function="MAX", base_values=[2.0]),
        "n f, t b -> n c {max: t, whole: f c b}",
    ),
    (regressor(4, 1, **MEAN), TALK),
    (regressor(5, 2, base_values=[1.0, 2.0], **MEAN), TALK),
    *(
        (regressor(4, n, post_transform=post, base_values=[0.25] * n), TALK)
        for post in ("LOGISTIC", "SOFTMAX", "SOFTMAX_ZERO")
        for n in (1, 3)
    ),
    (regressor(1, 1), "n f -> n c {whole: f c}"),
]


@pytest.mark.parametrize(("case", "text"), REGRESSORS)
def test_regressor(prove_rule, case, text):
    prove_rule(case, text)


def of_round(tree, leaf):
    return [tree % 3]


def of_block(tree, leaf):
    return [tree // 2]


def of_leaf(tree, leaf):
    return [0, leaf - 2]


BASE = {"base_values": [100.0, 200.0, 300.0]}
VOTES = [
    (regressor(6, 3, only=of_round, **BASE), SUM),
    (regressor(6, 3, only=of_block, **BASE), SUM),
    (regressor(2, 3, only=of_round, **BASE), SUM),  # no tree for target 2, whose base is not added
    (
        case(
            "TreeEnsembleRegressor",
            doubles(forest(6, 3, only=of_block, **BASE)),
            GAPS.astype(float),
        ),
        SUM,
    ),
    (regressor(6, 3, only=of_block, **BASE, **MEAN), TALK),
    (regressor(2, 3, only=of_round, **BASE, **MEAN), TALK),
    (regressor(6, 3, only=of_block, base_values=[1.0, 2.0, 3.0], post_transform="SOFTMAX"), TALK),
    (regressor(6, 3, only=of_leaf, **BASE), "n f, t b -> n c {whole: f c b t}"),
    (regressor(6, 3, only=of_leaf, **BASE, **MEAN), "n f, t b -> n c {whole: f c b t}"),
    (regressor(6, 3, only=of_leaf, base_values=[7.0, 0.0, 0.0]), SUM),
    (regressor(6, 3, only=of_leaf), SUM),
]


@pytest.mark.parametrize(("case", "text"), VOTES)
def test_trees_that_vote_for_some_targets(prove_rule, case, text):
    """A base value is added where a leaf gives a weight, on whatever rank that leaf is."""
    prove_rule(case, text)


def shifted(attrs, by):
    """The same attributes with weights that are higher by this number."""
    made = dict(attrs)
    for name in {"target_weights", "leaf_weights"} & made.keys():
        if isinstance(made[name], list):
            made[name] = [weight + by for weight in made[name]]
        else:
            made[name] = gs.Constant("", made[name].values + np.float32(by))
    return made


EXTREMES = [("MIN", 2, 9.0), ("MAX", 3, -9.0)]


@pytest.mark.parametrize("post", [None, "LOGISTIC"])
@pytest.mark.parametrize(("how", "number", "by"), EXTREMES)
def test_extremes_of_a_rank_without_trees(prove_rule, how, number, by, post):
    """Such a rank changes nothing, even if no weight is on that side of 0."""
    text = "n f, t b -> n c {%s: t, whole: f c b}" % ("communicating" if post else how.lower())
    given = {"post_transform": post} if post else {}
    trees = shifted(forest(2, 1, aggregate_function=how, **given), by)
    prove_rule(case("TreeEnsembleRegressor", trees), text)
    given = {"post_transform": 3} if post else {}
    trees = shifted(ensemble(2, 1, aggregate_function=number, **given), by)
    prove_rule(case("TreeEnsemble", trees, version=5), text)


V5 = [
    (case("TreeEnsemble", ensemble(4, 1), GAPS, 5), SUM),
    (case("TreeEnsemble", ensemble(5, 2, members=True), np.round(GAPS), 5), SUM),
    (case("TreeEnsemble", ensemble(4, 3, dtype=np.float64), GAPS.astype(np.float64), 5), SUM),
    (case("TreeEnsemble", ensemble(6, 2, aggregate_function=0), X, 5), TALK),
    (
        case("TreeEnsemble", ensemble(4, 2, aggregate_function=2), X, 5),
        "n f, t b -> n c {min: t, whole: f c b}",
    ),
    (
        case("TreeEnsemble", ensemble(4, 1, aggregate_function=3), X, 5),
        "n f, t b -> n c {max: t, whole: f c b}",
    ),
    (case("TreeEnsemble", ensemble(4, 3, post_transform=3), X, 5), TALK),
    (
        case("TreeEnsemble", ensemble(4, 3, post_transform=1), X, 5),
        "n f, t b -> n c {whole: f c b t}",
    ),
]


@pytest.mark.parametrize(("case", "text"), V5)
def test_tree_ensemble(prove_rule, case, text):
    prove_rule(case, text)


def classifier(trees, count, x=X, texts=False, **attrs):
    labels = {"classlabels_strings": TEXTS[:count]}
    if not texts:
        labels = {"classlabels_int64s": CLASSES[:count]}
    made = {**forest(trees, count, "class", **attrs), **labels}
    return case("TreeEnsembleClassifier", made, x, outputs=2)


SPLIT = "n f, t b -> n; n c {communicating: t, whole: f c b}"
SPLIT_TEXT = "n f, t b -> _; n c {communicating: n t, whole: f c b}"
CLASSIFIERS = [
    (classifier(4, 3), SPLIT),
    (classifier(4, 3, GAPS, texts=True), SPLIT_TEXT),
    (classifier(4, 3, base_values=[0.5, 0.0, -0.5], post_transform="SOFTMAX"), SPLIT),
    (classifier(4, 3, only=[0, 2]), SPLIT),
    (classifier(4, 3, only=[0, 2], base_values=[0.5, 4.0, -0.5]), SPLIT),
    (classifier(4, 3, post_transform="LOGISTIC"), SPLIT),
    *(
        (classifier(5, 2, only=[0], signs=signs, post_transform=post, seed=2, **base), SPLIT)
        for signs in (True, False)
        for post in ("NONE", "LOGISTIC", "SOFTMAX")
        for base in ({}, {"base_values": [0.25]}, {"base_values": [1.5]})
    ),
    (classifier(5, 2, texts=True, only=[0], signs=False), SPLIT_TEXT),
    (classifier(5, 2), "n f, t b -> n; n c {whole: f c b t}"),
    (classifier(5, 2, only=[1]), "n f, t b -> n; n c {whole: f c b t}"),
]


@pytest.mark.parametrize(("case", "text"), CLASSIFIERS)
def test_classifier(prove_rule, case, text):
    prove_rule(case, text)
