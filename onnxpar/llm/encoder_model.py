"""The roles of a sharded encoder's inputs and outputs, and how its output becomes a vector or a
score."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnxpar.base.bundle_names import CONFIG
from onnxpar.base.errors import ModelError
from onnxpar.graph.model_folder import read_config
from onnxpar.llm.pooling import Pooling
from onnxpar.runtime.session.bundle import Bundle, Port

_VECTORS = ("sentence_embedding",)
_HIDDEN = ("last_hidden_state", "token_embeddings")
_POOLED = ("pooler_output",)
_SCORES = ("logits",)
_ROLES = (("positions", "position"), ("types", "type"), ("mask", "mask"), ("tokens", "ids"))
"""Parts of the names of inputs, by role, the most specific first."""
_SHIFTED = ("roberta", "camembert", "mpnet", "xlm", "longformer", "data2vec")
"""Parts of the kinds of models whose positions begin after the number of the padding token."""
_UNKNOWN = 8192
"""The most tokens of a text where the folder does not say."""
_ENDLESS = 1 << 24
"""From this length on, the limit of a tokenizer means that there is none."""


def is_encoder(par: str | os.PathLike[str]) -> bool:
    """True for a sharded model that reads token ids and has no cache, as embedding models and
    rerankers do. False also for a folder that cannot be read: the caller then loads a language
    model, which reports the error."""
    try:
        bundle = Bundle.load(par)
    except ModelError:
        return False
    return not bundle.states and "tokens" in map(_role, bundle.inputs.values())


@dataclass(frozen=True)
class EncoderModel:
    """An encoder: tokens go in, hidden states, a vector or a score come out.

    inputs      names of inputs by role: "tokens", "mask", "types" (to which text of a pair a token
                belongs), "positions"
    output      the output that is read
    pooling     how the output becomes a vector; None for a reranker, whose output has scores
    width       numbers of a vector; 1 for a reranker
    vocabulary  the number of tokens
    longest     the most tokens of a text
    padding     the token with which shorter texts are filled up at their end
    first       the position of a text's first token
    rows        texts of each run, if the model has a fixed number
    length      tokens of each text, if the model has a fixed number
    """

    inputs: Mapping[str, str]
    output: str
    pooling: Pooling | None
    width: int
    vocabulary: int
    longest: int
    padding: int
    first: int
    rows: int | None
    length: int | None

    @property
    def kind(self) -> str:
        """The kind of model in words: "a reranker" or "an embedding model"."""
        return "a reranker" if self.pooling is None else "an embedding model"

    @staticmethod
    def of(bundle: Bundle) -> EncoderModel:
        """Returns the description of a sharded model, from its inputs, outputs and configuration.
        Errors: ModelError if it is neither an embedding model nor a reranker."""
        config = read_config(file) if (file := bundle.path / CONFIG).exists() else {}
        inputs = _inputs(bundle)
        output = _output(bundle, config)
        is_score = output.name in _SCORES
        pooling = None if is_score else Pooling.of(bundle.path, len(output.shape or ()) == 2)
        width = (output.shape or (None,))[-1]
        if not isinstance(width, int):
            raise ModelError(
                f"{bundle.path}: the width of {output.name!r} ({output.expects()}) is open; export "
                "the model with a fixed one"
            )
        tokens = bundle.inputs[inputs["tokens"]]
        rows, length = (s if isinstance(s, int) else None for s in tokens.shape or (None, None))
        padding = _whole(config, "pad_token_id", 0)
        is_shifted = any(name in str(config.get("model_type", "")) for name in _SHIFTED)
        first = padding + 1 if is_shifted else 0
        return EncoderModel(
            inputs=inputs,
            output=output.name,
            pooling=pooling,
            width=width * (len(pooling.modes) or 1 if pooling else 1),
            vocabulary=_vocabulary(bundle, tokens.name, config),
            longest=_longest(bundle.path, config, first, length),
            padding=padding,
            first=first,
            rows=rows,
            length=length,
        )


def _role(port: Port) -> str | None:
    """Returns the role of an input by its name: "tokens", "mask", "types" or "positions". None if
    it has none of these roles."""
    if port.shape is None or len(port.shape) != 2 or port.dtype.kind != "i":
        return None
    return next((role for role, part in _ROLES if part in port.name), None)


def _inputs(bundle: Bundle) -> dict[str, str]:
    """Returns the names of inputs by role. Errors: ModelError for an input without a role that must
    be fed, or if a role is taken twice, or if there are no token ids or no mask."""
    by_role: dict[str, str] = {}
    for port in bundle.inputs.values():
        role = _role(port)
        if role is not None and role not in by_role:
            by_role[role] = port.name
        elif not port.has_default:
            raise ModelError(
                f"{bundle.path}: an encoder has token ids, an attention mask, token types and "
                f"position ids as inputs, but {port.name!r} ({port.expects()}) is none of these, "
                "or a second one; export the encoder alone"
            )
    for role, what in (("tokens", "token ids"), ("mask", "attention mask")):
        if role not in by_role:
            raise ModelError(
                f"{bundle.path}: an encoder has token ids and an attention mask as inputs, so that "
                f"texts of different lengths run together, but this one has no {what}; export it "
                "with both"
            )
    return by_role


def _output(bundle: Bundle, config: Mapping[str, Any]) -> Port:
    """Returns the output to read: a vector per text, hidden states, or scores, in this order.
    Errors: ModelError if there is no such output."""
    for names, dims in ((_VECTORS, 2), (_HIDDEN, 3), (_POOLED, 2)):
        for name in names:
            if name in bundle.outputs and len(bundle.outputs[name].shape or ()) == dims:
                return bundle.outputs[name]
    for name in _SCORES:
        port = bundle.outputs.get(name)
        if port is not None and len(port.shape or ()) == 2:
            _check_reranker(bundle, port, config)
            return port
    outputs = ", ".join(f"{p.name} ({p.expects()})" for p in bundle.outputs.values())
    raise ModelError(
        f"{bundle.path} has token ids and no cache, so it is no language model, and none of its "
        f"outputs is that of an embedding model or a reranker: {outputs}. Export it with "
        f"{', '.join((*_VECTORS, *_HIDDEN, *_POOLED))} or logits [batch, 1]; or a decoder with its "
        "cache"
    )


def _check_reranker(bundle: Bundle, port: Port, config: Mapping[str, Any]) -> None:
    """Errors: ModelError if the logits `port` are not the output of a classifier with one label."""
    kinds = config.get("architectures")
    is_classifier = any("ForSequenceClassification" in str(k) for k in kinds or ()) or not kinds
    if not is_classifier or (port.shape or ())[-1] != 1:
        raise ModelError(
            f"{bundle.path}: {port.name!r} is {port.expects()} of "
            f"{', '.join(map(str, kinds or ['a classifier']))}; a reranker is a "
            "...ForSequenceClassification with one label, [batch, 1]"
        )


def _vocabulary(bundle: Bundle, tokens: str, config: Mapping[str, Any]) -> int:
    """Returns the number of tokens, by the configuration or the rows of the table in which the
    input `tokens` is looked up, whichever is less."""
    known = bundle.data.get("ranges", {}).get(tokens)
    most = int(known[1]) if known else 1 << 31
    return min(_whole(config, "vocab_size", most), most)


def _longest(folder: Path, config: Mapping[str, Any], first: int, length: int | None) -> int:
    """Returns the most tokens of a text: the least limit that the folder's files set, or the
    model's fixed `length`. `first` is the position of a text's first token."""
    lengths = [length] if length is not None else []
    positions = _whole(config, "max_position_embeddings", 0)
    lengths += [positions - first] if positions > first else []
    limits = {"sentence_bert_config.json": "max_seq_length"}
    limits["tokenizer_config.json"] = "model_max_length"
    for name, member in limits.items():
        if (folder / name).exists():
            limit = _whole(read_config(folder / name), member, 0)
            lengths += [limit] if 0 < limit < _ENDLESS else []
    return min(lengths, default=_UNKNOWN)


def _whole(config: Mapping[str, Any], name: str, default: int) -> int:
    """Returns the number `name` of a configuration; `default` if it is no whole number of at least
    0."""
    number = config.get(name)
    return number if isinstance(number, int) and number >= 0 else default
