"""Runs a sharded decoder on a batch of texts; the caches stay on the ranks between steps."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import numpy as np

from onnxpar.base.arrays import Array
from onnxpar.base.errors import InputError
from onnxpar.llm.language_model import LanguageModel
from onnxpar.runtime.session.bundle import Bundle
from onnxpar.runtime.session.session import Session


class Decoder:
    """A decoder that computes one batch of texts at a time, of any lengths. Shorter prompts are
    padded to the length of the longest one; masks and positions exclude the padding."""

    def __init__(self, session: Session, bundle: Bundle, model: LanguageModel) -> None:
        self._session = session
        self._model = model
        self._ports = bundle.inputs
        self._caches = frozenset(model.caches)
        self._mask = np.zeros((0, 0), np.int64)
        self._lengths = np.zeros(0, np.int64)
        self._lock = threading.Lock()
        self._batch = 0
        self._always: dict[str, Array] = {}

    def start(
        self, prompts: Sequence[Sequence[int]], given: Mapping[str, Array] | None = None
    ) -> tuple[int, Array]:
        """Begins a new batch with prompts of at least one token each, and forgets the last batch.
        Returns the number of the batch, for `step`, and the logits of the token after each prompt,
        (batch, vocabulary).

        given  further inputs by name: first values of caches, and inputs that all runs read

        Errors: InputError for prompts of different lengths, if the model has no mask to exclude
        padding.
        """
        with self._lock:
            self._batch += 1
            return self._batch, self._read(prompts, given or {})

    def _read(self, prompts: Sequence[Sequence[int]], given: Mapping[str, Array]) -> Array:
        """Begins a batch with these prompts, and returns the logits of the token after each,
        (batch, vocabulary). The caller holds the lock. `given` has first values of caches, and
        inputs that all runs read."""
        self._session.states.reset()
        self._lengths = np.array([len(p) for p in prompts])
        longest = int(self._lengths.max())
        is_single = self._model.is_single
        if (is_single or self._model.mask is None) and longest > self._lengths.min():
            lack = "reads one token at a time" if is_single else "has no attention mask"
            raise InputError(f"the model {lack}: give prompts of equally many tokens")
        caches = self._empty(len(prompts)) | {n: a for n, a in given.items() if n in self._caches}
        self._always = {n: a for n, a in given.items() if n not in self._caches}
        if is_single:
            self._lengths = np.zeros_like(self._lengths)
            self._mask = np.zeros((len(prompts), 0), np.int64)
            for column in zip(*prompts, strict=True):
                logits = self._append(column, caches)
                caches = {}
            return logits
        at = np.arange(longest)
        if self._model.pads_right:
            first, is_token = np.zeros_like(self._lengths), at < self._lengths[:, None]
        else:
            first = longest - self._lengths
            is_token = at >= first[:, None]
        tokens = np.zeros((len(prompts), longest), np.int64)
        for row, prompt in enumerate(prompts):
            tokens[row, first[row] : first[row] + len(prompt)] = prompt
        self._mask = is_token.astype(np.int64)
        positions = np.maximum(at - first[:, None], 0)
        logits = self._run(tokens, positions, caches)
        last: Array = first + self._lengths - 1
        return logits[np.arange(len(prompts)), last]

    def step(self, batch: int, tokens: Sequence[int]) -> Array:
        """Appends one token to each text of the batch number `batch`; returns the logits of the
        next token, (batch, vocabulary). Errors: InputError if another batch has begun meanwhile."""
        with self._lock:
            if batch != self._batch:
                raise InputError(
                    "another text was begun with this generator, and the ranks keep the caches of "
                    "the last one; finish a stream before, or generate both in one batch"
                )
            return self._append(tokens, {})

    def _append(self, tokens: Sequence[int], caches: dict[str, Array]) -> Array:
        """Appends one token to each text; returns the logits of the next token, (batch,
        vocabulary). `caches` are caches to feed, by name; without them, the ranks go on with the
        caches that they keep."""
        new = np.array(tokens, np.int64)[:, None]
        self._mask = self._longer_mask()
        positions = self._lengths[:, None].copy()
        self._lengths = self._lengths + 1
        return self._run(new, positions, caches)[:, -1]

    def _longer_mask(self) -> Array:
        """Returns the mask with one more 1 in each row: in a new last column, or, for a model that
        pads shorter rows at the right, behind the row's own tokens."""
        mask = np.pad(self._mask, ((0, 0), (0, 1)))
        if self._model.pads_right:
            mask[np.arange(len(mask)), self._lengths] = 1
        else:
            mask[:, -1] = 1
        return mask

    def _empty(self, batch: int) -> dict[str, Array]:
        """Returns caches of no tokens for `batch` texts, by name."""
        caches = {}
        for name in self._model.caches:
            port = self._ports[name]
            sizes = [s if isinstance(s, int) else 0 for s in port.shape or ()]
            sizes[0] = batch
            caches[name] = np.zeros(sizes, port.dtype)
        return caches

    def _run(self, tokens: Array, positions: Array, caches: dict[str, Array]) -> Array:
        """Runs the ranks once; returns the logits behind all new tokens, (batch, length,
        vocabulary). `caches` are caches to feed, by name; without them, the ranks go on with the
        caches that they keep."""
        model = self._model
        feeds = {model.tokens: tokens, **self._always, **caches}
        if model.mask is not None:
            feeds[model.mask] = self._mask
        if model.positions is not None:
            is_shared = len(self._ports[model.positions].shape or ()) == 1
            feeds[model.positions] = positions[0] if is_shared else positions
        feeds = {n: a.astype(self._ports[n].dtype, copy=False) for n, a in feeds.items()}
        (logits,) = self._session.run([model.logits], feeds, keep_states=True)
        return np.asarray(logits)
