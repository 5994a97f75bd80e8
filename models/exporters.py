"""torch's two ONNX exporters."""

import contextlib
import copy
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx
import torch
from building import SIZES, run_torch, sample_inputs
from cases import Case
from torch import Tensor, nn
from torch.onnx import TrainingMode

LEGACY_OPSET = 17  # older graph forms than those of opset 20, which both choose by default
TRAINING_OPSET = 18  # the first that gradients can be written in
BULKY_METADATA = (  # a quarter of a small file; the name scopes say it in less
    "namespace",
    "pkg.torch.onnx.class_hierarchy",
    "pkg.torch.onnx.fx_node",
    "pkg.torch.onnx.stack_trace",  # and this one names folders of the machine
)


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
    axes = {name: spec.symbols() for name, spec in case.inputs.items()}
    trace(
        Positional(case).eval(),
        sample_inputs(case, SIZES),
        path,
        list(run_torch(case, sample_inputs(case, SIZES))),
        dynamic_axes=axes if dynamic else None,
        opset_version=LEGACY_OPSET,
    )
    if external_data:
        onnx.save(onnx.load(path), path, save_as_external_data=True, location=f"{path.name}.data")


def export_training(case: Case, path: Path, sizes: dict[str, int] = SIZES) -> None:
    """Write the case as torch.jit traces it, each module in the mode that it is in.

    What is folded or fused would be no parameter any more: every one keeps its name, once.
    """
    inputs = sample_inputs(case, sizes)
    trace(
        Positional(copy.deepcopy(case)),  # tracing moves running statistics
        inputs,
        path,
        list(run_torch(copy.deepcopy(case), inputs)),
        opset_version=TRAINING_OPSET,
        training=TrainingMode.PRESERVE,
        do_constant_folding=False,
    )


def trace(
    network: nn.Module, inputs: dict[str, Tensor], path: Path, outputs: list[str], **options: Any
) -> None:
    """Call the legacy exporter."""
    with silent_stdout():  # where it fails it prints the whole graph, whatever `verbose` says
        torch.onnx.export(
            network,
            tuple(inputs.values()),
            path,
            input_names=list(inputs),
            output_names=outputs,
            dynamo=False,
            **options,
        )
