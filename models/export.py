"""Export models with torch's two ONNX exporters, and check each file against torch.

- `python models/export.py` writes every small model, next to this script;
- `python models/export.py gpt2 --exporter dynamo` writes one model by one exporter;
- `python models/export.py --list` tells which variants export, and keeps no file;
- `python models/export.py llama --full --out DIR --set num_hidden_layers=32` goes beyond.
"""

import argparse
import ast
import contextlib
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import torch
import transformers
from architectures import ARCHITECTURES
from cases import Architecture, Case, Config, Variant
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

SEED = 20
SIZES = {"batch": 4, "seq": 16, "target": 12, "past": 15}
OTHER_SIZES = {"batch": 3, "seq": 11, "target": 7, "past": 5}
TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2}
LEGACY_OPSET = 17  # older graph forms than those of opset 20, which both choose by default
BULKY_METADATA = (  # a quarter of a small file; the name scopes say it in less
    "namespace",
    "pkg.torch.onnx.class_hierarchy",
    "pkg.torch.onnx.fx_node",
    "pkg.torch.onnx.stack_trace",  # and this one names folders of the machine
)


class WrongExportError(Exception):
    """An exported file does not compute what torch computes."""


class Positional(nn.Module):
    """A case's network as the legacy exporter wants it: tensors in order in, a tuple out.

    Given the keywords themselves it would also trace every default of `forward` as an input.
    """

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.network = case.network
        self.case = case

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        inputs = dict(zip(self.case.inputs, tensors, strict=True))
        return tuple(self.network(**self.case.arrange(inputs)).values())


def build(model: Architecture, config: Config) -> Case:
    """Return the model's case with seeded weights, in evaluation mode."""
    case = model.build(**config)
    generator = torch.Generator().manual_seed(SEED)
    case.network.eval()
    set_weights(case.network, generator)
    set_statistics(case, generator)
    case.network.to(model.dtype)
    return case


def set_statistics(case: Case, generator: torch.Generator) -> None:
    """Let every batch-norm scale by what it sees in one batch: else a deep signal fades away."""

    def keep(norm: nn.BatchNorm2d, inputs: tuple[Tensor]) -> None:
        assert norm.running_mean is not None
        assert norm.running_var is not None
        # Over all channels together: a nearly dead one would be blown up, rounding errors and all.
        size = inputs[0].square().mean()
        norm.running_mean.normal_(0, 0.3, generator=generator).mul_(size.sqrt())
        norm.running_var.uniform_(0.5, 2, generator=generator).mul_(size)

    norms = [module for module in case.network.modules() if isinstance(module, nn.BatchNorm2d)]
    hooks = [norm.register_forward_pre_hook(keep) for norm in norms]
    run_torch(case, sample_inputs(case, SIZES))
    for hook in hooks:
        hook.remove()


def set_weights(network: nn.Module, generator: torch.Generator) -> None:
    """Draw every weight so that activations stay near 1 and no bias or norm is neutral."""
    for module in network.modules():
        for name, weight in module.named_parameters(recurse=False):
            mean, deviation = weight_distribution(module, name, weight)
            weight.data.normal_(mean, deviation, generator=generator)


def weight_distribution(module: nn.Module, name: str, weight: Tensor) -> tuple[float, float]:
    """Return the mean and the standard deviation to draw a weight with."""
    linear = isinstance(module, nn.Linear | nn.Conv2d | nn.ConvTranspose2d | Conv1D)
    if weight.ndim < 2:
        return (0, 0.5 if linear else 0.3) if "bias" in name else (1, 0.3)
    if isinstance(module, nn.Embedding):
        return 0, 2 * weight.shape[1] ** -0.5
    if isinstance(module, nn.ConvTranspose2d | Conv1D):
        return 0, weight.shape[0] ** -0.5
    return 0, (weight[0].numel() if linear else weight.shape[-1]) ** -0.5


def sample_inputs(case: Case, sizes: Mapping[str, int]) -> dict[str, Tensor]:
    """Return one batch of inputs by name, its floats in the network's precision."""
    generator = torch.Generator().manual_seed(SEED)
    dtype = next(case.network.parameters()).dtype
    batch = {name: spec.sample(sizes, generator) for name, spec in case.inputs.items()}
    return {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}


