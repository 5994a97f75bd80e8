"""Gradients of recurrent networks.

They are compared with central differences in float64 of the standard's equations in NumPy, which in
turn are compared with onnxruntime's kernels. In float64, of which it has no kernels, the gradient
graph is fed what they would give.
"""

from dataclasses import dataclass, field

import numpy as np
import onnx_graphsurgeon as gs
import pytest
from numpy import exp, tanh

from onnxpar.testing.gradient_proof import Program
from onnxpar.training.gradients.reverse import gradients
from onnxpar.training.gradients.value import Builder

STEPS, BATCH, INPUT, HIDDEN = 4, 3, 2, 3
GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
DEFAULT = {"RNN": ["Tanh"], "GRU": ["Sigmoid", "Tanh"], "LSTM": ["Sigmoid", "Tanh", "Tanh"]}
NAMES = ["X", "W", "R", "B", "sequence_lens", "initial_h", "initial_c", "P"]


def _elu(x, alpha):
    return np.where(x > 0, x, alpha * (exp(np.minimum(x, 0)) - 1))


ACTIVATIONS = {
    "Tanh": lambda x: tanh(x),
    "Sigmoid": lambda x: 1 / (1 + exp(-x)),
    "Relu": lambda x: np.maximum(x, 0),
    "LeakyRelu": lambda x, a=0.01: np.where(x > 0, x, a * x),
    "ThresholdedRelu": lambda x, a=0.0: np.where(x > a, x, 0),
    "Elu": lambda x, a=1.0: _elu(x, a),
    "Softsign": lambda x: x / (1 + np.abs(x)),
    "Softplus": lambda x: np.log1p(exp(x)),
    "HardSigmoid": lambda x, a=0.2, b=0.5: np.clip(a * x + b, 0, 1),
    "Affine": lambda x, a, b: a * x + b,
    "ScaledTanh": lambda x, a, b: a * tanh(b * x),
}
SLOPES = {"LeakyRelu": 1, "ThresholdedRelu": 1, "Elu": 1, "HardSigmoid": 2, "Affine": 2}
SLOPES["ScaledTanh"] = 2


