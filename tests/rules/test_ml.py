"""Rules of linear models, SVMs and the preparation of features in ai.onnx.ml."""

import numpy as np
import pytest

from onnxpar.rules.rule import registered, whole_ops
from onnxpar.testing.case import Case

ML = "ai.onnx.ml"
RNG = np.random.default_rng(5)
X = (5, 4)
WHOLES = RNG.integers(0, 4, (5, 3))
WORDS = np.array([["a", "b"], ["c", "a"], ["b", "b"], ["d", "c"], ["a", "d"]], object)
GAPS = RNG.normal(size=X).astype(np.float32)
GAPS[0, 1] = GAPS[3, 2] = GAPS[4, 0] = np.nan


def case(op, operands, attrs=None, fed=(0,), version=3, **fields):
    given = [i for i in fed if not isinstance(operands[i], tuple)]
    return Case(op, operands, attrs or {}, given, domain=ML, version=version, **fields)


FEATURES = [
    (case("Binarizer", [X], {"threshold": 0.25}), "d0 d1 -> d0 d1"),
    (
        case("Imputer", [GAPS], {"imputed_value_floats": [1.0, 2.0, 3.0, 4.0]}),
        "d0 d1 -> d0 d1",
    ),
    (
        case("Imputer", [WHOLES], {"imputed_value_int64s": [7], "replaced_value_int64": 2}),
        "d0 d1 -> d0 d1",
    ),
    (
        case("Scaler", [X], {"offset": [1.0, 2.0, 3.0, 4.0], "scale": [0.5, 2.0, 3.0, 0.25]}),
        "d0 d1 -> d0 d1",
    ),
    (case("Scaler", [WHOLES], {"offset": [1.0], "scale": [0.5]}), "d0 d1 -> d0 d1"),
    (case("Scaler", [(6,)], {"offset": [1.0], "scale": [0.5]}), "d0 -> d0"),
    *(
        (case("Normalizer", [x], {"norm": norm}), "d0 d1 -> d0 d1 {communicating: d1}")
        for norm in ("MAX", "L1", "L2")
        for x in (X, WHOLES, -WHOLES, np.zeros((3, 4), np.float32))
    ),
    (
        case(
            "LabelEncoder",
            [WHOLES],
            {"keys_int64s": [0, 1, 2], "values_floats": [0.5, 1.5, 2.5], "default_float": -1.0},
        ),
        "d0 d1 -> d0 d1",
    ),
    (
        case(
            "LabelEncoder",
            [WORDS],
            {"keys_strings": ["a", "b"], "values_int64s": [5, 3], "default_int64": 9},
        ),
        "_ -> d0 d1",
    ),
    (
        case(
            "LabelEncoder",
            [WHOLES],
            {"keys_int64s": [0, 1], "values_strings": ["x", "y"], "default_string": "?"},
        ),
        "i0_0 i0_1 -> _ {whole: i0_0 i0_1}",
    ),
    (
        case(
            "CategoryMapper", [WORDS], {"cats_strings": ["a", "b", "c"], "cats_int64s": [4, 5, 6]}
        ),
        "_ -> d0 d1",
    ),
    (case("OneHotEncoder", [WHOLES], {"cats_int64s": [0, 2, 3]}), "d0 d1 -> d0 d1 c"),
    (
        case("OneHotEncoder", [WHOLES], {"cats_int64s": [0, 1, 2, 3], "zeros": 0}),
        "d0 d1 -> d0 d1 c {whole: c}",
    ),
    (
        case("OneHotEncoder", [WORDS], {"cats_strings": ["a", "c", "d"]}),
        "_ -> d0 d1 c",
    ),
    (
        case("FeatureVectorizer", [X, (5, 3)], {"inputdimensions": [4, 3]}),
        "n s0, n s1 -> n s0 + s1",
    ),
    (
        case("ArrayFeatureExtractor", [X, np.array([2, 0, 3])], fed=[0, 1]),
        "d0 f, i0 -> d0 i0 {whole: f}",
    ),
    (
        case("ArrayFeatureExtractor", [X, np.array([[2, 0], [3, 1]])], fed=[0, 1]),
        "d0 f, i0 i1 -> d0 (i0 i1) {whole: f}",
    ),
    (
        case("ArrayFeatureExtractor", [np.arange(4), np.array([[2], [0], [3]])], fed=[1]),
        "f, i0 i1 -> 1 (i0 i1) {whole: f}",
    ),
    (
        case("ZipMap", [(5, 3)], {"classlabels_int64s": [4, 2, 9]}),
        "d0 d1 -> _ {communicating: d0 d1}",
    ),
    (
        case("ZipMap", [(5, 3)], {"classlabels_strings": ["a", "b", "c"]}),
        "d0 d1 -> _ {communicating: d0 d1}",
    ),
]


@pytest.mark.parametrize(("case", "text"), FEATURES)
def test_features(prove_rule, case, text):
    makes_strings = "values_strings" in case.attrs
    prove_rule(case, text, ["x0.0 -> concat 0", "x0.1 -> concat 1"] if makes_strings else ())


