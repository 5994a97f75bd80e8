"""Silent bugs of other systems that were published, re-enacted on small models: ranks that compute
the model, and the same ranks with the bug put in. The code is written from the descriptions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from equivalence.hand_split import Text, weights

Cut = np.ndarray | Callable[[int], np.ndarray]
INT = np.int64


@dataclass(frozen=True)
class Bug:
    """A model, ranks that compute it, and ranks with the bug.

    tensor  where the proof of `wrong` must end
    ports   what ranks hold of inputs and outputs, and the mesh
    """

    model: Text
    right: Sequence[Text]
    wrong: Sequence[Text]
    tensor: str
    ports: Mapping[str, object]


BUGS: dict[str, Callable[[], Bug]] = {}


def bug(make: Callable[[], Bug]) -> Callable[[], Bug]:
    BUGS[make.__name__] = make
    return make


def each(text: str, ranks: int = 2, **cuts: Cut) -> list[Text]:
    """One text for all ranks; each constant is the same on all, or a function of the rank."""
    return [(text, {n: c(r) if callable(c) else c for n, c in cuts.items()}) for r in range(ranks)]


def rows(value: np.ndarray, ranks: int = 2, axis: int = 0) -> Callable[[int], np.ndarray]:
    """The rank's equal part of a dimension."""
    return lambda rank: np.split(value, ranks, axis)[rank]


def columns(value: np.ndarray, ranks: int = 2) -> Callable[[int], np.ndarray]:
    return rows(value, ranks, -1)


def ints(*values: int) -> np.ndarray:
    return np.array(values, INT)


TP: dict[str, object] = {"mesh": {"tp": 2}}


Division = Mapping[str, Mapping[str, object]]


def ports(
    inputs: Division | None = None, outputs: Division | None = None, **mesh: int
) -> dict[str, object]:
    """A ports.json; of two ranks along `tp` unless a mesh is given."""
    return {"mesh": mesh or {"tp": 2}, "inputs": inputs or {}, "outputs": outputs or {}}


@bug
def bias_before_the_sum() -> Bug:
    """Each rank of a row-parallel layer adds the bias before the all-reduce.
    https://github.com/huggingface/text-generation-inference/issues/1036"""
    w = weights(w=(8, 6), b=(6,))
    model = "g (float[4,8] x) => (float[4,6] y) { h = MatMul(x, w) y = Add(h, b) }"
    good = "g (float[4,4] x) => (float[4,6] y) { p = MatMul(x, w) s = AllReduce(p) y = Add(s, b) }"
    bad = "g (float[4,4] x) => (float[4,6] y) { p = MatMul(x, w) s = Add(p, b) y = AllReduce(s) }"
    cut = {"w": rows(w["w"]), "b": w["b"]}
    return Bug((model, w), each(good, **cut), each(bad, **cut), "y", ports({"x": {"1": "tp"}}))


@bug
def padding_of_the_vocabulary_is_not_masked() -> Bug:
    """Columns that pad the head to a multiple of the ranks have the logit 0, and win where all
    others are negative. https://github.com/mirage-project/mirage/issues/751"""
    w = weights(head=(8, 6))
    w["head"][:, 4:] = 0
    w["mask"] = np.array([0] * 4 + [-1e9] * 2, np.float32)
    model = """g (float[4,8] x) => (int64[4,1] token) {
        logits = MatMul(x, head) masked = Add(logits, mask) token = ArgMax<axis=1>(masked) }"""
    good = """g (float[4,8] x) => (int64[4,1] token) {
        part = MatMul(x, head) own = Add(part, mask)
        all = com.microsoft.AllGather<axis=1, group_size=2>(own) token = ArgMax<axis=1>(all) }"""
    bad = good.replace("own = Add(part, mask)", "own = Identity(part)")
    cut = {"head": columns(w["head"]), "mask": columns(w["mask"])}
    return Bug((model, w), each(good, **cut), each(bad, **cut), "masked", TP)