@dataclass
class Network:
    """A recurrent node with random operands; those in `without` are left out."""

    op: str
    attrs: dict = field(default_factory=dict)
    without: str = "sequence_lens P"
    lengths: tuple = (2, 4, 1)
    constant_lengths: bool = False
    results: tuple = (0, 1, 2)
    scale: float = 1.0
    steps: int = STEPS

    @property
    def ways(self):
        return 2 if self.attrs.get("direction") == "bidirectional" else 1

    @property
    def names(self):
        return NAMES if self.op == "LSTM" else NAMES[:6]

    @property
    def layout(self):
        return self.attrs.get("layout", 0)

    def operands(self):
        rng, gates, ways = np.random.default_rng(7), GATES[self.op], self.ways
        shapes = {
            "X": (self.steps, BATCH, INPUT),
            "W": (ways, gates * HIDDEN, INPUT),
            "R": (ways, gates * HIDDEN, HIDDEN),
            "B": (ways, 2 * gates * HIDDEN),
            "initial_h": (ways, BATCH, HIDDEN),
            "initial_c": (ways, BATCH, HIDDEN),
            "P": (ways, 3 * HIDDEN),
        }
        if self.layout:
            for name in ("X", "initial_h", "initial_c"):
                shapes[name] = (shapes[name][1], shapes[name][0], shapes[name][2])
        values = {k: self.scale * rng.standard_normal(s) for k, s in shapes.items()}
        values["sequence_lens"] = np.array(self.lengths, np.int32)
        return {k: values[k] for k in self.names if k not in self.without.split()}

    def functions(self):
        """The activations of each direction, with slopes and clipping."""
        names = self.attrs.get("activations", DEFAULT[self.op] * self.ways)
        alphas = list(self.attrs.get("activation_alpha", []))
        betas = list(self.attrs.get("activation_beta", []))
        found = []
        for name in names:
            count = SLOPES.get(name, 0)
            slopes = [alphas.pop(0)] if count and alphas else []
            slopes += [betas.pop(0)] if count > 1 and betas else []
            is_last = self.op == "LSTM" and len(found) % 3 == 2  # it is not clipped, as it were
            clipped = (lambda x: x) if is_last else self.clipped
            found.append(lambda x, f=ACTIVATIONS[name], s=slopes, c=clipped: f(c(x), *s))
        each = len(DEFAULT[self.op])
        return [found[i : i + each] for i in range(0, len(found), each)]

    def clipped(self, x):
        bound = self.attrs.get("clip")
        return x if bound is None else np.clip(x, -bound, bound)

    def forward(self, operands):
        """Y, Y_h and Y_c by the standard's equations, as onnxruntime reads them."""
        swap = (lambda t: t.swapaxes(0, 1)) if self.layout else (lambda t: t)
        x = swap(operands["X"])
        lengths = operands.get("sequence_lens", [x.shape[0]] * x.shape[1])
        y = np.zeros((x.shape[0], self.ways, x.shape[1], HIDDEN), x.dtype)
        ends = np.zeros((2, self.ways, x.shape[1], HIDDEN), x.dtype)
        for way, functions in enumerate(self.functions()):
            own = {k: swap(v)[way] for k, v in operands.items() if k.startswith("initial")}
            own |= {k: operands[k][way] for k in ("W", "R", "B", "P") if k in operands}
            for b, length in enumerate(lengths):
                h, c = (own.get(f"initial_{s}", np.zeros((len(x[0]), HIDDEN)))[b] for s in "hc")
                order = range(length)
                backwards = way == 1 or self.attrs.get("direction") == "reverse"
                for t in reversed(order) if backwards else order:
                    h, c = self.cell(x[t, b], h, c, functions, own)
                    y[t, way, b] = h
                if length:
                    ends[:, way, b] = h, c
        if self.layout:
            y, ends = y.transpose(2, 0, 1, 3), ends.swapaxes(1, 2)
        return [y, *ends] if self.op == "LSTM" else [y, ends[0]]

    def cell(self, x, h, c, functions, own):
        gates = GATES[self.op]
        wb, rb = own.get("B", np.zeros(2 * gates * HIDDEN)).reshape(2, -1)
        wx = np.split(own["W"] @ x + wb, gates)
        r, rb = np.split(own["R"], gates), np.split(rb, gates)
        if self.op == "RNN":
            return functions[0](wx[0] + r[0] @ h + rb[0]), c
        if self.op == "GRU":
            f, g = functions
            z, reset = (f(wx[i] + r[i] @ h + rb[i]) for i in (0, 1))
            if self.attrs.get("linear_before_reset"):
                n = g(wx[2] + reset * (r[2] @ h + rb[2]))
            else:
                n = g(wx[2] + r[2] @ (reset * h) + rb[2])
            return (1 - z) * n + z * h, c
        f, g, show = functions
        pi, po, pf = np.split(own.get("P", np.zeros(3 * HIDDEN)), 3)
        zi, zo, zf, zc = (wx[i] + r[i] @ h + rb[i] for i in range(4))
        i = f(zi + pi * c)
        forget = 1 - i if self.attrs.get("input_forget") else f(zf + pf * c)
        c = forget * c + i * g(zc)
        return f(zo + po * c) * show(c), c

    def graph(self, dtype):
        """The node, and its results' gradients as inputs behind it."""
        operands = self.operands()
        whole = self.forward(operands)
        tensors = {n: self.tensor(n, v, dtype) for n, v in operands.items()}
        inputs = [tensors.get(n, gs.Variable.empty()) for n in self.names]
        outputs = [
            gs.Variable(f"y{i}", dtype, t.shape) if i in self.results else gs.Variable.empty()
            for i, t in enumerate(whole)
        ]
        attrs = {"hidden_size": HIDDEN, **self.attrs}
        node = gs.Node(self.op, "node", attrs, inputs, outputs)
        given = [t for t in tensors.values() if isinstance(t, gs.Variable)]
        graph = gs.Graph([node], given, [], opset=20, ir_version=10)
        return graph, node, [t for t in outputs if t.name]

    def tensor(self, name, value, dtype):
        if name != "sequence_lens":
            return gs.Variable(name, dtype, value.shape)
        if self.constant_lengths:
            return gs.Constant(name, value)
        return gs.Variable(name, np.int32, value.shape)

    def seeds(self):
        rng = np.random.default_rng(3)
        seeds = [rng.standard_normal(t.shape) for t in self.forward(self.operands())]
        return {f"dy{i}": s for i, s in enumerate(seeds) if i in self.results}

    def gradients(self, dtype):
        """Those of the graph; in float64 given the node's results."""
        graph, node, outputs = self.graph(dtype)
        builder, seeds = Builder(graph, "seed"), {}
        for tensor in outputs:
            seed = gs.Variable(f"d{tensor.name}", dtype, tensor.shape)
            seeds[tensor.name] = builder.value(seed)
            graph.inputs.append(seed)
        wanted = [t for t in graph.inputs if t.name in NAMES and t.dtype == dtype]
        found = gradients(graph, seeds, wanted)
        graph.outputs = [found[t.name].tensor for t in wanted]
        feeds = {**self.operands(), **self.seeds()}
        if dtype is np.float64:
            results = zip(node.outputs, self.forward(self.operands()), strict=False)
            feeds |= {t.name: r for t, r in results if t.name}
            graph.inputs += [t for t in node.outputs if t.name]
            graph.nodes.remove(node)
            node.inputs.clear()
            node.outputs.clear()
        graph.inputs = [t for t in graph.inputs if t.outputs]
        feeds = {t.name: feeds[t.name].astype(t.dtype) for t in graph.inputs}
        made = Program(graph, reference=False).run(feeds)
        return {t.name: made[found[t.name].tensor.name] for t in wanted}

    def difference(self, name, direction, step=1e-5):
        """The central difference of the equations along a direction of an operand."""
        ends = []
        for signed in (step, -step):
            operands = self.operands()
            operands[name] = operands[name] + signed * direction
            results = self.forward(operands)
            ends.append(sum((results[int(k[2:])] * s).sum() for k, s in self.seeds().items()))
        return (ends[0] - ends[1]) / (2 * step)


