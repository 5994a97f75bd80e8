"""Runs batches of texts on the ranks of a sharded encoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.llm.encoder_model import EncoderModel
from onnxpar.runtime.session.bundle import Bundle
from onnxpar.runtime.session.session import Session


@dataclass(frozen=True)
class Tokens:
    """The token ids of a text, or of a pair of texts; for a pair, `types` has 0 for tokens of the
    first text and 1 for tokens of the second."""

    ids: Sequence[int]
    types: Sequence[int] = ()


class Encoder:
    """Feeds texts to the session of a sharded encoder, and reads vectors or scores."""

    def __init__(self, session: Session, bundle: Bundle, model: EncoderModel) -> None:
        self._session, self._model = session, model
        self._dtypes = {r: bundle.inputs[name].dtype for r, name in model.inputs.items()}

    def run(self, texts: Sequence[Tokens]) -> Array:
        """Computes texts as one batch; returns their vectors or logits, (texts, width). The other
        texts of the batch change a result only by rounding."""
        model = self._model
        (output,) = self._session.run([model.output], self._feeds(texts))
        if model.pooling is None:
            scores: Array = output[: len(texts)].astype(np.float32)
            return scores
        is_pooled = output.ndim == 2
        return np.stack(
            [
                model.pooling.vector(states if is_pooled else states[: len(text.ids)])
                for text, states in zip(texts, output, strict=False)
            ]
        )

    def _feeds(self, texts: Sequence[Tokens]) -> dict[str, Array]:
        """Returns the model's inputs for texts, by name. Shorter texts are padded behind their
        tokens; if the model has a fixed number of rows, further rows are padding."""
        model = self._model
        shape = (
            model.rows or len(texts),
            model.length or max(len(text.ids) for text in texts),
        )
        feeds = {role: np.zeros(shape, dtype) for role, dtype in self._dtypes.items()}
        feeds["tokens"][:] = model.padding
        if "positions" in feeds:
            feeds["positions"][:] = np.arange(shape[1]) + model.first
        feeds["mask"][len(texts) :, :1] = 1  # without any attention, a row would be NaN
        for row, text in enumerate(texts):
            size = len(text.ids)
            feeds["tokens"][row, :size] = text.ids
            feeds["mask"][row, :size] = 1
            if "types" in feeds and text.types:
                feeds["types"][row, :size] = text.types
        return {model.inputs[role]: array for role, array in feeds.items()}
