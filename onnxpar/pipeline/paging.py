"""Decides whether the caches of a language model are put in pages."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from onnxpar.canonicalize.page_caches import usual_page_size
from onnxpar.errors import StrategyError
from onnxpar.pipeline.options import Options


def paged_by_default(model: object, options: Options) -> Options:
    """Returns options with the usual page size, if the model is a folder of a language model and
    the user asks for nothing else. Errors: ModelError if it is unclear which model is meant."""
    if options.page_size is not None or not isinstance(model, (str, os.PathLike)):
        return options
    return replace(options, page_size=usual_page_size(Path(model)))


def refuse_paging(options: Options, command: str) -> None:
    """Errors: StrategyError if pages are asked for where the inputs must stay those of the
    model."""
    if options.page_size:
        raise StrategyError(
            f"--page-size: {command} works with the inputs of the model as it is, and pages add "
            "others; leave --page-size out"
        )
