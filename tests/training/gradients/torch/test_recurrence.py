"""Gradients of recurrent networks as PyTorch's."""

import numpy as np
import pytest

from onnxpar.testing.case import Case

torch = pytest.importorskip("torch")

STEPS, BATCH, INPUT, HIDDEN = 5, 3, 2, 4
ORDER = {"LSTM": [0, 3, 1, 2], "GRU": [1, 0, 2], "RNN": [0]}
"""Where the standard's gates stand among PyTorch's."""


def operands(op, network):
    """The weights of a network in the standard's form, for gradients to flow back from."""
    ways = ["", "_reverse"] if network.bidirectional else [""]

    def ordered(weight):
        gates = weight.chunk(len(ORDER[op]))
        return torch.cat([gates[i] for i in ORDER[op]])

    def stacked(*names):
        return torch.stack(
            [torch.cat([ordered(getattr(network, f"{n}_l0{way}")) for n in names]) for way in ways]
        )

    return stacked("weight_ih"), stacked("weight_hh"), stacked("bias_ih", "bias_hh")


@pytest.mark.parametrize("op", ORDER)
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("lengths", [None, (5, 2, 3)])
def test_gradient(agree, op, bidirectional, lengths):
    torch.manual_seed(0)
    make = getattr(torch.nn, op)
    network = make(INPUT, HIDDEN, bidirectional=bidirectional, dtype=torch.float64)
    ways = 2 if bidirectional else 1
    rng = np.random.default_rng(4)
    weights = [w.detach().numpy() for w in operands(op, network)]
    states = [rng.standard_normal((ways, BATCH, HIDDEN)) for _ in range(2 if op == "LSTM" else 1)]
    x = rng.standard_normal((STEPS, BATCH, INPUT))
    given = None if lengths is None else np.array(lengths, np.int32)
    attrs = {"hidden_size": HIDDEN, "direction": "bidirectional" if ways == 2 else "forward"}
    attrs |= {"linear_before_reset": 1} if op == "GRU" else {}
    case = Case(op, [x, *weights, given, *states], attrs, outputs=1 + len(states), fed=range(8))

    def forward(x, w, r, b, *states):
        values = _parameters(op, network, w, r, b)
        state = states if op == "LSTM" else states[0]
        if lengths is not None:
            x = torch.nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
        y, ends = torch.func.functional_call(network, values, (x, state))
        if lengths is not None:
            y, _ = torch.nn.utils.rnn.pad_packed_sequence(y)
        y = y.reshape(STEPS, BATCH, ways, HIDDEN).transpose(1, 2)
        return y, *(ends if op == "LSTM" else (ends,))

    wrt = [0, 1, 2, 3, *range(5, 5 + len(states))]
    agree(case, forward, wrt, results=1 + len(states))


def _parameters(op, network, w, r, b):
    """A network's parameters made of operands of the standard's node."""
    back = np.argsort(ORDER[op])
    values = {}
    for i, way in enumerate(["", "_reverse"] if network.bidirectional else [""]):
        halves = b[i].chunk(2)
        for name, value in [("weight_ih", w[i]), ("weight_hh", r[i])] + [
            (f"bias_{k}", half) for k, half in zip(("ih", "hh"), halves, strict=True)
        ]:
            gates = value.chunk(len(back))
            values[f"{name}_l0{way}"] = torch.cat([gates[g] for g in back])
    return values
