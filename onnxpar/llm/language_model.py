"""The roles of a sharded language model's inputs and outputs, its limits, and its special
tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx

from onnxpar.base.bundle_names import CONFIG, ENCODER_PART, GENAI, GENERATION
from onnxpar.base.errors import InputError, ModelError
from onnxpar.graph.model_folder import genai_config, read_config
from onnxpar.load.page_ports import PICKS, POSITIONS, ROWS, TABLE
from onnxpar.load.top_k_logits import ASKED, TEMPERATURES
from onnxpar.runtime.launch.launch import launched_rank
from onnxpar.runtime.session.bundle import Bundle, Port

_GROUPED = "GroupQueryAttention"
"""The op of com.microsoft that reads the length of each row of a batch, and no mask."""
_RING = "sliding_window_cache"
"""Its attribute that is 1 if a cache is a ring buffer."""
PAGING = frozenset((TABLE, ROWS, POSITIONS, PICKS, TEMPERATURES, ASKED))
"""The inputs of a decoder whose caches are in pages, besides tokens and position ids."""
_CONTEXT = ("context_length", "max_position_embeddings", "n_positions")
"""The names of the most tokens of a text in configurations."""
_DECODER_CONTEXT = (
    "max_target_positions",
    "max_decoder_position_embeddings",
    "max_position_embeddings",
)
"""The same names for the decoder of an encoder-decoder."""
ENCODER_MASK = "encoder_attention_mask"
"""The input of such a decoder that is the mask of the tokens which the encoder has read."""


@dataclass(frozen=True)
class LanguageModel:
    """A decoder with a cache: tokens and the cache go in, logits and a longer cache come out.

    tokens      the name of the input of token ids, (batch, length)
    mask       the input of the attention mask, (batch, past and new tokens); None if there is none
    positions  the input of position ids, (batch, length), or (length,) if the same for all texts;
               None if there is none
    logits     the output of logits, (batch, length, vocabulary)
    caches     the inputs that are the cache
    ends       ids of the tokens that end a text
    begin      id of the token that begins a text; None if unknown
    context    the most tokens of a text, prompt included; None if unknown
    is_single  True if a run reads one token of each text
    page_size   tokens of a page, if the caches are in pages, else 0
    vocabulary  the number of tokens
    pads_right  True if shorter rows of a batch are filled up behind their tokens, else before them
    has_encoder  True if an encoder reads the prompts
    """

    tokens: str
    mask: str | None
    positions: str | None
    logits: str
    caches: tuple[str, ...]
    ends: frozenset[int]
    begin: int | None
    context: int | None
    is_single: bool
    pads_right: bool
    page_size: int
    vocabulary: int
    has_encoder: bool = False

    @staticmethod
    def of(bundle: Bundle) -> LanguageModel:
        """Returns the description of a sharded model, from its inputs, outputs and configuration.
        Errors: ModelError if it is no decoder with a cache."""
        settings = settings_of(bundle.path)
        has_encoder = (bundle.path / ENCODER_PART).is_dir()
        roles: dict[str, str] = {}
        paging = PAGING if bundle.inputs.keys() >= PAGING else frozenset()
        for port in bundle.inputs.values():
            is_encoders = has_encoder and port.name == ENCODER_MASK
            if port.name not in bundle.states and port.name not in paging and not is_encoders:
                roles[_role(port, bundle.path)] = port.name
        logits = [o for o in bundle.outputs.values() if _is_logits(o, bundle)]
        if "tokens" not in roles or not bundle.states or len(logits) != 1:
            raise ModelError(
                f"{bundle.path} is no decoder with a cache: it needs an input of token ids, an "
                "output of logits [batch, length, vocabulary], and inputs that are the cache. It "
                f"has {', '.join([*bundle.inputs, *bundle.outputs])}"
            )
        tokens = bundle.inputs[roles["tokens"]]
        length = (tokens.shape or (None, None))[1]
        if isinstance(length, int) and length != 1:
            raise ModelError(
                f"{bundle.path}: each run reads {length} tokens, because the model has a fixed "
                f"length of {tokens.name!r}; export it with an open one"
            )
        contexts = _DECODER_CONTEXT if has_encoder else _CONTEXT
        return LanguageModel(
            tokens.name,
            roles.get("mask"),
            roles.get("positions"),
            logits[0].name,
            tuple(bundle.states),
            frozenset(token_ids(settings.get("eos_token_id"))),
            next(iter(token_ids(settings.get("bos_token_id"))), None),
            first_number(settings, contexts),
            length == 1,
            not paging and _has_grouped_attention(bundle),
            _page_size(bundle) if paging else 0,
            size if isinstance(size := (logits[0].shape or (0,))[-1], int) else 1 << 31,
            has_encoder,
        )

    def check_tokens(self, tokens: Sequence[int]) -> None:
        """Errors: InputError for a prompt without tokens, or with a token that is not in the
        vocabulary."""
        if not tokens:
            raise InputError("a prompt has no tokens; give a text, token ids or a chat")
        check_ids(tokens, self.vocabulary)


def check_ids(tokens: Iterable[int], vocabulary: int) -> None:
    """Errors: InputError for a token of a prompt that is not below `vocabulary`, the number of
    tokens."""
    for token in tokens:
        if not 0 <= token < vocabulary:
            raise InputError(f"a prompt has token {token}; ids are from 0 to {vocabulary - 1}")


def _page_size(bundle: Bundle) -> int:
    """Returns the number of tokens of a page. Errors: ModelError if it differs between caches."""
    sizes = {(bundle.inputs[name].shape or (None,) * 4)[2] for name in bundle.states}
    size = sizes.pop()
    if sizes or not isinstance(size, int):
        raise ModelError(f"{bundle.path}: its caches have pages of different sizes")
    return size


def _role(port: Port, path: Path) -> str:
    """Returns the role of an input that is no cache: "tokens", "mask" or "positions". Errors:
    ModelError if it has none of these roles."""
    is_row = port.shape is not None and len(port.shape) == 2 and port.dtype.kind == "i"
    if port.name == "cache_position" and len(port.shape or ()) == 1:
        return "positions"
    for role, part in (("positions", "position"), ("mask", "mask"), ("tokens", "ids")):
        if is_row and part in port.name:
            return role
    raise ModelError(
        f"{path}: a language model's decoder has token ids, an attention mask, position ids and a "
        f"cache as inputs, but {port.name!r} ({port.expects()}) is none of these; export a decoder "
        "alone, with a cache, or use `onnxpar run` for a model of another kind"
    )


def _is_logits(port: Port, bundle: Bundle) -> bool:
    """True for an output of floats with 3 dimensions that is no cache."""
    is_state = port.name in bundle.states.values()
    return not is_state and len(port.shape or ()) == 3 and port.dtype.kind not in "iub"


def settings_of(folder: Path, only_generation: bool = False) -> Mapping[str, Any]:
    """Returns the configuration in a model's folder: special tokens, the length of the context, and
    settings of generation. With `only_generation`, only generation_config.json, if there is one.
    Errors: ModelError if a file cannot be read."""
    if (folder / GENAI).exists():
        return genai_config(folder)
    files = [folder / CONFIG, folder / GENERATION]
    if only_generation and files[1].exists():
        files = files[1:]
    settings: dict[str, Any] = {}
    for file in files:
        if file.exists():
            own = read_config(file)
            settings |= {k: v for k, v in own.get("text_config", own).items() if v is not None}
    return settings


def first_number(settings: Mapping[str, Any], names: Iterable[str]) -> int | None:
    """Returns the first of the settings `names` that is a whole number; None if there is none."""
    return next((settings[name] for name in names if isinstance(settings.get(name), int)), None)


def token_ids(value: object) -> tuple[int, ...]:
    """Returns the token ids in a setting that may be a list, a number or missing: 5 becomes (5,),
    and None becomes ()."""
    each = value if isinstance(value, list) else [value]
    return tuple(v for v in each if isinstance(v, int))


def _has_grouped_attention(bundle: Bundle) -> bool:
    """True if the decoder has GroupQueryAttention, which reads the length of each row instead of a
    mask. Errors: ModelError if one has a ring buffer as its cache, and overwrites the oldest
    tokens."""
    launched = launched_rank()
    own = bundle.rank_file(0 if launched is None else launched.rank)
    graph = onnx.load(str(own), load_external_data=False).graph
    grouped = [node for node in graph.node if node.op_type == _GROUPED]
    for node in grouped:
        if any(a.name == _RING and a.i for a in node.attribute):
            raise ModelError(
                f"{bundle.path}: {_GROUPED} {node.name!r} overwrites the oldest tokens of its "
                f"cache ({_RING}); shard the model with --page-size 16 to generate text"
            )
    return bool(grouped)
