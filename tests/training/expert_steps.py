"""A mixture of experts with a router, all of whose weights are trained."""

from __future__ import annotations

TEXT = """moe (float[ROWS,WIDTH] x, float[WIDTH,EXPERTS] w_gate, float[EXPERTS,WIDTH,HIDDEN] w_up,
  float[EXPERTS,1,HIDDEN] w_bias, float[EXPERTS,HIDDEN,3] w_down) => (float[ROWS,3] y) <
  int64[1] two = {2}, int64[EXPERTS,1,1] numbers = {NUMBERS}, float zero = {0},
  int64[1] first = {0}
> {
  scores = MatMul (x, w_gate)
  shares = Softmax <axis = -1> (scores)
  top, ids = TopK (shares, two)
  each = Unsqueeze (ids, first)
  hot = Equal (each, numbers)
  marks = Cast <to = 1> (hot)
  scaled = Mul (marks, top)
  weight = ReduceSum <keepdims = 1> (scaled, two)
  count = ReduceSum <keepdims = 1> (marks, two)
  chosen = Cast <to = 9> (count)
  a = Where (chosen, x, zero)
  h = MatMul (a, w_up)
  c = Add (h, w_bias)
  g = Tanh (c)
  b = MatMul (g, w_down)
  m = Mul (b, weight)
  d = Where (chosen, m, zero)
  y = ReduceSum <keepdims = 0> (d, first)
}"""


def mixture(experts: int, rows: int, width: int = 4, hidden: int = 6) -> str:
    """The text of a model whose router chooses two experts for each row."""
    sizes = {"EXPERTS": experts, "ROWS": rows, "WIDTH": width, "HIDDEN": hidden}
    text = TEXT.replace("NUMBERS", ",".join(map(str, range(experts))))
    for name, size in sizes.items():
        text = text.replace(name, str(size))
    return text


def changed(text: str, *lines: tuple[str, str]) -> str:
    """The text of a model with other lines in the place of some."""
    for old, new in lines:
        assert old in text, old
        text = text.replace(old, new)
    return text


def behind_layer(text: str) -> str:
    """The mixture behind a trained layer, which gets a gradient from the experts' operand."""
    width = text.split("] w_gate")[0].rpartition("float[")[2].split(",")[0]
    return changed(
        text,
        ("] x,", f"] x0, float[{width},{width}] w_first,"),
        ("  scores =", "  p = MatMul (x0, w_first)\n  x = Tanh (p)\n  scores ="),
    )
