"""Gradients of If, Loop and Scan against central differences, and against what is unrolled."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from gradient_programs import Program, random

from onnxpar.base.errors import ModelError

YES, NO = np.array(True), np.array(False)


def turns(count: int) -> np.ndarray:
    return np.array(count, np.int64)


def ops(model: onnx.ModelProto, kind: str) -> list[list[str]]:
    """The ops in the bodies of nodes of a kind."""
    return [
        [inner.op_type for a in node.attribute if a.HasField("g") for inner in a.g.node]
        for node in model.graph.node
        if node.op_type == kind
    ]


BRANCHES = """
g (bool c, double[2,3] x, double[3,2] w, double[2] b) => (double[2,2] y, double[2,3] z) {
    h = Tanh (x)
    y, z = If (c) <
        then_branch = yes () => (double[2,2] a, double[2,3] k) {
            p = MatMul (h, w)
            s = Sigmoid (p)
            a = Add (s, b)
            k = Mul (h, x)
        },
        else_branch = no () => (double[2,2] d, double[2,3] e) {
            u = MatMul (h, w)
            d = Mul (u, u)
            e = Identity (x)
        }>
}"""


def test_branches(tmp_path: Path) -> None:
    """The bias is read in one of them only."""
    program = Program(tmp_path, BRANCHES)
    feeds = {"x": random(2, 3), "w": random(3, 2), "b": random(2)}
    assert program.check(c=YES, **feeds)["b"].any()
    assert not program.check(c=NO, **feeds)["b"].any()
    assert ["Add"] not in ops(program.model, "If")[1], "what the gradient does not read"


def test_a_branch_that_only_hands_on(tmp_path: Path) -> None:
    text = """
    g (bool c, double[3] x, double[3] z) => (double[3] y, double[3] k) {
        y, k = If (c) <
            then_branch = yes () => (double[3] a, double[3] q) {
                a = Identity (x) q = Identity (x)
            },
            else_branch = no () => (double[3] b, double[3] r) {
                b = Constant <value = double[3] {1.0, 2.0, 3.0}> () r = Neg (x)
            }>
    }"""
    program = Program(tmp_path, text)
    program.check(c=YES, x=random(3), z=random(3))
    program.check(c=NO, x=random(3), z=random(3))


RECURRENT = """
g (double[4] h0, double[3,4] xs, double[4,4] w, double[4] b) => (double[4] h, double[3,4] ys) {
    h, ys = Scan <num_scan_inputs = 1, body = step (double[4] s, double[4] x)
        => (double[4] n, double[4] y) {
            p = MatMul (s, w)
            q = Add (p, x)
            r = Add (q, b)
            n = Tanh (r)
            y = Mul (n, s)
        }> (h0, xs)
}"""


def test_scan(tmp_path: Path) -> None:
    program = Program(tmp_path, RECURRENT)
    program.check(h0=random(4), xs=random(3, 4), w=random(4, 4), b=random(4, seed=1))


def test_scan_is_what_is_unrolled(tmp_path: Path) -> None:
    steps = "".join(
        f"""
        i{t} = Constant <value = int64 {{{t}}}> ()
        x{t} = Gather (xs, i{t})
        p{t} = MatMul (h{t}, w)
        q{t} = Add (p{t}, x{t})
        r{t} = Add (q{t}, b)
        h{t + 1} = Tanh (r{t})
        v{t} = Mul (h{t + 1}, h{t})
        y{t} = Unsqueeze (v{t}, zero)"""
        for t in range(3)
    )
    text = f"""
    g (double[4] h0, double[3,4] xs, double[4,4] w, double[4] b) => (double[4] h, double[3,4] ys) {{
        zero = Constant <value = int64[1] {{0}}> ()
        {steps}
        h = Identity (h3)
        ys = Concat <axis = 0> (y0, y1, y2)
    }}"""
    feeds = {"h0": random(4), "xs": random(3, 4), "w": random(4, 4), "b": random(4, seed=1)}
    (tmp_path / "unrolled").mkdir()
    found = Program(tmp_path, RECURRENT).run(**feeds)
    for name, value in Program(tmp_path / "unrolled", text).run(**feeds).items():
        np.testing.assert_allclose(found[name], value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("turned", range(16))
def test_axes_and_directions_of_a_scan(tmp_path: Path, turned: int) -> None:
    bits = [turned >> i & 1 for i in range(4)]
    text = f"""
    g (double[3] s0, double[5,3] a, double[3,2,5] b)
        => (double[3] s, double[3,5] u, double[2,5,3] v) {{
        s, u, v = Scan <num_scan_inputs = 2, scan_input_axes = [-2, 2],
            scan_input_directions = [{bits[0]}, {bits[1]}], scan_output_axes = [1, -2],
            scan_output_directions = [{bits[2]}, {bits[3]}],
            body = step (double[3] c, double[3] x, double[3,2] y)
            => (double[3] d, double[3] e, double[2,3] f) {{
                m = Mul (c, x)
                d = Sin (m)
                e = Add (d, x)
                t = Transpose (y)
                f = Mul (t, d)
            }}> (s0, a, b)
    }}"""
    program = Program(tmp_path, text)
    program.check(s0=random(3), a=random(5, 3), b=random(3, 2, 5))


def test_a_linear_scan_hands_out_nothing(tmp_path: Path) -> None:
    """Nor does a step of its gradient compute the step anew; one that hands on nothing has no
    gradient by what it starts from."""
    text = """
    g (double[3] h0, double[3] k0, double[4,3] xs) => (double[3] h, double[3] k) {
        h, k = Scan <num_scan_inputs = 1, body = step (double[3] s, double[3] t, double[3] x)
            => (double[3] n, double[3] m) {
                e = Exp (x)
                n = Add (s, x)
                m = Identity (e)
            }> (h0, k0, xs)
    }"""
    program = Program(tmp_path, text)
    assert not program.check(h0=random(3), k0=random(3), xs=random(4, 3))["k0"].any()
    assert len(program.model.graph.node[0].output) == 2


BATCHED = """
g (double[2,3] h0, double[2,4,3] xs, double[3,3] w, double[3,3] u, double[3] b, double[3,3] k)
    => (double[2,3] h) {
    h = Scan <num_scan_inputs = 1, scan_input_axes = [1], scan_input_directions = [TURNED],
        body = step (double[2,3] s, double[2,3] x) => (double[2,3] n) {
            p = MatMul (s, w)
            q = Gemm <transA = 1, transB = 1> (u, x)
            r = Transpose <perm = [1, 0]> (q)
            t = Add (p, r)
            o = Add (t, b)
            a = MatMul (o, w)
            y = Gemm <transB = 1> (a, k)
            n = Tanh (y)
        }> (h0, xs)
}"""
FED = {"w": random(3, 3), "u": random(3, 3, seed=1), "k": random(3, 3, seed=2), "b": random(3)}


@pytest.mark.parametrize("turned", "01")
def test_gradients_of_weights_are_products_behind_the_steps(tmp_path: Path, turned: str) -> None:
    """One of them is read twice. What a step reads is not handed out again."""
    program = Program(tmp_path, BATCHED.replace("TURNED", turned))
    program.check(h0=random(2, 3), xs=random(2, 4, 3), **FED)
    gradient = [n for n in program.model.graph.node if n.op_type == "Scan"][1]
    attributes = {a.name: a for a in gradient.attribute}
    states = len(gradient.input) - attributes["num_scan_inputs"].i
    assert states == 1, "no weight's gradient is carried from step to step"


def test_products_behind_a_loop(tmp_path: Path) -> None:
    """Of matrices that the turns differ in; what is alike in all of them is none."""
    text = """
    g (double[2,3] h0, double[3,3] w, double[2,3] x, double[3] b, double[3] d) => (double[2,3] h) {
        n = Constant <value = int64 {4}> ()
        go = Constant <value = bool {1}> ()
        h = Loop (n, go, h0) <body = turn (int64 i, bool c, double[2,3] s)
            => (bool more, double[2,3] r) {
                more = Identity (c)
                p = MatMul (s, w)
                q = MatMul (x, w)
                e = Transpose (w)
                f = MatMul (p, e)
                o = Add (f, q)
                t = Add (o, b)
                u = Mul (t, d)
                r = Sin (u)
            }>
    }"""
    feeds = {"h0": random(2, 3), "x": random(2, 3, seed=4), "d": random(3, seed=5) / 4}
    Program(tmp_path, text).check(w=FED["w"], b=FED["b"], **feeds)


LOOP = """
g (int64 n, bool go, double[3] h0, double[3,3] w, double limit) => (double[3] h, int64 count) {
    zero = Constant <value = int64 {0}> ()
    h, count = Loop (n, go, h0, zero) <body = turn (int64 i, bool c, double[3] s, int64 k)
        => (bool more, double[3] r, int64 j) {
            p = MatMul (s, w)
            t = Tanh (p)
            f = Cast <to = 11> (i)
            q = Add (f, limit)
            l = Cast <to = 11> (k)
            g = Add (q, l)
            r = Mul (t, g)
            a = ReduceMax <keepdims = 0> (r)
            more = Less (a, limit)
            one = Constant <value = int64 {1}> ()
            j = Add (k, one)
        }>
}"""


@pytest.mark.parametrize("count", [0, 1, 4])
def test_a_loop_that_may_stop_early(tmp_path: Path, count: int) -> None:
    """What it starts from, its number, and what it counts take part."""
    program = Program(tmp_path, LOOP)
    feeds = {"h0": random(3), "w": random(3, 3), "n": turns(count)}
    program.check(go=YES, limit=np.array(100.0), **feeds)
    program.check(go=YES, limit=np.array(0.6), **feeds)
    found = program.check(go=NO, limit=np.array(0.6), **feeds)
    assert not found["w"].any() and found["h0"].any()


def test_a_loop_by_condition_alone(tmp_path: Path) -> None:
    text = """
    g (double[2] x) => (double[2] y) {
        go = Constant <value = bool {1}> ()
        y = Loop (, go, x) <body = turn (int64 i, bool c, double[2] s) => (bool more, double[2] r) {
            two = Constant <value = double {2.0}> ()
            big = Constant <value = double {50.0}> ()
            r = Pow (s, two)
            a = ReduceMax <keepdims = 0> (r)
            more = Less (a, big)
        }>
    }"""
    Program(tmp_path, text).check(x=np.array([1.4, 0.3]))


def test_what_the_turns_of_a_loop_hand_out(tmp_path: Path) -> None:
    """With a number of turns that is known, so that shapes are; only some have gradients."""
    text = """
    g (double[3] h0, double[3,2] w, double[2] u)
        => (double[4,3] ys, double[4,2] zs, int64[4] numbers) {
        n = Constant <value = int64 {4}> ()
        go = Constant <value = bool {1}> ()
        h, ys, zs, numbers = Loop (n, go, h0) <body = turn (int64 i, bool c, double[3] s)
            => (bool more, double[3] r, double[3] y, double[2] z, int64 j) {
                more = Identity (c)
                q = Sin (s)
                y = Mul (q, s)
                p = MatMul (q, w)
                z = Mul (p, u)
                r = Add (q, s)
                j = Identity (i)
            }>
    }"""
    Program(tmp_path, text).check(h0=random(3), w=random(3, 2), u=random(2))


def test_a_loop_without_carried_values(tmp_path: Path) -> None:
    text = """
    g (double[3] x) => (double[2,3] y) {
        n = Constant <value = int64 {2}> ()
        go = Constant <value = bool {1}> ()
        y = Loop (n, go) <body = turn (int64 i, bool c) => (bool more, double[3] r) {
            f = Cast <to = 11> (i)
            one = Constant <value = double {1.0}> ()
            g = Add (f, one)
            q = Mul (x, g)
            r = Mul (q, x)
            more = Identity (c)
        }>
    }"""
    Program(tmp_path, text).check(x=random(3))


def test_bodies_within_bodies(tmp_path: Path) -> None:
    """A Loop with a Scan and an If within, which read what is around them at every depth."""
    text = """
    g (int64 n, double[3] h0, double[2,3] xs, double[3,3] w, double[3] u) => (double[3] h) {
        go = Constant <value = bool {1}> ()
        v = Exp (u)
        h = Loop (n, go, h0) <body = turn (int64 i, bool c, double[3] s)
            => (bool more, double[3] r) {
                more = Identity (c)
                a = Sin (s)
                b, bs = Scan <num_scan_inputs = 1, body = step (double[3] d, double[3] x)
                    => (double[3] e, double[3] es) {
                        j = MatMul (d, w)
                        k = Mul (x, a)
                        l = Add (j, k)
                        e = Tanh (l)
                        es = Mul (e, v)
                    }> (s, xs)
                total = ReduceSum <keepdims = 0> (b)
                zero = Constant <value = double {0.0}> ()
                up = Less (zero, total)
                r = If (up) <
                    then_branch = yes () => (double[3] ya) {
                        axis = Constant <value = int64[1] {0}> ()
                        yb = ReduceSum <keepdims = 0> (bs, axis)
                        yc = Mul (yb, v)
                        ya = Add (yc, s)
                    },
                    else_branch = no () => (double[3] na) {
                        two = Constant <value = int64 {2}> ()
                        yes = Constant <value = bool {1}> ()
                        na = Loop (two, yes, b) <body = inner (int64 m, bool o, double[3] p)
                            => (bool on, double[3] q) {
                                on = Identity (o)
                                qa = Mul (p, v)
                                q = Add (qa, a)
                            }>
                    }>
            }>
    }"""
    program = Program(tmp_path, text)
    taken = set()
    for seed in range(4):
        feeds = {"h0": random(3, seed=seed), "xs": random(2, 3), "w": random(3, 3)}
        found = program.check(n=turns(3), u=random(3, seed=seed) / 4, **feeds)
        taken.add(bool(found["xs"].any()))
    program.check(n=turns(0), u=random(3), **feeds)


def test_a_loop_of_which_one_result_alone_is_read(tmp_path: Path) -> None:
    """The other carried value takes part all the same."""
    text = """
    g (int64 n, double[3] a0, double[3] b0) => (double[3] y) {
        go = Constant <value = bool {1}> ()
        a, b, c = Loop (n, go, a0, b0, a0) <
            body = turn (int64 i, bool on, double[3] s, double[3] t, double[3] u)
            => (bool more, double[3] p, double[3] q, double[3] r) {
                more = Identity (on)
                p = Mul (s, t)
                q = Sin (s)
                r = Exp (u)
            }>
        y = Neg (a)
    }"""
    Program(tmp_path, text).check(n=turns(3), a0=random(3), b0=random(3))


DROPPING = """
g (bool c, float[3] s0, float[4,3] xs, float[3] k) => (float[3] s, float[4,3] ys, float[3] z) {{
    s, ys = Scan <num_scan_inputs = 1, body = step (float[3] t, float[3] x)
        => (float[3] u, float[3] y) {{
            r = Constant <value = float {{0.25}}> ()
            yes = Constant <value = bool {{1}}> ()
            y = Dropout{seed} (x, r, yes)
            n = RandomNormalLike (t)
            p = Mul (x, n)
            u = Add (t, p)
        }}> (s0, xs)
    z = If (c) <
        then_branch = a () => (float[3] f) {{ f = Neg (k) }},
        else_branch = b () => (float[3] e) {{
            on = Constant <value = bool {{1}}> ()
            half = Constant <value = float {{0.5}}> ()
            e, mask = Dropout (k, half, on)
        }}>
}}"""


@pytest.mark.parametrize("seed", ["", " <seed = 3>"])
def test_what_is_drawn_is_not_drawn_again(tmp_path: Path, seed: str) -> None:
    """Every result is linear in what was drawn: x by a factor, of which the run tells."""
    program = Program(tmp_path, DROPPING.format(seed=seed))
    fed = {
        "c": NO,
        "s0": np.zeros(3, np.float32),
        "xs": np.tile(random(3).astype(np.float32), (4, 1)),
        "k": random(3).astype(np.float32),
    }
    seeds = {
        "seed.s": np.ones(3, np.float32),
        "seed.ys": random(4, 3).astype(np.float32),
        "seed.z": random(3).astype(np.float32),
    }
    names = [o.name for o in program.session.get_outputs()]
    zeros = 0
    for _ in range(3):
        found = dict(zip(names, program.session.run(None, fed | seeds), strict=True))
        mask = found["ys"] / fed["xs"]
        zeros += int((mask == 0).sum())
        drawn = found["grad.xs"] - seeds["seed.ys"] * mask
        np.testing.assert_allclose((drawn * fed["xs"]).sum(axis=0), found["s"], atol=1e-4)
        np.testing.assert_allclose(
            found["grad.k"], seeds["seed.z"] * found["z"] / fed["k"], rtol=1e-5
        )
    assert 0 < zeros < 3 * mask.size
    found = dict(zip(names, program.session.run(None, fed | seeds | {"c": YES}), strict=True))
    np.testing.assert_array_equal(found["grad.k"], -seeds["seed.z"])


def test_a_dropout_that_is_told_not_to(tmp_path: Path) -> None:
    text = """
    g (bool training, double[3] s0, double[4,3] xs) => (double[3] s) {
        r = Constant <value = double {0.25}> ()
        s = Scan <num_scan_inputs = 1, body = step (double[3] t, double[3] x) => (double[3] u) {
            y = Dropout (x, r, training)
            u = Mul (t, y)
        }> (s0, xs)
    }"""
    Program(tmp_path, text).check(training=NO, s0=random(3), xs=random(4, 3))


GROWING = """
g (int64 n, double[A] x, double[2] w) => (double[2] y) {
    go = Constant <value = bool {1}> ()
    axis = Constant <value = int64[1] {0}> ()
    s, y = Loop (n, go, x, w) <body = turn (int64 i, bool c, double[A] s, double[2] t)
        => (bool more, double[B] r, double[2] u) {
            more = Identity (c)
            r = Concat <axis = 0> (s, x)
            a = ReduceSum (s, axis)
            u = Mul (t, a)
        }>
}""".replace("[A]", "[2]")


def test_a_carried_value_that_grows(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"Loop .*: the carried value 's.*' changes its shape"):
        Program(tmp_path, GROWING)


def test_random_numbers_two_bodies_deep(tmp_path: Path) -> None:
    text = """
    g (int64 n, bool c, double[2] x) => (double[2] y) {
        go = Constant <value = bool {1}> ()
        y = Loop (n, go, x) <body = turn (int64 i, bool d, double[2] s)
            => (bool more, double[2] r) {
                more = Identity (d)
                r = If (c) <
                    then_branch = a () => (double[2] p) { q = RandomNormalLike (s) p = Mul (q, s) },
                    else_branch = b () => (double[2] t) { t = Identity (s) }>
            }>
    }"""
    with pytest.raises(
        ModelError, match=r"RandomNormalLike .*draws random numbers in a body nested"
    ):
        Program(tmp_path, text)
