"""Folders of a language or embedding model: the ONNX files of its decoder, its encoder or both, and
other files, such as the tokenizer.

Written by onnxruntime-genai's builder (genai_config.json), by Hugging Face Optimum, or for
transformers.js (config.json, and the model often in a folder `onnx`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnxpar.base.bundle_names import CARRIED, CONFIG, GENAI, POOLING
from onnxpar.base.errors import ModelError
from onnxpar.base.read_bounded import read_bounded
from onnxpar.graph.hugging_face import export_command, exported, is_on_hub, task_of

_PLACES = {POOLING: "1_Pooling/config.json"}
"""Paths in a model's folder of files that have another name in a sharded model, by that name."""
_DECODERS = ("model.onnx", "decoder_model_merged.onnx", "decoder_with_past_model.onnx")
"""Usual names of the file of a decoder with a cache, the likeliest first."""
_ENCODER = "encoder_model.onnx"
_MERGED = "decoder_model_merged.onnx"
_FIRST, _LATER = "decoder_model.onnx", "decoder_with_past_model.onnx"
_SINGLE = re.compile(r"encoder|embed|vision|speech|vocoder")


def _export(model: str, flag: str, output: str, task: tuple[str, ...] = ()) -> str:
    """Returns text that tells the user how to export a model of Hugging Face by hand."""
    return (
        f"this command does so after pip install 'onnxpar[hf]'. By hand, to a folder: "
        f"`python -m onnxruntime_genai.models.builder {flag} {model} -o {output} -p fp32 -e cpu` "
        f"for a language model (pip install onnxruntime-genai), or "
        f"`{export_command(('--model', model, *task), output)}` for any (pip install optimum-onnx)"
    )


def model_at(path: Path) -> Path:
    """Returns the ONNX file for a path: in a folder, its decoder; for a model of Hugging Face,
    after an export. Any other path, also of a sharded model, is returned as it is. Errors:
    ModelError."""
    path = exported(path)
    is_folder = path.is_dir() and not (path / "plan.json").exists()
    if is_on_hub(path):
        raise ModelError(
            f"there is no file {path}; if it is a model on the hub of Hugging Face, it must be "
            f"exported: {_export(str(path), '-m', path.name)}"
        )
    return decoder_in(path) if is_folder else path


def decoder_in(folder: Path) -> Path:
    """Returns the ONNX file of a folder: the decoder that genai_config.json names; else a file with
    one of the usual names; else the only file. Errors: ModelError."""
    if (folder / GENAI).exists():
        return _named_by_genai(folder)
    both = encoder_decoder_in(folder)
    if both is not None:
        return both.later
    places = [place for place in (folder, folder / "onnx") if place.is_dir()]
    for place in places:
        for name in _DECODERS:
            if (place / name).is_file():
                return place / name
    files = [file for place in places for file in sorted(place.glob("*.onnx"))]
    decoders = [file for file in files if not _SINGLE.search(file.name)]
    if len(decoders) == 1:
        return decoders[0]
    if not files and (folder / "config.json").is_file():
        raise ModelError(
            f"{folder} has a model of Hugging Face, but not as ONNX; it must be exported: "
            f"{_export(str(folder), '-i', f'{folder.name}-onnx', ('--task', task_of(folder)))}"
        )
    if not files:
        raise ModelError(f"{folder} is a folder without an .onnx file; give an .onnx file")
    raise ModelError(
        f"{folder} is a folder, and none of its {len(files)} .onnx files is called "
        f"{', '.join(_DECODERS[:-1])} or {_DECODERS[-1]}; give an .onnx file, such as "
        f"{(decoders or files)[0]}"
    )


@dataclass(frozen=True)
class EncoderDecoderFiles:
    """The files of an encoder-decoder. `first` is the decoder for the first step (without a cache),
    `later` that for further steps; both may be one file."""

    encoder: Path
    first: Path
    later: Path


def encoder_decoder_in(folder: Path) -> EncoderDecoderFiles | None:
    """Returns the files of an encoder-decoder in a folder, or in its folder `onnx`; None if it
    holds none. Errors: ModelError if some of the files are missing."""
    for place in (folder, folder / "onnx"):
        encoder = place / _ENCODER
        for first, later in ((_FIRST, _LATER), (_MERGED, _MERGED)):
            files = EncoderDecoderFiles(encoder, place / first, place / later)
            if all(file.is_file() for file in (encoder, files.first, files.later)):
                return files
    config = _root(folder) / CONFIG
    has_other = any((place / _DECODERS[0]).is_file() for place in (folder, folder / "onnx"))
    if has_other or not config.is_file() or not read_config(config).get("is_encoder_decoder"):
        return None
    raise ModelError(
        f"{folder} holds an encoder-decoder ({config.name}: is_encoder_decoder), of which files "
        f"are missing: it needs {_ENCODER}, and {_MERGED} or both {_FIRST} and {_LATER}; export it "
        "again with a task that ends in -with-past, or give an .onnx file"
    )


def encoder_file(decoder: Path) -> Path:
    """Returns the path of the encoder that belongs to a decoder's file, in the same folder."""
    return decoder.parent / _ENCODER


def _named_by_genai(folder: Path) -> Path:
    """Returns the decoder's file that genai_config.json names. Errors: ModelError."""
    decoder = genai_config(folder).get("decoder")
    name = decoder.get("filename") if isinstance(decoder, dict) else None
    if not isinstance(name, str):
        raise ModelError(
            f"{folder / GENAI} names no file of a decoder (model.decoder.filename); give the .onnx "
            "file"
        )
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise ModelError(f"{folder / GENAI}: model.decoder.filename {name!r} is not in the folder")
    if not (folder / name).is_file():
        raise ModelError(f"{folder / GENAI} names the file {name!r}, which is not in the folder")
    return folder / name


def genai_config(folder: Path) -> Mapping[str, Any]:
    """Returns the object "model" in the folder's genai_config.json. Errors: ModelError."""
    config = read_config(folder / GENAI).get("model")
    if not isinstance(config, dict):
        raise ModelError(f'{folder / GENAI} has no object "model"; write it anew with the builder')
    return config


def read_config(file: Path) -> Mapping[str, Any]:
    """Returns the content of a JSON file that is an object. Errors: ModelError."""
    value = read_json(file)
    if not isinstance(value, dict):
        raise ModelError(f"{file} does not hold a JSON object; copy it again")
    return value


def read_json(file: Path) -> object:
    """Returns the content of a JSON file. Errors: ModelError."""
    try:
        return json.loads(read_bounded(file))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{file} cannot be read: {error}; copy it again") from None


def carried_files(model: Path, is_part: bool = False) -> dict[str, Path]:
    """Returns the files beside a model (tokenizer, configurations) that are copied into the sharded
    model, by their names there. Empty for a folder without genai_config.json and tokenizer.json,
    which is not that of a language or embedding model, unless the model `is_part` of an
    encoder-decoder."""
    folder = _root(model.parent)
    if not is_part and not any((folder / name).is_file() for name in (GENAI, "tokenizer.json")):
        return {}
    places = {name: folder / _PLACES.get(name, name) for name in CARRIED}
    return {name: place for name, place in places.items() if place.is_file()}


def _root(place: Path) -> Path:
    """Returns the folder of the configuration: that of the model files, or its parent if that is
    `onnx`."""
    return place.parent if place.name == "onnx" else place
