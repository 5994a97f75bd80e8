"""Rules of linear attention and of causal convolutions with a state: of ONNX's own ops, of opset 27,
and of those of com.microsoft."""

from dataclasses import replace

import numpy as np
import pytest
from opsets import since

from onnxpar.testing.case import Case

SINCE_27 = since(27)

RNG = np.random.default_rng(7)


def small(*shape):
    return (RNG.normal(size=shape) / 4).astype(np.float32)


def case(op, operands, attrs, outputs=2):
    fed = [i for i, x in enumerate(operands) if x is not None]
    return Case(op, operands, attrs, fed, outputs, domain="com.microsoft")


def attention(kind, queries=4, keys=2, d=3, e=4, decay="", beta="", past=False, **attrs):
    widths = {"each": keys * d, "head": keys, "one": 1}
    operands = [small(2, 5, queries * d), small(2, 5, keys * d), small(2, 5, keys * e)]
    operands += [small(2, keys, d, e) if past else None]
    operands += [-np.abs(small(2, 5, widths[decay])) if decay else None]
    operands += [np.abs(small(2, 5, widths[beta])) if beta else None]
    while operands[-1] is None:
        operands.pop()
    attrs = {"q_num_heads": queries, "kv_num_heads": keys, "update_rule": kind, **attrs}
    return case("LinearAttention", operands, attrs)


RULE = "b s (k g d), b s (k d), b s (k e){} -> b s (k g e); b k d e "
SUMMED, READ = "{{communicating: d s}}", "{{communicating: s, whole: d}}"
ATTENTION = [
    (attention("linear"), (RULE + SUMMED).format("")),
    (attention("linear", past=True, scale=0.5), (RULE + SUMMED).format(", b k d e")),
    (attention("gated", decay="each"), (RULE + SUMMED).format(", _, b s (k d)")),
    (attention("gated", decay="head", past=True), (RULE + SUMMED).format(", b k d e, b s k")),
    (attention("delta", beta="head"), (RULE + READ).format(", _, _, b s k")),
    (
        attention("gated_delta", 6, 3, decay="each", beta="one"),
        (RULE + READ).format(", _, b s (k d), b s 1"),
    ),
    (
        attention("gated_delta", 2, 2, decay="head", beta="head", past=True),
        (RULE + READ).format(", b k d e, b s k, b s k"),
    ),
]


@pytest.mark.parametrize(("case", "text"), ATTENTION)
def test_linear_attention(prove_rule, case, text):
    prove_rule(case, text)


@SINCE_27
@pytest.mark.parametrize(("case", "text"), ATTENTION)
def test_linear_attention_of_onnx(prove_rule, case, text):
    prove_rule(replace(case, domain="", opset=27), text)


def convolution(bias=False, past=False, **attrs):
    operands = [small(3, 4, 6), small(4, 1, 3), small(4) if bias else None]
    operands += [small(3, 4, 2) if past else None]
    while operands[-1] is None:
        operands.pop()
    return case("CausalConvWithState", operands, attrs)


CONVOLUTIONS = [
    (convolution(), "b c h, c 1 w -> b c s; b c p {communicating: h, co-sharded: h s, whole: w p}"),
    (
        convolution(True),
        "b c h, c 1 w, c -> b c s; b c p {communicating: h, co-sharded: h s, whole: w p}",
    ),
    (
        convolution(past=True, activation="silu"),
        "b c h, c 1 w, _, b c p -> b c s; b c p {communicating: h, co-sharded: h s, whole: w p}",
    ),
    (
        convolution(True, True),
        "b c h, c 1 w, c, b c p -> b c s; b c p {communicating: h, co-sharded: h s, whole: w p}",
    ),
]


@pytest.mark.parametrize(("case", "text"), CONVOLUTIONS)
def test_causal_convolution(prove_rule, case, text):
    prove_rule(case, text)


@SINCE_27
@pytest.mark.parametrize(("case", "text"), CONVOLUTIONS)
def test_causal_convolution_of_onnx(prove_rule, case, text):
    prove_rule(replace(case, domain="", opset=27), text)
