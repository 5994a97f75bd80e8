"""Texts of rules that are not in their notation are refused at their place."""

from __future__ import annotations

import re
from pathlib import Path

import onnx
import pytest

from onnxpar.api import make_plan
from onnxpar.base.errors import StrategyError
from onnxpar.rules.notation import Cat, Prod, RuleTextError, Var, parse_rule
from onnxpar.rules.rule import Rule, einsum, rule

MODEL = """<ir_version: 8, opset_import: ["" : 17, "tests.text" : 1]>
m (float[6, 4] x) => (float[6, 4] y, float[6] z) { y, z = tests.text.Op(x) }"""


def test_what_a_text_means() -> None:
    b, f, s = Var("b"), Var("f"), Var("s")
    assert parse_rule("(b f) s, _, () -> 1 s ; b + f") == (
        ((Prod((b, f)), s), None, ()),
        ((Prod(()), s), (Cat((b, f)),)),
    )


@pytest.mark.parametrize(
    "text,message",
    [
        ("b f -> b f, b", "'b f -> b f' is followed by ', b': ';' separates results"),
        ("b; f -> b f", "'b' is followed by '; f -> b f': ',' separates operands"),
        ("b f b f", "has no ->"),
        ("b -> b -> b", "'b -> b ' is followed by '-> b': a rule has one ->"),
        ("b (f -> b f", "'b (f ' is followed by '-> b f': a parenthesis is not closed"),
        ("b f -> b) f", "'b f -> b' is followed by ') f': nothing is open"),
        ("b-f -> b", "'b' is followed by '-f -> b': names of factors are letters"),
        ("b -> + b", "'b -> ' is followed by '+ b': + stands between two segments"),
    ],
)
def test_the_place_of_a_mistake(text: str, message: str) -> None:
    with pytest.raises(RuleTextError, match=re.escape(message)):
        parse_rule(text)


@pytest.mark.parametrize(
    "text,message",
    [
        ("b f -> b f, b", "';' separates results"),
        ("b f -> b f ; b ; c", "Op, which has 1 operands and 2 results, gives the size of c"),
        ("b f g -> b f ; b", "gives 3 dimensions to 'x', which has 2"),
    ],
)
def test_a_plugin_is_told(text: str, message: str, tmp_path: Path) -> None:
    def of_text(node: object) -> Rule:
        return einsum(node, text)

    rule("Op", domain="tests.text", replace=True)(of_text)
    onnx.save(onnx.parser.parse_model(MODEL), tmp_path / "m.onnx")
    with pytest.raises(StrategyError, match=f"of_text fails on Op .*{message}; correct the plugin"):
        make_plan(tmp_path / "m.onnx", devices=2)
