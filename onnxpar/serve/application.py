"""The routes of the server, as an ASGI application."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from onnxpar.serve.api_error import ApiError, JsonResponse
from onnxpar.serve.chat_page import chat_page, embedding_page
from onnxpar.serve.chat_request import ChatCompletionRequest
from onnxpar.serve.embedding_endpoint import EmbeddingAnswering
from onnxpar.serve.embedding_request import EmbeddingRequest, RerankRequest
from onnxpar.serve.endpoint import Visiting
from onnxpar.serve.event_stream import NumberedEventStream
from onnxpar.serve.formats import ChatFormat, CompletionFormat
from onnxpar.serve.generation_endpoint import Answering
from onnxpar.serve.generation_request import CompletionRequest
from onnxpar.serve.guards import Guards, Measured
from onnxpar.serve.metrics import CONTENT_TYPE
from onnxpar.serve.request import unknown_model
from onnxpar.serve.responses_format import ResponsesFormat
from onnxpar.serve.responses_request import ResponsesRequest
from onnxpar.serve.served_engine import Served, ServedEmbedder
from onnxpar.serve.service import EmbeddingService, GeneratingService, Service
from onnxpar.serve.settings import Settings
from onnxpar.serve.tokenize_endpoint import Tokenizing, detokenize, tokenize

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES = "/v1/responses"
EMBEDDINGS, RERANK = "/v1/embeddings", "/v1/rerank"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"


def application(engine: Served, settings: Settings) -> Starlette:
    """Returns the ASGI application that serves an engine or an embedder; its `state.service` is the
    `Service`. Errors: InputError for wrong settings."""
    service, answering = _answering(engine, settings)
    pages = _Pages(service, list(answering))
    routes = [
        Route("/", pages.chat),
        Route("/health", pages.health),
        Route("/metrics", pages.metrics),
        Route("/v1/models", pages.models),
        Route("/v1/models/{name:path}", pages.model),
        *(
            Route(path, answering.get(path, pages.elsewhere), methods=["POST"])
            for path in (CHAT, COMPLETIONS, RESPONSES, EMBEDDINGS, RERANK, TOKENIZE, DETOKENIZE)
        ),
    ]
    paths = [route.path for route in routes]
    middleware = [
        Middleware(Measured, metrics=service.metrics, routes=paths, log=settings.access_log)
    ]
    if settings.cors_origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=settings.cors_origins,
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
            )
        )
    middleware.append(Middleware(Guards, settings=settings))
    app = Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers={HTTPException: _http_error, ApiError: _api_error},
    )
    app.router.redirect_slashes = False
    app.state.service = service
    return app


def _answering(engine: Served, settings: Settings) -> tuple[Service, Mapping[str, Visiting]]:
    """Returns the service, and the endpoints for this kind of model, by path."""
    if not isinstance(engine, ServedEmbedder):
        service = GeneratingService(engine, settings)
        return service, {
            CHAT: Answering(service, ChatCompletionRequest, ChatFormat),
            COMPLETIONS: Answering(service, CompletionRequest, CompletionFormat),
            RESPONSES: Answering(
                service, ResponsesRequest, ResponsesFormat, stream=NumberedEventStream
            ),
            TOKENIZE: Tokenizing(service, tokenize),
            DETOKENIZE: Tokenizing(service, detokenize),
        }
    embedding = EmbeddingService(engine, settings)
    if engine.model.pooling is None:
        return embedding, {RERANK: EmbeddingAnswering(embedding, RerankRequest)}
    return embedding, {EMBEDDINGS: EmbeddingAnswering(embedding, EmbeddingRequest)}


class _Pages:
    """The routes that do not run the model: pages, status, metrics and the list of models. `paths`
    are the paths of the routes that do run the model."""

    def __init__(self, service: Service, paths: Sequence[str]) -> None:
        self._service, self._paths = service, paths

    async def chat(self, request: Request) -> Response:
        """Returns the page to chat with the model, or one that describes a model of another
        kind."""
        if CHAT in self._paths:
            return chat_page()
        return embedding_page(self._service.kind, self._paths[0])

    async def elsewhere(self, request: Request) -> Response:
        """Errors: ApiError that names the right paths, always: the path is for another kind of
        model."""
        name, kind = self._service.settings.model_name, self._service.kind
        text = f"{name!r} is {kind}; send requests to {' or '.join(self._paths)}"
        raise ApiError(text, code="wrong_kind_of_model")

    async def health(self, request: Request) -> Response:
        """Returns the status of the server; the HTTP status is 200 if it is ready, else 503."""
        status = self._service.status
        return JsonResponse({"status": status}, 200 if status == "ready" else 503)

    async def metrics(self, request: Request) -> Response:
        return Response(self._service.metrics.text(), media_type=CONTENT_TYPE)

    async def models(self, request: Request) -> Response:
        return JsonResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self._service.settings.model_name:
            raise unknown_model(name, self._service.settings)
        return JsonResponse(self._model())

    def _model(self) -> dict[str, object]:
        """Returns the entry of the model in the list of models."""
        service = self._service
        return {
            "id": service.settings.model_name,
            "object": "model",
            "created": service.created,
            "owned_by": "onnxpar",
            "max_model_len": service.longest,
        }


async def _api_error(request: Request, error: Exception) -> Response:
    """Returns the response for an ApiError that an endpoint raises."""
    assert isinstance(error, ApiError), "it is the handler of these"
    return error.response()


async def _http_error(request: Request, error: Exception) -> Response:
    """Returns the response for an unknown path or method."""
    assert isinstance(error, HTTPException), "it is the handler of these"
    path = request.url.path[:100]
    text = {404: f"there is no {path}", 405: f"{path} has no method {request.method}"}
    api_error = ApiError(
        text.get(error.status_code, error.detail), error.status_code, headers=error.headers
    )
    return api_error.response()
