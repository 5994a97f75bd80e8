"""Small models that are trained: a conv net with batch-norm, an expert layer, a wide softmax."""

from __future__ import annotations

CONV = """conv (float[8,2,6,6] x, float[4,2,3,3] w1, float[4] w2, float[4] w3, float[4] w4,
float[4,3] w6, float[3] w7) => (float[8,3] y)
<float[4] mean = {0, 0, 0, 0}, float[4] variance = {1, 1, 1, 1}, int64[2] space = {2, 3}>
{ h = Conv(x, w1, w2)  n = BatchNormalization(h, w3, w4, mean, variance)  r = Relu(n)
  p = ReduceMean<keepdims = 0>(r, space)  y = Gemm(p, w6, w7) }"""

MOE = """moe (int64[4,6] i, float[20,8] w1, float[8,4] w2, float[4,8,16] w3, float[4,1,1,16] w4,
float[4,16,8] w5, float[8,3] w6) => (float[4,6,3] y)
<int64 depth = {4}, float[2] values = {0, 1}, int64 one = {1}, float first = {1},
int64[1] last = {-1}, float[3] places = {0, 1, 2}>
{ x = Gather(w1, i)  scores = MatMul(x, w2)  p = Softmax<axis = -1>(scores)
  best = ArgMax<axis = -1, keepdims = 0>(p)  hot = OneHot<axis = -1>(best, depth, values)
  count = CumSum(hot, one)  own = Mul(count, hot)  place = Sub(own, first)
  wide = Unsqueeze(place, last)  is_place = Equal(wide, places)  dispatch = Cast<to = 1>(is_place)
  given = Einsum<equation = "gsec,gsm->egcm">(dispatch, x)
  h = Einsum<equation = "egcm,emh->egch">(given, w3)  a = Add(h, w4)  r = Relu(a)
  made = Einsum<equation = "egch,ehm->egcm">(r, w5)
  chosen = Mul(p, hot)  gate = Unsqueeze(chosen, last)  combine = Mul(dispatch, gate)
  back = Einsum<equation = "gsec,egcm->gsm">(combine, made)  s = Add(x, back)
  y = MatMul(s, w6) }"""
"""GShard's layer: top-1 gating into 3 places of each of 4 experts, for 4 groups of tokens."""

HEAD = """head (float[8,64] x, float[64,32] w1, float[32,1000] w2) => (float[8,1000] y)
{ h = MatMul(x, w1)  r = Relu(h)  y = MatMul(r, w2) }"""

BLOCKS = """blocks (int64[4,6] i, float[40,32] w0, float[32,96] wa, float[96,32] wb,
float[32,96] wc, float[96,32] wd, float[32,5] we) => (float[4,6,5] y)
<float[32] wn = {SCALE}, float[32] wm = {SCALE}>
{ x = Gather(w0, i)
  n = LayerNormalization(x, wn)  a = MatMul(n, wa)  b = Relu(a)  c = MatMul(b, wb)  s = Add(x, c)
  m = LayerNormalization(s, wm)  d = MatMul(m, wc)  e = Relu(d)  f = MatMul(e, wd)  t = Add(s, f)
  y = MatMul(t, we) }""".replace("SCALE", ", ".join(["1"] * 32))
"""Two residual blocks of tensor-parallel layers between an embedding and a small head."""

DROPOUT = """drop (float[8,6] x, float[6,40] w1, float[40,5] w2) => (float[8,5] y)
<float ratio = {0.25}, bool training = {1}>
{ h = MatMul(x, w1)  d = Dropout(h, ratio, training)  y = MatMul(d, w2) }"""
