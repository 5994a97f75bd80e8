"""Rules of matrix products."""

import numpy as np
import pytest
from numpy import array

from onnxpar.testing.case import Case

RNG = np.random.default_rng(0)
A8, B8 = RNG.integers(0, 255, (4, 6), np.uint8), RNG.integers(0, 255, (6, 5), np.uint8)
ZERO, SCALE, BIG = array(3, np.uint8), array(0.5, np.float32), array(45, np.float32)
ROWS, COLUMNS = RNG.integers(0, 9, 4, np.uint8), RNG.integers(0, 9, 5, np.uint8)

CASES = [
    (Case("MatMul", [(4, 6), (6, 5)]), "m k, k n -> m n {sum: k}"),
    (Case("MatMul", [(2, 3, 4, 6), (3, 6, 5)]), "b0 b1 m k, b1 k n -> b0 b1 m n {sum: k}"),
    (Case("MatMul", [(2, 1, 4, 6), (3, 6, 5)]), "b0 1 m k, b1 k n -> b0 b1 m n {sum: k}"),
    (Case("MatMul", [(6,), (3, 6, 5)]), "k, b0 k n -> b0 n {sum: k}"),
    (Case("MatMul", [(3, 4, 6), (6,)]), "b0 m k, k -> b0 m {sum: k}"),
    (Case("MatMul", [(6,), (6,)]), "k, k -> () {sum: k}"),
    (Case("Gemm", [(4, 6), (6, 5)]), "m k, k n -> m n {sum: k}"),
    (
        Case("Gemm", [(4, 6), (5, 6), (5,)], {"transB": 1, "alpha": 0.5, "beta": 2.0}),
        "m k, n k, n -> m n {sum: k}",
    ),
    (Case("Gemm", [(6, 4), (6, 5), (4, 1)], {"transA": 1}), "k m, k n, m 1 -> m n {sum: k}"),
    (Case("Gemm", [(4, 6), (6, 5), ()]), "m k, k n, () -> m n {sum: k}"),
    (Case("Gemm", [(4, 6), (6, 5), (1, 5)]), "m k, k n, 1 n -> m n {sum: k}"),
    (Case("Gemm", [(4, 6), (6, 5), (4, 5)]), "m k, k n, m n -> m n {sum: k}"),
    (Case("MatMulInteger", [A8, B8], fed=[0, 1]), "m k, k n -> m n {sum: k}"),
    (Case("MatMulInteger", [A8, B8, ZERO, ZERO], fed=[0, 1]), "m k, k n, (), () -> m n {sum: k}"),
    (Case("MatMulInteger", [A8, B8, None, COLUMNS], fed=[0, 1]), "m k, k n, _, n -> m n {sum: k}"),
    (
        Case("QLinearMatMul", [A8, SCALE, ZERO, B8, SCALE, ZERO, BIG, ZERO], fed=[0, 3]),
        "m k, (), (), k n, (), (), _, _ -> m n {communicating: k}",
    ),
    (
        Case(
            "QLinearMatMul",
            [A8, SCALE, ZERO, B8, np.full(5, 0.5, np.float32), COLUMNS, BIG, ZERO],
            fed=[0, 3],
        ),
        "m k, (), (), k n, n, n, _, _ -> m n {communicating: k}",
    ),
    (
        Case("Einsum", [(2, 3, 4), (2, 4, 5)], {"equation": "bij,bjk->bik"}),
        "b i j, b j k -> b i k {sum: j}",
    ),
    (
        Case("Einsum", [(2, 3, 4, 6), (2, 3, 5, 6)], {"equation": "b h q d, b h k d -> b h q k"}),
        "b h q d, b h k d -> b h q k {sum: d}",
    ),
    (
        Case("Einsum", [(2, 3, 4), (4, 5)], {"equation": "...i,ij->...j"}),
        "e0 e1 i, i j -> e0 e1 j {sum: i}",
    ),
    (
        Case("Einsum", [(2, 3, 4, 6), (2, 3, 6, 5)], {"equation": "...ij,...jk->...ik"}),
        "e0 e1 i j, e0 e1 j k -> e0 e1 i k {sum: j}",
    ),
    (Case("Einsum", [(4, 6), (6, 5)], {"equation": "zb,ba"}), "z b, b a -> a z {sum: b}"),
    (Case("Einsum", [(4, 6)], {"equation": "ij->j"}), "i j -> j {sum: i}"),
    (Case("Einsum", [(4, 4)], {"equation": "ii->i"}), "i0_0 i0_1 -> o0_0 {whole: i0_0 i0_1 o0_0}"),
    (
        Case("Einsum", [(3, 4), (3, 4), (4,)], {"equation": "ij,ij,j->"}),
        "i j, i j, j -> () {sum: i, sum: j}",
    ),
    (Case("Einsum", [(1, 4), (3, 4)], {"equation": "ij,ij->ij"}), "1 j, i j -> i j"),
    (
        Case("Einsum", [(2, 6, 4, 3), (4, 2, 3, 8)], {"equation": "gsec,egcm->gsm"}),
        "g s e c, e g c m -> g s m {sum: c, sum: e}",
    ),
    (
        Case("Einsum", [(3, 2), (2, 5, 3, 4)], {"equation": "cb,bdca->cdba"}),
        "c b, b d c a -> c d b a",
    ),
]


@pytest.mark.parametrize(("case", "text"), CASES, ids=[c.op for c, _ in CASES])
def test_rule(prove_rule, case, text):
    prove_rule(case, text)
