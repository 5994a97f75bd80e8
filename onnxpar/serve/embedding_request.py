"""Reads requests for embeddings and for scores, and writes their answers."""

from __future__ import annotations

import base64
import secrets
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from onnxpar.base.arrays import Array
from onnxpar.errors import InputError
from onnxpar.llm.embedder import scores
from onnxpar.llm.encoder import Tokens
from onnxpar.llm.pooling import normalized
from onnxpar.serve.api_error import ApiError
from onnxpar.serve.body import Fields
from onnxpar.serve.service import EmbeddingService
from onnxpar.serve.texts import texts_or_ids
from onnxpar.serve.wanted import check_model


class EncoderRequest(ABC):
    """A request to an embedding model or a reranker. Errors: ApiError.

    texts  what the model reads
    """

    texts: Sequence[Tokens]

    @abstractmethod
    def __init__(self, fields: Fields, service: EmbeddingService) -> None: ...

    @abstractmethod
    def answer(self, results: Array) -> dict[str, Any]:
        """Returns the JSON of the answer, of the results of all texts."""

    @property
    def usage(self) -> dict[str, int]:
        """The numbers of tokens."""
        total = sum(len(text.ids) for text in self.texts)
        return {"prompt_tokens": total, "total_tokens": total}


class EmbeddingRequest(EncoderRequest):
    """A request of /v1/embeddings."""

    def __init__(self, fields: Fields, service: EmbeddingService) -> None:
        check_model(fields, service.settings)
        self._model = service.settings.model_name
        form = fields.text("encoding_format") or "float"
        if form not in ("float", "base64"):
            fields.refuse("encoding_format", "must be float or base64")
        self._is_base64 = form == "base64"
        self._width = fields.whole("dimensions", 1, service.embedder.model.width)
        given = texts_or_ids(fields, "input")
        _check_number(fields, "input", len(given), service)
        embedder = service.embedder
        self.texts = [
            _checked(
                fields,
                _where("input", index, len(given)),
                embedder.tokens(each) if isinstance(each, str) else Tokens(each),
                service,
            )
            for index, each in enumerate(given)
        ]

    def answer(self, results: Array) -> dict[str, Any]:
        if self._width is not None and self._width < results.shape[1]:
            results = normalized(results[:, : self._width])
        data = [
            {"object": "embedding", "index": index, "embedding": self._written(vector)}
            for index, vector in enumerate(results)
        ]
        return {"object": "list", "data": data, "model": self._model, "usage": self.usage}

    def _written(self, vector: Array) -> str | list[float]:
        """A vector in JSON."""
        if self._is_base64:
            return base64.b64encode(vector.astype("<f4").tobytes()).decode()
        found: list[float] = vector.tolist()
        return found


class RerankRequest(EncoderRequest):
    """A request of /v1/rerank."""

    def __init__(self, fields: Fields, service: EmbeddingService) -> None:
        check_model(fields, service.settings)
        self._model = service.settings.model_name
        query = fields.text("query")
        if query is None:
            fields.refuse("query", "is missing; give a text")
        found = fields.array("documents")
        if not found:
            fields.refuse("documents", "is missing or empty; give a list of texts")
        _check_number(fields, "documents", len(found), service)
        self._documents = [_document(fields, each) for each in found]
        most = fields.whole("top_n", 1, 2**31)
        self._most = len(found) if most is None else most
        self._returns = fields.flag("return_documents")
        self.texts = [
            _checked(
                fields,
                _where("documents", index, len(found)),
                service.embedder.tokens(query, text),
                service,
            )
            for index, text in enumerate(self._documents)
        ]

    def answer(self, results: Array) -> dict[str, Any]:
        found = scores(results)
        best = sorted(range(len(found)), key=lambda index: -found[index])[: self._most]
        return {
            "id": f"rerank-{secrets.token_hex(12)}",
            "object": "list",
            "model": self._model,
            "usage": self.usage,
            "results": [self._result(index, float(found[index])) for index in best],
        }

    def _result(self, index: int, score: float) -> dict[str, Any]:
        """What is told of a document."""
        result: dict[str, Any] = {"index": index, "relevance_score": score}
        return result | ({"document": {"text": self._documents[index]}} if self._returns else {})


def _document(fields: Fields, value: object) -> str:
    """The text of a document: a string, or an object that has one."""
    return fields.valid_text("documents", value.get("text") if isinstance(value, dict) else value)


def _check_number(fields: Fields, name: str, number: int, service: EmbeddingService) -> None:
    """Errors: ApiError for too many texts."""
    most = service.settings.max_inputs
    if number > most:
        fields.refuse(name, f"has {number} texts; at most {most} are allowed")


def _where(name: str, index: int, number: int) -> str:
    """A text as messages name it."""
    return name if number == 1 else f"{name}[{index}]"


def _checked(fields: Fields, where: str, text: Tokens, service: EmbeddingService) -> Tokens:
    """A text that the model can read. Errors: ApiError."""
    try:
        service.embedder.check(text)
    except InputError as error:
        is_long = len(text.ids) > service.longest
        code = "context_length_exceeded" if is_long else None
        raise ApiError(f"{where}: {error}", param=where.partition("[")[0], code=code) from None
    return text