NONE = "B sequence_lens initial_h initial_c P"
NETWORKS = [
    Network(op, attrs | extra, without)
    for op, extras in [
        ("RNN", [{}]),
        ("GRU", [{}, {"linear_before_reset": 1}]),
        ("LSTM", [{}, {"input_forget": 1}]),
    ]
    for extra in extras
    for attrs, without in [
        ({}, ""),
        ({"direction": "reverse"}, "sequence_lens P"),
        ({"direction": "reverse"}, "B initial_c"),
        ({"direction": "bidirectional"}, NONE),
        ({"direction": "bidirectional", "clip": 0.9}, ""),
    ]
]
SLOPED = {
    "activation_alpha": [0.3, 1.4, 0.2, 0.7, 0.25],
    "activation_beta": [0.6, 0.1, 0.4],
}
NETWORKS += [
    Network("RNN", {"activations": [name]} | slopes, "sequence_lens")
    for name in ACTIVATIONS
    for slopes in ({}, {"activation_alpha": [0.3], "activation_beta": [0.4]})
    if slopes or name not in ("Affine", "ScaledTanh")
]
NETWORKS += [
    Network("GRU", {"activations": ["HardSigmoid", "Elu"]} | SLOPED, ""),
    Network(
        "GRU",
        {"activations": ["Sigmoid", "Softsign", "HardSigmoid", "Affine"]}
        | {"direction": "bidirectional"}
        | SLOPED,
        "",
    ),
    Network("LSTM", {"activations": ["HardSigmoid", "ScaledTanh", "LeakyRelu"]} | SLOPED, ""),
    Network("LSTM", {"activations": ["Sigmoid", "Softsign", "Elu"], "clip": 0.7} | SLOPED, ""),
    Network("LSTM", {"activations": ["Softplus", "Tanh", "Relu"]}, "", scale=0.4),
    Network("GRU", {"activations": ["ThresholdedRelu", "Relu"]}, "", scale=0.3),
    Network("LSTM", {"activations": ["ThresholdedRelu", "Tanh", "Tanh"]}, "", scale=0.3),
    *(Network(op, lengths=(0, 4, 2), without="P") for op in GATES),
    *(Network(op, {"direction": "reverse"}, "P", (0, 3, 2)) for op in GATES),
    Network("LSTM", {"direction": "bidirectional"}, "", constant_lengths=True),
    *(Network(op, {"direction": "reverse"}, "P", (1, 0, 1), steps=1) for op in GATES),
    *(Network(op, results=(0,)) for op in GATES),
    *(Network(op, results=(1,)) for op in GATES),
    Network("LSTM", {"direction": "bidirectional"}, "", results=(2,)),
]
BATCH_FIRST = [
    Network(op, {"layout": 1, "direction": d}, without)
    for op in GATES
    for d in ("reverse", "bidirectional")
    for without in ("", NONE)
]


KERNELS_OF_FLOAT32 = {"HardSigmoid", "Elu", "Softsign", "Softplus", "LeakyRelu", "ThresholdedRelu"}


def name_of(network):
    return network.op


@pytest.mark.parametrize("network", NETWORKS, ids=name_of)
def test_equations_are_the_runtimes(network):
    graph, _, outputs = network.graph(np.float32)
    graph.outputs = outputs
    feeds = {t.name: network.operands()[t.name].astype(t.dtype) for t in graph.inputs}
    made = Program(graph, reference=False).run(feeds)
    whole = network.forward(network.operands())
    for i in network.results[: len(whole)]:
        np.testing.assert_allclose(made[f"y{i}"], whole[i], rtol=0, atol=1e-5, err_msg=f"y{i}")


@pytest.mark.matrix
@pytest.mark.parametrize("network", [*NETWORKS, *BATCH_FIRST], ids=name_of)
def test_in_double_precision(network):
    if KERNELS_OF_FLOAT32 & set(network.attrs.get("activations", ())):
        pytest.skip("onnxruntime has the activation for float32 alone")
    compare(network, network.gradients(np.float64), 1e-7)


@pytest.mark.matrix
@pytest.mark.parametrize("network", NETWORKS, ids=name_of)
def test_in_single_precision(network):
    compare(network, network.gradients(np.float32), 1e-5)


@pytest.mark.parametrize("op", GATES)
def test_in_half_precision(op):
    network = Network(op, {"direction": "bidirectional"}, "", scale=0.5)
    found, expected = network.gradients(np.float16), network.gradients(np.float64)
    for name, value in expected.items():
        assert found[name].dtype == np.float16
        np.testing.assert_allclose(found[name], value, rtol=0, atol=1e-2 * np.abs(value).max())


def compare(network, found, tolerance):
    """Compares gradients with differences along some directions."""
    rng = np.random.default_rng(1)
    for name, gradient in found.items():
        for _ in range(2):
            direction = rng.standard_normal(gradient.shape)
            expected = network.difference(name, direction)
            size = max(np.sqrt((gradient**2).sum() * (direction**2).sum()), 0.1)
            assert abs((gradient * direction).sum() - expected) < tolerance * size, name