def run_torch(case: Case, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the network's outputs by its own names for them."""
    with torch.no_grad():
        return dict(case.network(**case.arrange(inputs)).items())


def export_dynamo(case: Case, path: Path, *, dynamic: bool, external_data: bool) -> None:
    """Write the case as torch.export sees it, with the names of the network's own weights."""
    inputs = sample_inputs(case, SIZES)
    dims = {name: torch.export.Dim(name) for name in SIZES}
    specs = {
        name: {axis: dims[symbol] for axis, symbol in spec.symbols().items()}
        for name, spec in case.inputs.items()
    }
    program = torch.onnx.export(
        case.network,
        kwargs=case.arrange(inputs),
        input_names=list(inputs),
        output_names=list(run_torch(case, inputs)),
        dynamic_shapes=case.arrange(specs) if dynamic else None,
        dynamo=True,
        verbose=False,
    )
    assert program is not None
    for node in program.model.graph.all_nodes():
        for key in BULKY_METADATA:
            node.metadata_props.pop(key, None)
    program.save(path, external_data=external_data)


@contextlib.contextmanager
def silent_stdout() -> Iterator[None]:
    """Send what C++ and Python print to stdout nowhere."""
    sys.stdout.flush()
    saved = os.dup(1)
    try:
        with Path(os.devnull).open("w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
        yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)


def export_legacy(case: Case, path: Path, *, dynamic: bool, external_data: bool) -> None:
    """Write the case as torch.jit traces it."""
    inputs = sample_inputs(case, SIZES)
    axes = {name: spec.symbols() for name, spec in case.inputs.items()}
    with silent_stdout():  # where it fails it prints the whole graph, whatever `verbose` says
        torch.onnx.export(
            Positional(case).eval(),
            tuple(inputs.values()),
            path,
            input_names=list(inputs),
            output_names=list(run_torch(case, inputs)),
            dynamic_axes=axes if dynamic else None,
            opset_version=LEGACY_OPSET,
            dynamo=False,
        )
    if external_data:
        onnx.save(onnx.load(path), path, save_as_external_data=True, location=f"{path.name}.data")


def check(case: Case, path: Path, sizes: Mapping[str, int]) -> float:
    """Return the file's largest deviation from torch, relative to the output's largest value.

    Raises:
        WrongExportError: it is beyond the tolerance of the network's precision.
    """
    inputs = sample_inputs(case, sizes)
    wanted = run_torch(case, inputs)
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    got = session.run(list(wanted), {name: value.numpy() for name, value in inputs.items()})
    worst = 0.0
    for (name, want), have in zip(wanted.items(), got, strict=True):
        error = float(np.abs(have - want.numpy()).max() / want.abs().max())
        if not error <= TOLERANCES[want.dtype]:
            raise WrongExportError(f"{path.name}: output {name} is off by {error:.1e} at {sizes}")
        worst = max(worst, error)
    return worst


@dataclass(frozen=True)
class Result:
    """What came of one variant of one model."""

    name: str
    variant: Variant
    known_failure: bool
    error: str = ""
    deviation: float = 0.0
    size: int = 0

    @property
    def expected(self) -> bool:
        """Whether the model's entry in the table says so too."""
        return bool(self.error) == self.known_failure

    def row(self) -> str:
        """Return this result as a line of the table."""
        outcome = self.error or f"ok, off by {self.deviation:.0e}, {self.size:,} bytes"
        surprise = "" if self.expected else "  (NOT EXPECTED)"
        return f"{self.name:16} {self.variant[0]:7} {self.variant[1]:8} {outcome}{surprise}"


def export_variant(
    model: Architecture, case: Case, variant: Variant, folder: Path, *, full: bool
) -> Result:
    """Write and check one variant; a file that failed is removed."""
    exporter, shapes = variant
    dynamic = shapes == "dynamic"
    path = folder / f"{model.name}.{exporter}.{shapes}.onnx"
    write = export_dynamo if exporter == "dynamo" else export_legacy
    known = variant in model.fails
    try:
        write(case, path, dynamic=dynamic, external_data=full)
        deviation = max(check(case, path, s) for s in (SIZES, OTHER_SIZES)[: 1 + dynamic])
    except Exception as error:  # whatever an exporter raises is a line of the table
        for written in folder.glob(f"{path.name}*"):
            written.unlink()
        return Result(model.name, variant, known, root_cause(error))
    return Result(model.name, variant, known, "", deviation, path.stat().st_size)


def root_cause(error: BaseException) -> str:
    """Return the type and the first line of what an exporter first stumbled over."""
    while error.__cause__:
        error = error.__cause__
    first_line = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {first_line}"[:200]


def export_models(args: argparse.Namespace, folder: Path) -> Iterator[Result]:
    """Export what the command line asks for."""
    for name in args.names or ARCHITECTURES:
        model = ARCHITECTURES[name]
        case = build(model, (model.full if args.full else model.small) | dict(args.set))
        for variant in model.variants:
            if args.exporter in (None, variant[0]):
                yield export_variant(model, case, variant, folder, full=args.full)


def setting(text: str) -> tuple[str, Any]:
    """Parse `key=value`, where the value is a Python literal or else a string."""
    key, _, value = text.partition("=")
    try:
        return key, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return key, value


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(ARCHITECTURES))
    parser.add_argument("--exporter", choices=["dynamo", "legacy"])
    parser.add_argument("--list", action="store_true", help="print the table, keep no file")
    parser.add_argument("--full", action="store_true", help="full size; needs --out")
    parser.add_argument("--out", type=Path, help="the folder to write to")
    parser.add_argument(
        "--set",
        type=setting,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change the configuration, for example num_hidden_layers=80",
    )
    args = parser.parse_args()
    if unknown := set(args.names) - set(ARCHITECTURES):
        parser.error(f"no model {', '.join(sorted(unknown))}; there are {', '.join(ARCHITECTURES)}")
    if args.full and not (args.out or args.list):
        parser.error("--full writes large files: say where with --out")
    return args


def main() -> int:
    """Export, print a line per variant, and fail where one is not as its model's entry says."""
    args = parse_arguments()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) if args.list else args.out or Path(__file__).parent
        folder.mkdir(parents=True, exist_ok=True)
        results = []
        for result in export_models(args, folder):
            print(result.row(), flush=True)
            results.append(result)
    return 0 if all(result.expected for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
