"""Writes updates.json: parameters after five steps of PyTorch 2.13's optimizers (run by hand, with
onnxpar and tests/ on the path)."""

import inspect
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import numpy_helper
from small_models import HEAD, write_text
from torch.optim import Optimizer

TEXT = """mlp (double[8,6] x, double[6,9] w1, double[9] w2, double[9,5] w3, double[5] w4)
=> (double[8,5] y) { h = Gemm(x, w1, w2)  r = Relu(h)  y = Gemm(r, w3, w4) }"""
STEPS = 5
RATE = 0.01
Named = dict[str, torch.Tensor]
Case = tuple[dict[str, Any], Callable[[Named], list[Optimizer]]]


def plain(kind: type[Optimizer], **options: Any) -> Callable[[Named], list[Optimizer]]:
    return lambda p: [kind(list(p.values()), lr=RATE, **options)]  # type: ignore[call-arg]


def grouped(
    kind: type[Optimizer], *groups: tuple[str, dict[str, Any]], **options: Any
) -> Callable[[Named], list[Optimizer]]:
    """Groups of parameters by their names, separated by spaces."""

    def make(p: Named) -> list[Optimizer]:
        each = [{"params": [p[n] for n in names.split()], **own} for names, own in groups]
        return [kind(each, lr=RATE, **options)]  # type: ignore[call-arg]

    return make


def muon(**options: Any) -> Callable[[Named], list[Optimizer]]:
    """Muon of the matrices in float64, where PyTorch rounds to bfloat16, and AdamW of the rest."""

    def make(p: Named) -> list[Optimizer]:
        return [
            torch.optim.Muon([p["w1"], p["w3"]], lr=RATE, **options),
            torch.optim.AdamW([p["w2"], p["w4"]], lr=RATE, weight_decay=0),
        ]

    return make


def in_float64() -> None:
    """Makes Muon's iteration run in float64."""
    module = torch.optim._muon
    source = inspect.getsource(module._zeropower_via_newtonschulz)
    exec(source.replace(".bfloat16()", ".double().clone()"), module.__dict__)


