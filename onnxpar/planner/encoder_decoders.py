"""Options for the two parts of an encoder-decoder, which are two sharded models, and a note about
the encoder."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from onnxpar.base.bundle_names import ENCODER_PART
from onnxpar.base.errors import StrategyError
from onnxpar.base.units import text_of
from onnxpar.compiler.plan import Plan
from onnxpar.graph.hugging_face import exported
from onnxpar.graph.model_folder import encoder_decoder_in
from onnxpar.graph.typical import Typical
from onnxpar.load.encoder_decoder import DECODER, ENCODER
from onnxpar.planner.options import Options, wanted_mesh


def decoder_by_default(model: object, options: Options) -> Options:
    """Returns the options changed for the decoder, if the model is the folder of an
    encoder-decoder; else unchanged. Errors: ModelError if files are missing; StrategyError for
    options about pages."""
    folder = exported(Path(model)) if isinstance(model, (str, os.PathLike)) else None
    if folder is None or not folder.is_dir() or (folder / "plan.json").exists():
        return options
    if encoder_decoder_in(folder) is None:
        return options
    page_options = {"page-size": options.page_size, "kv-dtype": options.kv_dtype}
    for flag, value in page_options.items():
        if value:
            raise StrategyError(
                f"--{flag} {value}: {model} is an encoder-decoder, whose caches stay as the model "
                "has them; leave it out"
            )
    return replace(options, part=DECODER, page_size=0)


def encoder_options(options: Options, decoder: Plan) -> Options:
    """Returns the options for the encoder, made from the decoder's options and plan: as many ranks,
    and none of the options that name tensors, nodes or sizes."""
    return replace(
        options,
        part=ENCODER,
        devices=decoder.mesh.size,
        mesh=wanted_mesh(options),
        strategy=None,
        dims=None,
        states=(),
        exposed=(),
        place={},
        dataset=None,
        typical=Typical(),
    )


def note_encoder(decoder: Plan, encoder: Plan) -> None:
    """Adds a note about the encoder's mesh and memory to the plan of its decoder."""
    weights = text_of(sum(w.bytes_per_rank for w in encoder.weights), "B")
    decoder.notes.append(
        f"the encoder, and the keys and values that the decoder reads of it, are a sharded model "
        f"of their own: mesh {encoder.mesh}, at most {weights} of weights per rank; see "
        f"`onnxpar inspect` of the folder {ENCODER_PART} in it"
    )
