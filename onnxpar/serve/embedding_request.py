"""Requests for embeddings, and for scores of a reranker, with their answers as JSON."""

from __future__ import annotations

import base64
import secrets
from abc import abstractmethod
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from onnxpar.base.arrays import Array
from onnxpar.base.errors import InputError
from onnxpar.llm.embedder import scores
from onnxpar.llm.encoder import Tokens
from onnxpar.llm.pooling import normalized
from onnxpar.serve.api_error import ApiError
from onnxpar.serve.request import Filled, Request, Texts, Whole, refuse
from onnxpar.serve.service import EmbeddingService


class EncoderRequest(Request):
    """A request to an embedding model or a reranker; `texts_field` is the name of the field that
    has its texts."""

    texts_field: ClassVar[str]

    @abstractmethod
    def tokens(self, service: EmbeddingService) -> list[Tokens]:
        """Returns the tokens of each text that the model reads."""

    @abstractmethod
    def answer(self, results: Array) -> dict[str, Any]:
        """Returns the JSON of the answer. `results` are the model's results for all texts, (texts,
        width)."""

    def check(self, service: Any) -> None:
        number, most = len(getattr(self, self.texts_field)), service.settings.max_inputs
        if number > most:
            refuse(self.texts_field, f"has {number} texts; at most {most} are allowed")

    def checked_tokens(self, service: EmbeddingService) -> Sequence[Tokens]:
        """Returns the tokens of each text that the model reads. Errors: ApiError for a text that is
        too long, say."""
        texts = self.tokens(service)
        for index, text in enumerate(texts):
            try:
                service.embedder.check(text)
            except InputError as error:
                where = f"[{index}]" if len(texts) > 1 else ""
                code = "context_length_exceeded" if len(text.ids) > service.longest else None
                message, param = f"{self.texts_field}{where}: {error}", self.texts_field
                raise ApiError(message, param=param, code=code) from None
        return texts


class EmbeddingRequest(EncoderRequest):
    """A request of /v1/embeddings."""

    texts_field: ClassVar[str] = "input"

    input: Texts
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Whole | None = Field(None, ge=1, le=2**31)

    def check(self, service: Any) -> None:
        most = service.embedder.model.width
        if self.dimensions is not None and self.dimensions > most:
            refuse("dimensions", f"is {self.dimensions}; it should be at most {most}")
        super().check(service)

    def tokens(self, service: EmbeddingService) -> list[Tokens]:
        read = service.embedder.tokens
        return [read(text) if isinstance(text, str) else Tokens(text) for text in self.input]

    def answer(self, results: Array) -> dict[str, Any]:
        if self.dimensions is not None and self.dimensions < results.shape[1]:
            results = normalized(results[:, : self.dimensions])
        data = [
            {"object": "embedding", "index": index, "embedding": self._written(vector)}
            for index, vector in enumerate(results)
        ]
        return {"data": data}

    def _written(self, vector: Array) -> Any:
        """Returns a vector for JSON: a list of numbers, or the base64 of its bytes."""
        if self.encoding_format == "base64":
            return base64.b64encode(vector.astype("<f4").tobytes()).decode()
        return vector.tolist()


_Document = Annotated[str, BeforeValidator(lambda v: v.get("text") if isinstance(v, dict) else v)]
"""A text, or an object with a text."""


class RerankRequest(EncoderRequest):
    """A request of /v1/rerank."""

    texts_field: ClassVar[str] = "documents"

    query: str
    documents: Filled[_Document]
    top_n: Whole = Field(2**31, ge=1, le=2**31)
    return_documents: bool = False

    def tokens(self, service: EmbeddingService) -> list[Tokens]:
        return [service.embedder.tokens(self.query, text) for text in self.documents]

    def answer(self, results: Array) -> dict[str, Any]:
        score_of = scores(results)
        best = sorted(range(len(score_of)), key=lambda index: -score_of[index])[: self.top_n]
        ranked = [self._result(index, float(score_of[index])) for index in best]
        return {"id": f"rerank-{secrets.token_hex(12)}", "results": ranked}

    def _result(self, index: int, score: float) -> dict[str, Any]:
        """Returns the entry of document number `index` in the answer."""
        document = {"document": {"text": self.documents[index]}} if self.return_documents else {}
        return {"index": index, "relevance_score": score, **document}
