"""A sharded encoder-decoder on its ranks: the encoder reads a prompt once, and all steps of the
decoder use the result."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from onnxpar.base.bundle_names import ENCODER_PART
from onnxpar.base.errors import InputError
from onnxpar.llm.decoder import Decoder
from onnxpar.llm.decoder_prompt import Beginning, speech_beginning, text_beginning
from onnxpar.llm.generated_tokens import EncodedSource
from onnxpar.llm.generation_rules import GenerationRules
from onnxpar.llm.language_model import LanguageModel, settings_of
from onnxpar.llm.prompt_encoder import Input, PromptEncoder
from onnxpar.llm.tokenizer import Tokenizer
from onnxpar.runtime.ranks.closing import Closing
from onnxpar.runtime.session.bundle import Bundle
from onnxpar.runtime.session.session import InferenceSession, Session


class EncoderDecoder(Closing):
    """An encoder's ranks together with its decoder's ranks.

    session  the session of the encoder
    encoder  runs the encoder
    decoder  runs the decoder
    model    the roles of the decoder's inputs and outputs
    folder   the decoder's folder, with its configuration
    """

    def __init__(
        self,
        session: InferenceSession,
        encoder: PromptEncoder,
        decoder: Decoder,
        model: LanguageModel,
        folder: Path,
    ) -> None:
        self._session, self._encoder, self._decoder, self._of = session, encoder, decoder, model
        self._settings = settings_of(folder)
        self._generation = settings_of(folder, only_generation=True)

    @staticmethod
    def open(
        encoder: Bundle,
        decoder: Session,
        bundle: Bundle,
        model: LanguageModel,
        options: Mapping[str, Any],
    ) -> EncoderDecoder:
        """Starts the ranks of an encoder, for the session of its decoder that runs already.

        encoder, bundle  the sharded encoder and decoder
        decoder          the session of the decoder
        model            the roles of the decoder's inputs and outputs
        options          of the encoder's session

        Errors: ModelError if the encoder reads neither token ids nor features of sound; RankError
        if a rank does not start.
        """
        asked = dict(options)
        if asked.get("log_dir") is not None:
            asked["log_dir"] = os.path.join(asked["log_dir"], ENCODER_PART)
        session = InferenceSession(encoder.path, **asked)
        try:
            reader = PromptEncoder(session, encoder, bundle)
            own = Decoder(decoder, bundle, model)
            opened = EncoderDecoder(session, reader, own, model, bundle.path)
            opened.start(None, None, None)
            return opened
        except BaseException:
            session.close()
            raise

    def close(self) -> None:
        """Ends the encoder's ranks."""
        self._session.close()

    @property
    def hears(self) -> bool:
        """True for a speech model, whose prompts are sounds."""
        return self._encoder.model.features is not None

    def check(self, given: Input) -> None:
        """Errors: InputError for a prompt that the encoder cannot read."""
        self._encoder.model.check(given)

    def start(
        self, language: str | None, task: str | None, tokenizer: Tokenizer | None
    ) -> tuple[Beginning, GenerationRules]:
        """Returns the first tokens of answers, and the rules for the tokens that follow.

        language, task  as `Generator.generate` has them; None if not given
        tokenizer       needed to find the token of a language of a text model

        Errors: InputError for a language or a task that the model does not know.
        """
        settings = dict(self._generation)
        if self.hears:
            begin = speech_beginning(self._settings, language, task)
        else:
            begin = text_beginning(self._settings)
            if task is not None:
                raise InputError("task is for speech models; leave it out")
            if language is not None:
                assert tokenizer is not None, "a language is the text of a token"
                token = tokenizer.id_of(language)
                if token is None:
                    raise InputError(f"language is {language!r}, which is no token of the model")
                settings["forced_bos_token_id"] = token
        return begin, GenerationRules.of(settings, self._of.ends)

    def source(
        self, inputs: Sequence[Input], begin: Beginning, rules: GenerationRules
    ) -> EncodedSource:
        """Returns the source of the answers' tokens.

        inputs  the prompts for the encoder
        begin   the first tokens of each answer
        rules   which tokens may follow
        """
        vocabulary = self._of.vocabulary
        return EncodedSource(self._decoder, self._encoder, inputs, begin, rules, vocabulary)
