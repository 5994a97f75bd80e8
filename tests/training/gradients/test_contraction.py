"""Gradients of products of matrices."""

import numpy as np
import pytest

from onnxpar.testing.case import Case


def gemm(c=None, trans_a=0, trans_b=0, **attrs):
    a, b = ((5, 3) if trans_a else (3, 5)), ((4, 5) if trans_b else (5, 4))
    operands = [a, b] if c is None else [a, b, c]
    return Case("Gemm", operands, {"transA": trans_a, "transB": trans_b, **attrs})


def product(equation, *shapes):
    return Case("Einsum", shapes, {"equation": equation})


SINGULAR = np.outer([1.0, 2.0, -1.0], [0.5, 1.0, 3.0])

CASES = [
    *(
        Case("MatMul", shapes)
        for shapes in [
            [(3, 5), (5, 4)],
            [(2, 3, 5), (5, 4)],
            [(2, 2, 3, 5), (2, 2, 5, 4)],
            [(3, 5), (2, 5, 4)],
            [(2, 1, 3, 5), (3, 5, 4)],
            [(1, 3, 5), (2, 5, 4)],
            [(5,), (5,)],
            [(5,), (5, 4)],
            [(3, 5), (5,)],
            [(2, 3, 5), (5,)],
            [(5,), (2, 5, 4)],
            [(2, 1, 3, 5), (5,)],
            [(0, 3, 5), (5, 4)],
            [(2, 3, 0), (0, 4)],
            [(2, 0, 5), (5, 4)],
            [(2, 3, 5), (5, 0)],
        ]
    ),
    *(gemm((4,), a, b, alpha=0.5, beta=2.0) for a in (0, 1) for b in (0, 1)),
    *(gemm(c, trans_b=1) for c in [(3, 4), (3, 1), (1, 4), (1, 1), (), (1,)]),
    gemm(alpha=-1.5),
    gemm(beta=0.0, c=(4,)),
    Case("Gemm", [(0, 5), (5, 4), (4,)]),
    Case("Gemm", [(3, 0), (0, 4), (4,)]),
    product("ij,jk->ik", (2, 3), (3, 4)),
    product("ij,jk", (2, 3), (3, 4)),
    product("ba, ca", (2, 3), (4, 3)),
    product("bhqd,bhkd->bhqk", (2, 2, 3, 4), (2, 2, 5, 4)),
    product("ij->ji", (2, 3)),
    product("ij->", (2, 3)),
    product("ij->i", (2, 3)),
    product("ii->i", (3, 3)),
    product("ii", (3, 3)),
    product("ijiji->ij", (2, 3, 2, 3, 2)),
    product("iij,jk->ik", (3, 3, 2), (2, 2)),
    product("ii,jj->ij", (3, 3), (2, 2)),
    product("ii,i->", (3, 3), (3,)),
    product("...ij,...jk->...ik", (2, 1, 3, 4), (1, 5, 4, 2)),
    product("i...,j...->...", (2, 1, 3), (4, 5, 3)),
    product("...a,a...", (2, 1, 3), (3, 1, 2)),
    product("...,...", (2, 1), (1, 3)),
    product("ij,jk->ik", (2, 1), (3, 4)),
    product("...i->...", (2, 3, 4)),
    product("...ii->i...", (2, 3, 3)),
    product("ij,kl->il", (2, 3), (4, 5)),
    product("i,j,k->", (2,), (3,), (4,)),
    product("i,j,ij->ij", (2,), (3,), (2, 3)),
    product("ai,bi,ci->abc", (2, 3), (3, 3), (2, 3)),
    product(",ij->ji", (), (2, 3)),
    product(",->", (), ()),
    product("Ij,jB->BI", (2, 3), (3, 4)),
    product("ij,jk->ik", (0, 3), (3, 4)),
    product("ij,jk->ik", (2, 0), (0, 4)),
    Case("Det", [(3, 3)]),
    Case("Det", [(2, 3, 2, 2)]),
    Case("Det", [(2, 1, 1)]),
    Case("Det", [(4, 4)]),
    Case("Det", [(0, 2, 2)]),
    Case("Det", [SINGULAR], fed=[0]),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.op}{c.attrs.get('equation', '')}")
def test_gradient(prove, case):
    prove(case)


@pytest.mark.parametrize("operand", [0, 1])
def test_one_operand_is_wanted(prove, operand):
    prove(product("bij,bjk->bik", (2, 2, 3), (2, 3, 4)), wrt=[operand])
