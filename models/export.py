"""Export models with torch's two ONNX exporters, and check each file against torch.

- `python models/export.py` writes every small model, next to this script;
- `python models/export.py gpt2 --exporter dynamo` writes one model by one exporter;
- `python models/export.py --training` writes those for training, and expected/;
- `python models/export.py --list` tells which variants export, and keeps no file;
- `python models/export.py llama --full --out DIR --set num_hidden_layers=32` goes beyond.
"""

import argparse
import ast
import copy
import logging
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
from building import OTHER_SIZES, SIZES, build, run_torch, sample_inputs
from cases import TRAINING, Architecture, Case, Variant
from exporters import export_dynamo, export_legacy, export_training
from torch import Tensor
from training import (
    FEW,
    TRAINED_ON_FEW,
    Batch,
    build_for_training,
    changed_constants,
    steady_batch,
    write_expected,
)

TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2}


class WrongExportError(Exception):
    """An exported file does not compute what torch computes."""


def check(case: Case, path: Path, inputs: Mapping[str, Tensor]) -> float:
    """Return the file's largest deviation from torch, relative to the output's largest value.

    Raises:
        WrongExportError: it is beyond the tolerance of the network's precision.
    """
    wanted = run_torch(copy.deepcopy(case), inputs)
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    got = session.run(list(wanted), {name: value.numpy() for name, value in inputs.items()})
    worst = 0.0
    for (name, want), have in zip(wanted.items(), got, strict=True):
        error = float(np.abs(have - want.numpy()).max() / want.abs().max())
        if not error <= TOLERANCES[want.dtype]:
            shapes = {name: list(value.shape) for name, value in inputs.items()}
            raise WrongExportError(f"{path.name}: output {name} is off by {error:.1e} at {shapes}")
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
        sizes = (SIZES, OTHER_SIZES)[: 1 + dynamic]
        deviation = max(check(case, path, sample_inputs(case, s)) for s in sizes)
    except Exception as error:  # whatever an exporter raises is a line of the table
        for written in folder.glob(f"{path.name}*"):
            written.unlink()
        return Result(model.name, variant, known, root_cause(error))
    return Result(model.name, variant, known, "", deviation, path.stat().st_size)


def export_for_training(model: Architecture, folder: Path) -> Result:
    """Write and check the training variant, and what torch makes of its gradients."""
    path = folder / f"{model.name}.legacy.training.onnx"
    expected = folder / "expected" / f"{path.stem}.npz"
    try:
        case = build_for_training(model)
        batch = steady_batch(model, case)
        export_training(case, path)
        deviation = check(case, path, batch.inputs)
        write_expected(model, case, batch, expected)
        for rows in FEW if model.name in TRAINED_ON_FEW else ():
            write_few(model, case, batch, path, rows)
    except Exception as error:
        path.unlink(missing_ok=True)
        return Result(model.name, TRAINING, False, root_cause(error))
    return Result(model.name, TRAINING, False, "", deviation, path.stat().st_size)


def write_few(model: Architecture, case: Case, batch: Batch, path: Path, rows: int) -> None:
    """Write what torch makes of the first rows of a batch, beside the constants by which an export
    at that batch size differs from the one in `path`."""
    with tempfile.TemporaryDirectory() as folder:
        few = Path(folder) / "few.onnx"
        export_training(copy.deepcopy(case), few, SIZES | {"batch": rows})
        constants = changed_constants(onnx.load(path), onnx.load(few))
    inputs = {name: value[:rows] for name, value in batch.inputs.items()}
    own = path.parent / "expected" / f"{path.stem}.batch{rows}.npz"
    write_expected(model, case, Batch(inputs, batch.target[:rows]), own, constants)


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
        if model.training is not None and not args.full and args.exporter != "dynamo":
            yield export_for_training(model, folder)
        if args.training:
            continue
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
    parser.add_argument("--training", action="store_true", help="only the exports for training")
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