def floats(*shape):
    return [float(v) for v in RNG.normal(size=shape).astype(np.float32).reshape(-1)]


def linear(op, count, outputs=1, x=X, **attrs):
    made = {"coefficients": floats(count, 4), "intercepts": floats(count)}
    return case(op, [x], {**made, **attrs}, outputs=outputs)


TALK = "n f -> n c {communicating: f, whole: c}"
LINEAR = [
    (linear("LinearRegressor", 3, targets=3), "n f -> n c {sum: f}"),
    (
        case("LinearRegressor", [X], {"coefficients": floats(2, 4), "targets": 2}),
        "n f -> n c {sum: f}",
    ),
    *(
        (linear("LinearRegressor", n, targets=n, post_transform=post), TALK)
        for n in (1, 3)
        for post in ("LOGISTIC", "SOFTMAX", "SOFTMAX_ZERO")
    ),
    *(
        (
            linear("LinearClassifier", 3, 2, x, classlabels_ints=[4, 9, 2], post_transform=post),
            "n f -> n; n c {communicating: f, whole: c}",
        )
        for post in ("NONE", "LOGISTIC", "SOFTMAX")
        for x in (X, RNG.integers(-3, 3, X))
    ),
    (
        linear("LinearClassifier", 1, 2, classlabels_ints=[0, 1], post_transform="LOGISTIC"),
        "n f -> n; n c {communicating: f, whole: c}",
    ),
    (
        linear("LinearClassifier", 3, 2, classlabels_strings=["a", "b", "c"]),
        "n f -> _; n c {communicating: f n, whole: c}",
    ),
]


@pytest.mark.parametrize(("case", "text"), LINEAR)
def test_linear(prove_rule, case, text):
    prove_rule(case, text)


KERNELS = {
    "LINEAR": [0.0, 0.0, 0.0],
    "RBF": [0.3, 0.0, 0.0],
    "POLY": [0.5, 0.25, 3.0],
    "SIGMOID": [0.2, 0.1, 0.0],
}


def svr(kernel, count=5, **attrs):
    made = {
        "kernel_type": kernel,
        "kernel_params": KERNELS[kernel],
        "n_supports": count,
        "coefficients": floats(count),
        "rho": [0.75],
        "support_vectors": floats(count, 4),
    }
    return case("SVMRegressor", [X], {**made, **attrs})


def svc(kernel, sizes, texts=False, proba=False, x=X, **attrs):
    count, pairs = len(sizes), len(sizes) * (len(sizes) - 1) // 2
    labels = {"classlabels_ints": [4, 9, 2, 7][:count]}
    if texts:
        labels = {"classlabels_strings": ["a", "b", "c", "d"][:count]}
    made = {
        "kernel_type": kernel,
        "kernel_params": KERNELS[kernel],
        "vectors_per_class": sizes,
        "coefficients": floats(count - 1, sum(sizes)),
        "rho": floats(pairs),
        "support_vectors": floats(sum(sizes), 4),
        **labels,
    }
    if proba:
        made |= {"prob_a": [-abs(a) for a in floats(pairs)], "prob_b": floats(pairs)}
    return case("SVMClassifier", [x], {**made, **attrs}, outputs=2)


SPLIT = "n f, s b -> n; n p {communicating: s, whole: f p b}"
SVMS = [
    *((svr(kernel), "n f, s b -> n 1 {sum: s, whole: f b}") for kernel in KERNELS),
    (svr("RBF", one_class=1), "n f, s b -> n 1 {communicating: s, whole: f b}"),
    (
        case(
            "SVMRegressor",
            [X],
            {"coefficients": floats(4), "rho": [0.5], "kernel_params": [0.0] * 3},
        ),
        "n f -> n 1 {whole: f}",
    ),
    *(
        (svc(kernel, sizes, proba=proba), SPLIT)
        for kernel in KERNELS
        for sizes in ([3, 2], [2, 3, 1], [2, 1, 3, 2])
        for proba in (False, True)
    ),
    (svc("RBF", [2, 3], post_transform="LOGISTIC"), SPLIT),
    (svc("RBF", [2, 3, 2], post_transform="SOFTMAX"), SPLIT),
    (svc("RBF", [2, 3], x=RNG.normal(size=X)), SPLIT),
    (svc("RBF", [2, 3], True), "n f, s b -> _; n p {communicating: n s, whole: f p b}"),
    (
        case(
            "SVMClassifier",
            [X],
            {
                "classlabels_ints": [3, 5],
                "coefficients": floats(2, 4),
                "rho": [0.5],
                "kernel_params": [0.0] * 3,
            },
            outputs=2,
        ),
        "n f -> n; n p {whole: f p}",
    ),
]


@pytest.mark.parametrize(("case", "text"), SVMS)
def test_svm(prove_rule, case, text):
    prove_rule(case, text)


def test_every_op_has_a_rule_or_a_reason():
    from onnx import defs

    ops = {s.name for s in defs.get_all_schemas() if s.domain == ML}
    known = {op for domain, op in [*registered(), *whole_ops()] if domain == ML}
    assert ops == known
