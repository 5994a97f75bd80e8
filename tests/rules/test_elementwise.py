"""Rules of elementwise ops."""

import numpy as np
import pytest
from numpy import array
from onnx import TensorProto

from onnxpar.testing.case import Case

X = (4, 3, 5)
BOOL = array([[True, False, True], [False, False, True], [True, True, True], [False] * 3])
INT = array([[5, -3, 2], [7, 1, 9], [-4, 6, 8], [3, 2, 1]])
POSITIVE = np.linspace(0.1, 0.9, 12, dtype=np.float32).reshape(4, 3)

INCREASING = ["Sigmoid", "Tanh", "Relu", "Exp", "Erf", "Ceil", "Floor", "Round", "Softplus", "Sign"]
SLOPED = ["HardSigmoid", "LeakyRelu", "Elu", "Selu", "Celu", "ThresholdedRelu"]
SMOOTH = ["Softsign", "Sin", "Cos", "Tan", "Sinh", "Asinh", "Atan", "HardSwish", "Mish", "Gelu"]
OTHER = ["Identity", "Neg", "Abs", "Reciprocal", "IsNaN", "IsInf", "Shrink"]
POSITIVE_ONLY = ["Log", "Sqrt", "Asin", "Acos", "Atanh", "Cosh"]
ARITHMETIC = ["Add", "Sub", "Mul", "Div", "Max", "Min", "Mean", "Sum"]
COMPARISONS = ["Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"]

CASES = [
    *((Case(op, [(4, 3)]), "d0 d1 -> d0 d1") for op in INCREASING + SLOPED + SMOOTH + OTHER),
    *((Case(op, [POSITIVE], fed=[0]), "d0 d1 -> d0 d1") for op in POSITIVE_ONLY),
    (Case("Acosh", [POSITIVE + 1], fed=[0]), "d0 d1 -> d0 d1"),
    (Case("BitCast", [(4, 3)], {"to": TensorProto.INT32}, opset=26), "d0 d1 -> d0 d1"),
    *((Case(op, [(4, 3), (4, 3)]), "d0 d1, d0 d1 -> d0 d1") for op in ARITHMETIC + COMPARISONS),
    *((Case(op, [X, (3, 1)]), "d0 d1 d2, d1 1 -> d0 d1 d2") for op in ARITHMETIC),
    (Case("Add", [(4, 1), (3,)]), "d0 1, d1 -> d0 d1"),
    (Case("Add", [(), ()]), "(), () -> ()"),
    (Case("Add", [INT, INT], fed=[0, 1]), "d0 d1, d0 d1 -> d0 d1"),
    (Case("Div", [INT, INT], fed=[0, 1]), "d0 d1, d0 d1 -> d0 d1"),
    (Case("Max", [X, (5,), (4, 1, 1)]), "d0 d1 d2, d2, d0 1 1 -> d0 d1 d2"),
    (Case("Sum", [X, (5,), (4, 1, 1)]), "d0 d1 d2, d2, d0 1 1 -> d0 d1 d2"),
    (Case("Mod", [INT, INT[:1]], fed=[0, 1]), "d0 d1, 1 d1 -> d0 d1"),
    (Case("Pow", [X, array(2.0, np.float32)]), "d0 d1 d2, () -> d0 d1 d2"),
    (Case("PRelu", [X, (3, 1)]), "d0 d1 d2, d1 1 -> d0 d1 d2"),
    (Case("Where", [BOOL, (4, 3), (1, 3)], fed=[0]), "d0 d1, d0 d1, 1 d1 -> d0 d1"),
    (Case("Where", [BOOL, array(0, np.float32), (4, 3)], fed=[0]), "d0 d1, (), d0 d1 -> d0 d1"),
    *((Case(op, [BOOL, BOOL[0]], fed=[0, 1]), "d0 d1, d1 -> d0 d1") for op in ("And", "Or", "Xor")),
    (Case("Not", [BOOL], fed=[0]), "d0 d1 -> d0 d1"),
    *(
        (Case(op, [INT, INT[:1]], fed=[0, 1]), "d0 d1, 1 d1 -> d0 d1")
        for op in ("BitwiseAnd", "BitwiseOr", "BitwiseXor")
    ),
    (Case("BitwiseNot", [INT], fed=[0]), "d0 d1 -> d0 d1"),
    (
        Case(
            "BitShift", [INT.astype(np.uint64), array([1], np.uint64)], {"direction": "LEFT"}, [0]
        ),
        "d0 d1, 1 -> d0 d1",
    ),
    (
        Case("Clip", [X, array(-0.5, np.float32), array(1, np.float32)]),
        "d0 d1 d2, (), () -> d0 d1 d2",
    ),
    (Case("Clip", [X, None, array(0.5, np.float32)]), "d0 d1 d2, _, () -> d0 d1 d2"),
    (Case("LeakyRelu", [X], {"alpha": -0.5}), "d0 d1 d2 -> d0 d1 d2"),
    (Case("ThresholdedRelu", [X], {"alpha": -0.5}), "d0 d1 d2 -> d0 d1 d2"),
    (Case("Gelu", [X], {"approximate": "tanh"}), "d0 d1 d2 -> d0 d1 d2"),
    (Case("Cast", [X], {"to": 11}), "d0 d1 d2 -> d0 d1 d2"),
    (Case("Cast", [X], {"to": 7}), "d0 d1 d2 -> d0 d1 d2"),
    (Case("Cast", [X], {"to": 9}), "d0 d1 d2 -> d0 d1 d2"),
    (Case("Cast", [INT], {"to": 1}, [0]), "d0 d1 -> d0 d1"),
    (Case("Cast", [BOOL], {"to": 1}, [0]), "d0 d1 -> d0 d1"),
    (Case("CastLike", [INT, (7,)], fed=[0]), "d0 d1, _ -> d0 d1"),
    (Case("Swish", [X], {"alpha": 2.0}, opset=24), "d0 d1 d2 -> d0 d1 d2"),
    (Case("Dropout", [X]), "d0 d1 d2 -> d0 d1 d2"),
    (
        Case("Dropout", [X, array(0.5, np.float32), array(False)], outputs=2),
        "d0 d1 d2, (), () -> d0 d1 d2; d0 d1 d2",
    ),
    *(
        (Case(op, [X], domain="com.microsoft"), "d0 d1 d2 -> d0 d1 d2")
        for op in ("Gelu", "FastGelu", "QuickGelu")
    ),
    (Case("BiasGelu", [X, (5,)], domain="com.microsoft"), "d0 d1 d2, d2 -> d0 d1 d2"),
]


@pytest.mark.parametrize(("case", "text"), CASES, ids=[c.op for c, _ in CASES])
def test_rule(prove_rule, case, text):
    prove_rule(case, text)


def test_dropout_in_training_is_whole(rule_text):
    case = Case("Dropout", [X, array(0.5, np.float32), array(True)])
    assert "whole" in rule_text(case)
