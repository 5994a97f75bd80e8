"""The encoder of a sharded encoder-decoder: reads prompts, and computes inputs of the decoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.base.bundle_names import ENCODER_PART
from onnxpar.base.errors import InputError, ModelError
from onnxpar.llm.language_model import ENCODER_MASK, check_ids, first_number, settings_of
from onnxpar.runtime.session.bundle import Bundle, Port
from onnxpar.runtime.session.session import Session

_LENGTHS = ("max_source_positions", "max_encoder_position_embeddings", "max_position_embeddings")
"""The names of the most tokens of a prompt in configurations."""
_FEATURES = "input_features"
Input = Sequence[int] | Array
"""The tokens of a prompt, or the features of a sound, (mels, columns)."""


@dataclass(frozen=True)
class PromptModel:
    """The roles of an encoder's inputs; its outputs are the caches of the decoder's
    cross-attention.

    tokens, mask  inputs of token ids and of their mask, (texts, length); None for a speech model
    features      the input of features of sound, (texts, mels, columns); None for a text model
    vocabulary    the number of tokens
    longest       the most tokens of a prompt; None if there is no limit
    padding       the token with which shorter prompts are filled up at their end
    """

    tokens: Port | None
    mask: Port | None
    features: Port | None
    vocabulary: int
    longest: int | None
    padding: int

    @staticmethod
    def of(bundle: Bundle) -> PromptModel:
        """Returns the description of an encoder, from its inputs and the configuration beside its
        decoder. Errors: ModelError if it reads neither token ids nor features of sound."""
        ports = dict(bundle.inputs)
        features = ports.pop(_FEATURES, None)
        mask, tokens = ports.pop("attention_mask", None), ports.pop("input_ids", None)
        if ports or (features is None) == (tokens is None):
            raise ModelError(
                f"{bundle.path}: the encoder of a language model has input_ids and perhaps "
                f"attention_mask as inputs, that of a speech model {_FEATURES}, but this one has "
                f"{', '.join(f'{p.name} ({p.expects()})' for p in bundle.inputs.values())}; run it "
                "with InferenceSession"
            )
        settings = settings_of(bundle.path.parent)
        known = bundle.data.get("ranges", {}).get("input_ids")
        padding = settings.get("pad_token_id")
        return PromptModel(
            tokens,
            mask,
            features,
            int(known[1]) if known else settings.get("vocab_size", 1 << 31),
            first_number(settings, _LENGTHS),
            padding if isinstance(padding, int) and padding >= 0 else 0,
        )

    def check(self, given: Input) -> None:
        """Errors: InputError for a prompt that the encoder cannot read: features of another shape,
        unknown tokens, or too many."""
        if self.features is not None:
            if not isinstance(given, np.ndarray) or not self.features.admits((1, *given.shape)):
                shape = f" [{', '.join(map(str, given.shape))}]" if hasattr(given, "shape") else ""
                raise InputError(
                    f"features of a sound{shape} must be {self.features.expects()} without the "
                    "first dimension"
                )
            return
        if not len(given):
            raise InputError("a prompt has no tokens; give a text or token ids")
        check_ids(given, self.vocabulary)
        if self.longest is not None and len(given) > self.longest:
            raise InputError(
                f"a prompt has {len(given)} tokens, and the encoder reads at most {self.longest}; "
                "give a shorter one"
            )


class PromptEncoder:
    """Feeds prompts to the session of an encoder, for a decoder.

    bundle   the sharded encoder
    decoder  the sharded decoder
    """

    def __init__(self, session: Session, bundle: Bundle, decoder: Bundle) -> None:
        self._session, self._decoder = session, decoder
        self.model = PromptModel.of(bundle)

    def read(self, prompts: Sequence[Input]) -> dict[str, Array]:
        """Reads prompts as one batch. Returns the decoder's inputs that depend on them, by name:
        the caches of cross-attention, and the mask of the prompts' tokens. Errors: InputError for
        prompts of different lengths, if the encoder has no mask."""
        model = self.model
        feeds: dict[str, Array]
        if model.features is not None:
            feeds = {model.features.name: np.stack(prompts).astype(model.features.dtype)}
            mask = None
        else:
            assert model.tokens is not None, "an encoder reads features or tokens"
            lengths = np.array([len(prompt) for prompt in prompts])
            mask = np.arange(lengths.max()) < lengths[:, None]
            tokens = np.full(mask.shape, model.padding, model.tokens.dtype)
            tokens[mask] = np.concatenate([np.asarray(prompt) for prompt in prompts])
            feeds = {model.tokens.name: tokens}
            has_mask = model.mask is not None and ENCODER_MASK in self._decoder.inputs
            if not has_mask and not mask.all():
                raise InputError(
                    "the encoder has no attention mask: give prompts of equally many tokens"
                )
            if model.mask is not None:
                feeds[model.mask.name] = mask.astype(model.mask.dtype)
        names = [port.name for port in self._session.get_outputs()]
        inputs = dict(zip(names, self._session.run(names, feeds), strict=True))
        if ENCODER_MASK in self._decoder.inputs and mask is not None:
            inputs[ENCODER_MASK] = mask.astype(self._decoder.inputs[ENCODER_MASK].dtype)
        return inputs


def read_encoder(decoder: Bundle) -> Bundle:
    """Returns the sharded encoder that lies beside a sharded decoder. Errors: ModelError if its
    outputs are not the caches of this decoder."""
    bundle = Bundle.load(decoder.path / ENCODER_PART)
    wrong = bundle.outputs.keys() ^ {n for n in decoder.states if ".encoder." in n}
    if wrong:
        raise ModelError(
            f"{bundle.path} is not the encoder of {decoder.path}: only one of them has "
            f"{min(wrong)!r}; shard the folder again"
        )
    return bundle