NONE = ("w2 w4", {"weight_decay": 0})
CASES: dict[str, Case] = {
    "sgd decays no biases": (
        {"optimizer": "sgd", "weight_decay": 0.3},
        grouped(torch.optim.SGD, ("w1 w3", {"weight_decay": 0.3}), NONE),
    ),
    "adam decays no biases": (
        {"optimizer": "adam", "weight_decay": 0.3},
        grouped(torch.optim.Adam, ("w1 w3", {"weight_decay": 0.3}), NONE),
    ),
    "adamw decays no biases": (
        {"optimizer": "adamw", "weight_decay": 0.3},
        grouped(torch.optim.AdamW, ("w1 w3", {"weight_decay": 0.3}), NONE),
    ),
    "adamw decays all": (
        {"optimizer": "adamw", "weight_decay": 0.3, "decay_all": True},
        plain(torch.optim.AdamW, weight_decay=0.3),
    ),
    "groups": (
        {
            "optimizer": "adamw",
            "weight_decay": 0.3,
            "group": ["w*:lr_scale=9", "w[12]:lr_scale=0.5", "w4:weight_decay=0.1,beta1=0.5"],
        },
        grouped(
            torch.optim.AdamW,
            ("w1", {"lr": RATE / 2, "weight_decay": 0.3}),
            ("w2", {"lr": RATE / 2, "weight_decay": 0}),
            ("w3", {"lr": RATE * 9, "weight_decay": 0.3}),
            ("w4", {"weight_decay": 0.1, "betas": (0.5, 0.999)}),
        ),
    ),
    "a group of another optimizer": (
        {
            "optimizer": "adamw",
            "group": ["w[34]:optimizer=momentum,momentum=0.8,nesterov=true,weight_decay=0.1"],
        },
        lambda p: [
            torch.optim.AdamW([p["w1"]], lr=RATE),
            torch.optim.AdamW([p["w2"]], lr=RATE, weight_decay=0),
            torch.optim.SGD(
                [p["w3"], p["w4"]], RATE, momentum=0.8, nesterov=True, weight_decay=0.1
            ),
        ],
    ),
    "adam with amsgrad": (
        {"optimizer": "adam", "amsgrad": True, "beta2": 0.5},
        plain(torch.optim.Adam, amsgrad=True, betas=(0.9, 0.5)),
    ),
    "adamw with amsgrad": (
        {"optimizer": "adamw", "amsgrad": True, "beta2": 0.5, "decay_all": True},
        plain(torch.optim.AdamW, amsgrad=True, betas=(0.9, 0.5)),
    ),
    "rmsprop": ({"optimizer": "rmsprop"}, plain(torch.optim.RMSprop)),
    "rmsprop with all": (
        {
            **{"optimizer": "rmsprop", "alpha": 0.8, "momentum": 0.7, "centered": True},
            **{"weight_decay": 0.1, "epsilon": 0.01, "decay_all": True},
        },
        plain(
            torch.optim.RMSprop, alpha=0.8, momentum=0.7, centered=True, weight_decay=0.1, eps=0.01
        ),
    ),
    "nadam": (
        {"optimizer": "nadam", "weight_decay": 0.1, "momentum_decay": 0.02},
        grouped(torch.optim.NAdam, ("w1 w3", {"weight_decay": 0.1}), NONE, momentum_decay=0.02),
    ),
    "adafactor": ({"optimizer": "adafactor"}, plain(torch.optim.Adafactor)),
    "adafactor with all": (
        {
            **{"optimizer": "adafactor", "weight_decay": 0.1, "beta2_decay": -0.5},
            **{"epsilon": 2.0, "clip_threshold": 1.5},
        },
        grouped(
            torch.optim.Adafactor,
            ("w1 w3", {"weight_decay": 0.1}),
            NONE,
            beta2_decay=-0.5,
            eps=(None, 2.0),
            d=1.5,
        ),
    ),
    "muon": ({"optimizer": "muon"}, muon()),
    "muon with all": (
        {
            **{"optimizer": "muon", "weight_decay": 0.3, "momentum": 0.8},
            **{"match_rms_adamw": True, "group": ["w*:nesterov=false"]},
        },
        muon(weight_decay=0.3, momentum=0.8, nesterov=False, adjust_lr_fn="match_rms_adamw"),
    ),
}


def batches() -> Iterator[dict[str, np.ndarray]]:
    draw = np.random.default_rng(11)
    for _ in range(STEPS):
        yield {"x": draw.standard_normal((8, 6)), "target": draw.standard_normal((8, 5))}


def start() -> dict[str, np.ndarray]:
    """The weights that `write_text` draws."""
    with tempfile.TemporaryDirectory() as folder:
        model = onnx.load(write_text(HEAD + TEXT, Path(folder) / "model.onnx"))
    return {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}


def trained(make: Callable[[Named], list[Optimizer]]) -> dict[str, list[Any]]:
    p = {n: torch.tensor(a, requires_grad=True) for n, a in start().items()}
    optimizers = make(p)
    for batch in batches():
        x, target = (torch.tensor(batch[n]) for n in ("x", "target"))
        y = torch.relu(x @ p["w1"] + p["w2"]) @ p["w3"] + p["w4"]
        for optimizer in optimizers:
            optimizer.zero_grad()
        torch.nn.functional.mse_loss(y, target).backward()
        for optimizer in optimizers:
            optimizer.step()
    return {n: t.detach().numpy().round(12).tolist() for n, t in p.items()}


def main() -> None:
    torch.set_default_dtype(torch.float64)
    in_float64()
    cases = {name: {"how": how, "after": trained(make)} for name, (how, make) in CASES.items()}
    Path(__file__).with_name("updates.json").write_text(json.dumps(cases) + "\n")


if __name__ == "__main__":
    main()