@bug
def wrong_copies_of_key_heads() -> Bug:
    """4 ranks share 2 heads of keys: rank r needs head r // 2, and gets head r % 2.
    https://github.com/vllm-project/tpu-inference/pull/1429,
    https://github.com/sgl-project/sglang/pull/19086"""
    w = weights(wq=(8, 16), wk=(8, 8))
    shapes = {"q4": ints(5, 4, 4), "k4": ints(5, 2, 1, 4), "wide": ints(5, 2, 2, 4)}
    model = """g (float[5,8] x) => (float[4,5,5] scores) {
        q = MatMul(x, wq) k = MatMul(x, wk) qh = Reshape(q, q4) kh = Reshape(k, k4)
        ke = Expand(kh, wide) kr = Reshape(ke, q4)
        qt = Transpose<perm=[1,0,2]>(qh) kt = Transpose<perm=[1,2,0]>(kr)
        scores = MatMul(qt, kt) }"""
    local = {"q4": ints(5, 1, 4), "k4": ints(5, 1, 1, 4), "wide": ints(5, 1, 1, 4)}
    rank = model.replace("float[4,5,5]", "float[1,5,5]")
    queries = columns(w["wq"], 4)
    good = each(rank, 4, wq=queries, wk=lambda r: columns(w["wk"])(r // 2), **local)
    bad = each(rank, 4, wq=queries, wk=lambda r: columns(w["wk"])(r % 2), **local)
    plan = ports(None, {"scores": {"0": "tp"}}, tp=4)
    return Bug((model, {**w, **shapes}), good, bad, "kr", plan)


@bug
def rotary_tables_of_the_first_chunk() -> Bug:
    """Under context parallelism, each rank rotates by the positions of the first chunk.
    https://github.com/NVIDIA/Megatron-LM/issues/560"""
    w = weights(cos=(8, 4), sin=(8, 4))
    model = """g (float[8,8] x) => (float[8,4] y) {
        a, b = Split<axis=1, num_outputs=2>(x) c = Mul(a, cos) d = Mul(b, sin) y = Sub(c, d) }"""
    rank = model.replace("float[8,", "float[4,")
    good = each(rank, cos=rows(w["cos"]), sin=rows(w["sin"]))
    bad = each(rank, cos=w["cos"][:4], sin=w["sin"][:4])
    plan = ports({"x": {"0": "cp"}}, {"y": {"0": "cp"}}, cp=2)
    return Bug((model, w), good, bad, "c", plan)


@bug
def mean_of_means() -> Bug:
    """The mean of ranks' means, where ranks have other numbers of tokens.
    https://github.com/meta-pytorch/torchtune/pull/1875"""
    model = "g (float[5] x) => (float loss) { s = ReduceSum<keepdims=0>(x) loss = Div(s, n) }"
    good = """g (float[N] x) => (float loss) {
        p = ReduceSum<keepdims=0>(x) s = AllReduce(p) loss = Div(s, n) }"""
    bad = """g (float[N] x) => (float loss) {
        p = ReduceMean<keepdims=0>(x) s = AllReduce(p) loss = Div(s, two) }"""
    five = {"n": np.float32(5)}
    plan = ports({"x": {"0": [[0, 3], [3, 5]]}}, None, dp=2)
    return Bug((model, five), each(good, **five), each(bad, two=np.float32(2)), "s", plan)


@bug
def loss_by_the_local_number_of_tokens() -> Bug:
    """Each rank divides by the number of its own valid tokens, and the quotients are averaged.
    https://github.com/pytorch/torchtitan/pull/2206"""
    model = """g (float[6] l, float[6] m) => (float loss) {
        lm = Mul(l, m) s = ReduceSum<keepdims=0>(lm) c = ReduceSum<keepdims=0>(m)
        loss = Div(s, c) }"""
    good = """g (float[3] l, float[3] m) => (float loss) {
        lm = Mul(l, m) s1 = ReduceSum<keepdims=0>(lm) c1 = ReduceSum<keepdims=0>(m)
        s = AllReduce(s1) c = AllReduce(c1) loss = Div(s, c) }"""
    bad = """g (float[3] l, float[3] m) => (float loss) {
        lm = Mul(l, m) s = ReduceSum<keepdims=0>(lm) c = ReduceSum<keepdims=0>(m)
        own = Div(s, c) sum = AllReduce(own) loss = Div(sum, two) }"""
    plan = ports({"l": {"0": "dp"}, "m": {"0": "dp"}}, None, dp=2)
    return Bug((model, {}), each(good), each(bad, two=np.float32(2)), "loss", plan)


NORM = """g (float[4,8] x) => (float[4,8] y) {
    sq = Mul(x, x) s = ReduceSum(sq, last) m = Div(s, n) e = Add(m, eps) r = Sqrt(e)
    y = Div(x, r) }"""


@bug
def norm_of_a_local_shard() -> Bug:
    """An RMS norm over all heads takes the statistic of the rank's own heads.
    https://github.com/axonn-ai/yalis/pull/36, https://github.com/EleutherAI/gpt-neox/pull/1424"""
    small = {"last": ints(1), "eps": np.float32(1e-6), "n": np.float32(8)}
    good = NORM.replace("[4,8]", "[4,4]").replace(
        "s = ReduceSum(sq, last)", "p = ReduceSum(sq, last) s = AllReduce(p)"
    )
    bad = NORM.replace("[4,8]", "[4,4]")
    plan = ports({"x": {"1": "tp"}}, {"y": {"1": "tp"}})
    wrong = each(bad, **{**small, "n": np.float32(4)})
    return Bug((NORM, small), each(good, **small), wrong, "m", plan)


@bug
def slopes_of_the_first_heads() -> Bug:
    """ALiBi's slopes are those of the first heads on each rank.
    https://github.com/bigscience-workshop/Megatron-DeepSpeed/issues/227,
    https://github.com/flashinfer-ai/flashinfer/issues/1606"""
    w = {"slopes": np.array([0.5, 0.25, 0.125, 0.0625], "f").reshape(4, 1, 1)}
    model = """g (float[4,5,5] scores, float[5,5] distance) => (float[4,5,5] y) {
        bias = Mul(slopes, distance) y = Add(scores, bias) }"""
    rank = model.replace("[4,5,5]", "[2,5,5]")
    plan = ports({"scores": {"0": "tp"}}, {"y": {"0": "tp"}})
    good, bad = each(rank, slopes=rows(w["slopes"])), each(rank, slopes=w["slopes"][:2])
    return Bug((model, w), good, bad, "bias", plan)


@bug
def gradients_of_norms_under_sequence_parallelism() -> Bug:
    """Ranks have the tokens of their part of a sequence; the gradient of a norm's weight is not
    summed over them. https://github.com/NVIDIA/Megatron-LM/issues/1446"""
    model = """g (float[6,8] dy, float[6,8] normal, float[8] w) => (float[8] next) {
        p = Mul(dy, normal) dw = ReduceSum<keepdims=0>(p, first) step = Mul(dw, rate)
        next = Sub(w, step) }"""
    rank = model.replace("[6,8]", "[3,8]")
    good = rank.replace("dw = ReduceSum<keepdims=0>(p, first)",
                        "own = ReduceSum<keepdims=0>(p, first) dw = AllReduce(own)")  # fmt: skip
    small = {"first": ints(0), "rate": np.float32(0.1)}
    plan = ports({"dy": {"0": "tp"}, "normal": {"0": "tp"}}) | {"states": [["w", "next"]]}
    return Bug((model, small), each(good, **small), each(rank, **small), "next", plan)


@bug
def gradients_divided_by_another_group() -> Bug:
    """Gradients of experts are summed over all ranks, and divided by the size of the smaller group
    of data parallelism: they are too large by the expert-parallel size.
    https://github.com/NVIDIA/Megatron-LM/pull/5956,
    https://github.com/deepspeedai/DeepSpeed/pull/6546"""
    model = """g (float[4,6] g) => (float[6] mean) {
        s = ReduceSum<keepdims=0>(g, first) mean = Div(s, n) }"""
    rank = """g (float[1,6] g) => (float[6] mean) {
        p = ReduceSum<keepdims=0>(g, first) s = AllReduce(p) mean = Div(s, n) }"""
    four, two = ({"first": ints(0), "n": np.float32(n)} for n in (4, 2))
    plan = ports({"g": {"0": ["ep", "dp"]}}, None, ep=2, dp=2)
    return Bug((model, four), each(rank, 4, **four), each(rank, 4, **two), "mean", plan)


@bug
def tied_embeddings_without_a_sum() -> Bug:
    """The first and the last stage have a copy of a tied table, and the gradients of its two uses
    are not added. https://github.com/uw-syfi/piper/issues/13"""
    model = """g (float[2,6,5] d, float[2,5,4] h) => (float[6,4] dw) {
        uses = MatMul(d, h) dw = ReduceSum<keepdims=0>(uses, first) }"""
    good = """g (float[1,6,5] d, float[1,5,4] h) => (float[6,4] dw) {
        uses = MatMul(d, h) own = ReduceSum<keepdims=0>(uses, first) dw = AllReduce(own) }"""
    bad = good.replace("own =", "dw =").replace("dw = AllReduce(own)", "")
    plan = ports({"d": {"0": "pp"}, "h": {"0": "pp"}}, None, pp=2)
    first = ints(0)
    return Bug((model, {"first": first}), each(good, first=first), each(bad, first=first), "dw",
               plan)  # fmt: skip


@bug
def fused_projections_cut_through() -> Bug:
    """A fused weight of queries, keys and values is cut into equal columns: rank 0 gets all queries
    and half of the keys. https://github.com/NVIDIA-NeMo/Automodel/pull/1324,
    https://github.com/vllm-project/vllm/pull/36242"""
    w = weights(w=(8, 24))
    model = """g (float[4,8] x) => (float[4,8] y) {
        qkv = MatMul(x, w) q, k, v = Split<axis=1>(qkv, parts) qk = Mul(q, k) y = Add(qk, v) }"""
    rank = model.replace("float[4,8] y", "float[4,4] y")
    parts = np.split(w["w"], 3, axis=1)
    good = each(rank, w=lambda r: np.concatenate([columns(p)(r) for p in parts], 1),
                parts=ints(4, 4, 4))  # fmt: skip
    bad = each(rank, w=columns(w["w"]), parts=ints(4, 4, 4))
    plan = ports(None, {"y": {"1": "tp"}})
    return Bug((model, {**w, "parts": ints(8, 8, 8)}), good, bad, "q", plan)


@bug
def tiled_key_heads() -> Bug:
    """Heads of keys are repeated as a whole, [0, 1, 0, 1], and not each by itself, [0, 0, 1, 1].
    https://github.com/onnx/onnx/pull/7274"""
    model = """g (float[6,2,4] k, float[6,4,4] q) => (float[6,4,4] y) {
        u = Unsqueeze(k, axis) wide = Expand(u, shape) r = Reshape(wide, heads) y = Mul(q, r) }"""
    rank = model.replace("float[6,", "float[3,")
    whole = {"axis": ints(2), "shape": ints(6, 2, 2, 4), "heads": ints(6, 4, 4)}
    good = {"axis": ints(2), "shape": ints(3, 2, 2, 4), "heads": ints(3, 4, 4)}
    bad = good | {"axis": ints(1)}
    plan = ports({"k": {"0": "dp"}, "q": {"0": "dp"}}, {"y": {"0": "dp"}}, dp=2)
    return Bug((model, whole), each(rank, **good), each(rank, **bad), "u", plan)


LOSS = """g (float[3,8] logits, float[3,8] target) => (float[3] loss) {
    e = Exp(logits) z = ReduceSum<keepdims=0>(e, last) lz = Log(z) t = Mul(logits, target)
    own = ReduceSum<keepdims=0>(t, last) loss = Sub(lz, own) }"""


@bug
def loss_of_gathered_logits() -> Bug:
    """A cross-entropy for shards of the vocabulary gets logits that were gathered, and sums the
    exponentials once for each rank: the loss is too large by log(2).
    https://github.com/NVIDIA/Megatron-LM/issues/7452"""
    rank = (
        LOSS.replace("z = ReduceSum", "z1 = ReduceSum")
        .replace("lz =", "z = AllReduce(z1) lz =")
        .replace("own = ReduceSum", "o1 = ReduceSum")
        .replace("loss =", "own = AllReduce(o1) loss =")
    )
    small = {"last": ints(1)}
    good = each(rank.replace("[3,8]", "[3,4]"), **small)
    split = ports({"logits": {"1": "tp"}, "target": {"1": "tp"}})
    gathered = rank.replace("[3,8]", "[3,4]").replace(
        "e = Exp(logits)",
        "logits8 = com.microsoft.AllGather<axis=1, group_size=2>(logits) "
        "target8 = com.microsoft.AllGather<axis=1, group_size=2>(target) e = Exp(logits8)",
    ).replace("Mul(logits, target)", "Mul(logits8, target8)")  # fmt: skip
    return Bug((LOSS, small), good, each(gathered, **small), "lz", split)


@bug
def auxiliary_loss_by_all_tokens() -> Bug:
    """A balance loss divides what a rank has by the tokens of all ranks, and is averaged over them:
    it is too small by the data-parallel size.
    https://github.com/NVIDIA/Megatron-LM/issues/3672"""
    model = """g (float[6,4] probs) => (float[4] share) {
        s = ReduceSum<keepdims=0>(probs, first) share = Div(s, n) }"""
    good = """g (float[3,4] probs) => (float[4] share) {
        p = ReduceSum<keepdims=0>(probs, first) s = AllReduce(p) share = Div(s, n) }"""
    bad = good.replace("share = Div(s, n)", "mean = Div(s, count) share = Div(mean, n)")
    small = {"first": ints(0), "n": np.float32(6)}
    plan = ports({"probs": {"0": "dp"}}, None, dp=2)
    return Bug((model, small), each(good, **small),
               each(bad, **small, count=np.float32(2)), "share", plan)  # fmt: skip


@bug
def gathered_in_another_order() -> Bug:
    """An all-gather returns what ranks sent in another order than theirs.
    https://github.com/NVIDIA/nccl/issues/1906"""
    model = "g (float[6,4] x) => (float[6,4] y) { y = Relu(x) }"
    rank = "g (float[3,4] x) => (float[6,4] y) { r = Relu(x) y = AllGather[0,1](r) }"
    plan = ports({"x": {"0": "tp"}})
    return Bug((model, {}), each(rank), each(rank.replace("[0,1]", "[1,0]")), "y", plan)


@bug
def groups_of_all_ranks() -> Bug:
    """On a mesh of two dimensions, an all-reduce of tensor parallelism spans the world, and mixes
    samples. https://github.com/pytorch/TensorRT/pull/4380"""
    w = weights(w=(8, 6))
    model = "g (float[4,8] x) => (float[4,6] y) { y = MatMul(x, w) }"
    text = "g (float[2,4] x) => (float[2,6] y) { p = MatMul(x, w) y = AllReduce[%s](p) }"
    cut = [{"w": rows(w["w"])(r % 2)} for r in range(4)]
    good = [(text % ("0,1" if r < 2 else "2,3"), cut[r]) for r in range(4)]
    bad = [(text % "0,1,2,3", cut[r]) for r in range(4)]
    plan = ports({"x": {"0": "cp", "1": "tp"}}, {"y": {"0": "cp"}}, cp=2, tp=2)
    return Bug((model, w), good, bad, "y", plan)


@bug
def collectives_that_do_nothing() -> Bug:
    """Engines without a communicator skip their all-reduces, and go on with parts of sums.
    https://github.com/pytorch/TensorRT/issues/4381"""
    w = weights(up=(6, 8), down=(8, 6))
    model = """g (float[4,6] x) => (float[4,6] y) {
        h = MatMul(x, up) r = Relu(h) d = MatMul(r, down) y = Add(d, x) }"""
    good = model.replace("d = MatMul(r, down)", "p = MatMul(r, down) d = AllReduce(p)")
    cut = {"up": columns(w["up"]), "down": rows(w["down"])}
    return Bug((model, w), each(good, **cut), each(model, **cut), "y", TP)


@bug
def gradients_of_a_weight_used_twice() -> Bug:
    """A backward pass that is split into those of inputs and of weights counts one use of a weight
    twice: what flows through the second product flows into the first again.
    https://github.com/pytorch/pytorch/issues/180952"""
    model = """g (float[4,3] x, float[4,3] dy, float[3,3] w) => (float[3,3] dw) {
        wt = Transpose<perm=[1,0]>(w) dh = MatMul(dy, wt) h = MatMul(x, w)
        xt = Transpose<perm=[1,0]>(x) ht = Transpose<perm=[1,0]>(h)
        first = MatMul(xt, dh) second = MatMul(ht, dy) dw = Add(first, second) }"""
    rank = model.replace("[4,3]", "[2,3]")
    good = rank.replace("dw = Add(first, second)", "s = Add(first, second) dw = AllReduce(s)")
    bad = rank.replace("dw = Add(first, second)",
                       "s = Add(first, second) t = Add(s, first) dw = AllReduce(t)")  # fmt: skip
    plan = ports({"x": {"0": "pp"}, "dy": {"0": "pp"}}, None, pp=2)
    return Bug((model, {}), each(good), each(bad), "dw", plan)


@bug
def gradients_of_both_halves() -> Bug:
    """The gradients of the two results of a Split are added, and given to the first of them.
    https://github.com/pytorch/pytorch/issues/170277"""
    model = """g (float[4,3] da, float[4,3] db) => (float[4,6] dx) {
        dx = Concat<axis=1>(da, db) }"""
    good = model.replace("[4,", "[2,")
    bad = good.replace("dx = Concat<axis=1>(da, db)", """
        s = Add(da, db) zero = Sub(db, db) dx = Concat<axis=1>(s, zero)""")  # fmt: skip
    plan = ports({"da": {"0": "pp"}, "db": {"0": "pp"}}, {"dx": {"0": "pp"}}, pp=2)
    return Bug((model, {}), each(good), each(bad), "dx", plan)


@bug
def sums_of_shards_of_other_rows() -> Bug:
    """Gradients of a tied table are reduce-scattered over data parallelism, in one order on the
    first stage and in another on the last; the stages then add other rows.
    https://github.com/NVIDIA/Megatron-LM/issues/844"""
    model = """g (float[2,2,4,3] g) => (float[4,3] dw) {
        uses = ReduceSum<keepdims=0>(g, first) dw = ReduceSum<keepdims=0>(uses, first) }"""
    text = """g (float[1,1,4,3] g) => (float[2,3] dw) {
        uses = ReduceSum<keepdims=0>(g, first) own = ReduceSum<keepdims=0>(uses, first)
        s = ReduceScatter[%s](own) dw = AllReduce[%s](s) }"""
    first = {"first": ints(0)}
    pairs = ["0,2", "1,3", "0,2", "1,3"]
    good = [(text % ("0,1" if r < 2 else "2,3", pairs[r]), first) for r in range(4)]
    bad = [(text % ("0,1" if r < 2 else "3,2", pairs[r]), first) for r in range(4)]
    plan = ports({"g": {"0": "pp", "1": "dp"}}, {"dw": {"0": "dp"}}, pp=2, dp=2)
    return Bug((model, first), good, bad, "dw", plan)


CLIP = """g (float[8] g) => (float[8] clipped) {
    sq = Mul(g, g) s = ReduceSum<keepdims=0>(sq) norm = Sqrt(s) big = Max(norm, one)
    clipped = Div(g, big) }"""


@bug
def clipped_by_a_local_norm() -> Bug:
    """A rank clips by the norm of the gradients of its own shards.
    https://github.com/PaddlePaddle/Paddle/pull/35893,
    https://github.com/hpcaitech/ColossalAI/issues/2192"""
    one = {"one": np.float32(1)}
    rank = CLIP.replace("[8]", "[4]")
    good = rank.replace("s = ReduceSum<keepdims=0>(sq)",
                        "p = ReduceSum<keepdims=0>(sq) s = AllReduce(p)")  # fmt: skip
    plan = ports({"g": {"0": "tp"}}, {"clipped": {"0": "tp"}})
    return Bug((CLIP, one), each(good, **one), each(rank, **one), "norm", plan)


@bug
def clipped_by_a_norm_counted_twice() -> Bug:
    """Gradients that all ranks have in full are added to the norm once for each rank.
    https://github.com/modelscope/twinkle/pull/290,
    https://github.com/mindspore-ai/hyper-parallel/issues/526"""
    one = {"one": np.float32(1)}
    bad = CLIP.replace("s = ReduceSum<keepdims=0>(sq)",
                       "p = ReduceSum<keepdims=0>(sq) s = AllReduce(p)")  # fmt: skip
    return Bug((CLIP, one), each(CLIP, **one), each(bad, **one), "norm", TP)


@bug
def mean_of_norms() -> Bug:
    """The norm over experts on several ranks is the mean of ranks' norms.
    https://github.com/deepspeedai/DeepSpeed/pull/8478"""
    one = {"one": np.float32(1)}
    rank = CLIP.replace("[8]", "[4]")
    good = rank.replace("s = ReduceSum<keepdims=0>(sq)",
                        "p = ReduceSum<keepdims=0>(sq) s = AllReduce(p)")  # fmt: skip
    bad = rank.replace("norm = Sqrt(s)", "own = Sqrt(s) sum = AllReduce(own) norm = Div(sum, two)")
    plan = ports({"g": {"0": "ep"}}, {"clipped": {"0": "ep"}}, ep=2)
    return Bug((CLIP, one), each(good, **one), each(bad, **one, two=np.float32(2)), "norm", plan)


@bug
def one_shard_on_all_ranks() -> Bug:
    """A loader takes the rank to be 0: each rank gets the first shard of fused weights.
    https://github.com/vllm-project/vllm-gguf-plugin/issues/103"""
    w = weights(w=(8, 6))
    model = "g (float[4,8] x) => (float[4,6] y) { h = MatMul(x, w) y = Relu(h) }"
    rank = model.replace("float[4,6] y", "float[4,3] y")
    good, bad = each(rank, w=columns(w["w"])), each(rank, w=w["w"][:, :3])
    return Bug((model, w), good, bad, "y", ports(None, {"y": {"1": "tp"}}))


@bug
def gradients_of_a_scaled_bias() -> Bug:
    """Ranks add the bias divided by their number, and the gradient is divided by it, too.
    https://github.com/pytorch/torchtitan/pull/4332"""
    model = "g (float[4,6] dy) => (float[6] db) { db = ReduceSum<keepdims=0>(dy, first) }"
    bad = """g (float[4,6] dy) => (float[6] db) {
        s = ReduceSum<keepdims=0>(dy, first) db = Div(s, count) }"""
    first = {"first": ints(0)}
    return Bug((model, first), each(model, **first), each(bad, **first, count=np.float32(2)), "db",
               TP)  # fmt: skip


@bug
def labels_shifted_in_each_chunk() -> Bug:
    """Labels are the next tokens; each rank of context parallelism shifts its own chunk, so that
    the last label of a chunk is the chunk's first token.
    https://github.com/verl-project/verl/pull/4250"""
    model = """g (int64[8] tokens) => (int64[8] labels) {
        rest = Slice(tokens, one, end) head = Slice(tokens, zero, one)
        labels = Concat<axis=0>(rest, head) }"""
    small = {"zero": ints(0), "one": ints(1), "end": ints(1 << 40)}
    good = """g (int64[4] tokens) => (int64[4] labels) {
        all = AllGather(tokens) rest = Slice(all, one, end) head = Slice(all, zero, one)
        shifted = Concat<axis=0>(rest, head) labels = Slice(shifted, start, stop) }"""
    bad = model.replace("[8]", "[4]")
    plan = ports({"tokens": {"0": "cp"}}, {"labels": {"0": "cp"}}, cp=2)
    cut = {"start": lambda r: ints(4 * r), "stop": lambda r: ints(4 * r + 4)}
    return Bug((model, small), each(good, **small, **cut), each(bad, **small), "rest", plan)


@bug
def scales_of_other_blocks() -> Bug:
    """A row-parallel weight in blocks is cut, its scales are not cut alike: each rank takes those
    of the first blocks. https://github.com/vllm-project/vllm-omni/pull/5761"""
    w = weights(scale=(4, 1, 6))
    w["code"] = np.random.default_rng(1).integers(-8, 8, (4, 2, 6)).astype(np.int8)
    model = """g (float[3,8] x) => (float[3,6] y) {
        f = Cast<to=1>(code) s = Mul(f, scale) w = Reshape(s, shape) y = MatMul(x, w) }"""
    rank = """g (float[3,4] x) => (float[3,6] y) {
        f = Cast<to=1>(code) s = Mul(f, scale) w = Reshape(s, shape) p = MatMul(x, w)
        y = AllReduce(p) }"""
    cut = {"code": rows(w["code"]), "shape": ints(4, 6)}
    good = each(rank, **cut, scale=rows(w["scale"]))
    bad = each(rank, **cut, scale=w["scale"][:2])
    return Bug((model, w | {"shape": ints(8, 6)}), good, bad, "y", ports({"x": {"1": "tp"}}))


@bug
def local_indices_of_experts() -> Bug:
    """Ranks look up global numbers of experts in their local tables: only rank 0 is right.
    https://github.com/vllm-project/vllm-gaudi/pull/1796"""
    w = weights(table=(8, 16))
    model = "g (int64[5] ids) => (float[5,16] y) { y = Gather(table, ids) }"
    rank = """g (int64[5] ids) => (float[5,16] y) {
        local = Sub(ids, start) low = GreaterOrEqual(local, zero) high = Less(local, four)
        in = And(low, high) safe = Where(in, local, zero) rows = Gather(table, safe)
        mask = Unsqueeze(in, one) own = Where(mask, rows, none) y = AllReduce(own) }"""
    small = {"zero": ints(0), "four": ints(4), "one": ints(1), "none": np.float32(0)}
    small = {n: v if n == "one" else v.reshape(()) for n, v in small.items()}
    good = each(rank, table=rows(w["table"]), start=lambda r: np.array(4 * r), **small)
    bad = each(rank, table=rows(w["table"]), start=np.array(0), **small)
    return Bug((model, w), good, bad, "y", TP | {"ranges": {"ids": [0, 8]}})


def page() -> str:
    """The table of docs/reference/verification.md; `python tests/equivalence/published.py` prints
    it."""
    lines = ["| bug | published | the proof ends at |", "|---|---|---|"]
    for make in BUGS.values():
        text, _, links = " ".join((make.__doc__ or "").split()).partition(" https://")
        urls = [f"https://{link.strip(' ,')}" for link in links.split("https://")]
        named = ", ".join(f"[{'/'.join(u.split('/')[3:5])}#{u.split('/')[-1]}]({u})" for u in urls)
        lines.append(f"| {text} | {named} | `{make().tensor}` |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(page())
