"""The official client of OpenAI works with the server: answers, streams, errors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from lazily import lazily
from serve.scripted_engine import END, FOLDER, forever, says
from serve.servers import Served

from onnxpar.llm.sampling import Sampling
from onnxpar.llm.tokenizer import Tokenizer

USER: list[Any] = [{"role": "user", "content": "hello"}]
TEXT = "Größe: 😀 naïve"

openai = lazily("openai")


def test_models(served: Served) -> None:
    (model,) = served.openai.models.list().data
    assert model.id == "llama" and served.openai.models.retrieve("llama") == model
    with pytest.raises(openai.NotFoundError, match="there is no model 'a/b'") as found:
        served.openai.models.retrieve("a/b")
    assert found.value.code == "model_not_found"


def test_a_chat(served: Served) -> None:
    answer = served.openai.chat.completions.create(model="llama", messages=USER)
    (choice,) = answer.choices
    assert choice.message.content == "Hello, world!" and choice.message.role == "assistant"
    assert choice.finish_reason == "stop" and choice.logprobs is None
    (generation,) = served.engine.generations
    assert generation.prompt == Tokenizer(FOLDER).chat(USER)
    assert answer.usage is not None and answer.usage.prompt_tokens == len(generation.prompt)
    assert answer.usage.completion_tokens == generation.number
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 2


def test_a_stream_of_a_chat(served: Served) -> None:
    served.engine.script = says(TEXT)  # characters of several tokens
    stream = served.openai.chat.completions.create(
        model="llama", messages=USER, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    deltas = [c.choices[0].delta.content or "" for c in chunks if c.choices]
    assert "".join(deltas) == TEXT and len([d for d in deltas if d]) > 3
    assert [c.choices[0].finish_reason for c in chunks[:-1]][-1] == "stop"
    assert {c.id for c in chunks} == {chunks[0].id}
    usage = chunks[-1].usage
    assert not chunks[-1].choices and usage is not None
    assert usage.completion_tokens == served.engine.generations[0].number


def test_a_completion(served: Served) -> None:
    answer = served.openai.completions.create(model="llama", prompt="hello", echo=True)
    assert answer.choices[0].text == "helloHello, world!"
    assert served.engine.generations[0].limits.max_new_tokens == 16
    assert answer.object == "text_completion"


def test_a_stream_of_a_completion(served: Served) -> None:
    stream = served.openai.completions.create(model="llama", prompt="a", stream=True, echo=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "aHello, world!"


def test_prompts_of_every_kind(served: Served) -> None:
    create = served.openai.completions.create
    encode = Tokenizer(FOLDER).encode
    each: list[tuple[Any, list[list[int]]]] = [
        ("hello", [encode("hello")]),
        (["a", "b"], [encode("a"), encode("b")]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
        ("", [[0]]),
    ]
    for prompt, wanted in each:
        served.engine.generations.clear()
        answer = create(model="llama", prompt=prompt)
        assert [list(g.prompt) for g in served.engine.generations] == wanted
        assert [c.index for c in answer.choices] == list(range(len(wanted)))
        assert answer.usage is not None and answer.usage.prompt_tokens == sum(map(len, wanted))


def test_several_answers(served: Served) -> None:
    served.engine.script = lambda prompt, limits: iter([65 + limits.row] * 3)
    answer = served.openai.chat.completions.create(model="llama", messages=USER, n=3)
    texts = [choice.message.content for choice in answer.choices]
    assert len(set(texts)) == 3 and [c.index for c in answer.choices] == [0, 1, 2]
    stream = served.openai.chat.completions.create(model="llama", messages=USER, n=3, stream=True)
    streamed = [""] * 3
    for chunk in stream:
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts


def test_logprobs_of_a_chat(served: Served) -> None:
    served.engine.script = says("é!")
    answer = served.openai.chat.completions.create(
        model="llama", messages=USER, logprobs=True, top_logprobs=2
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    bytes_ = b"".join(bytes(entry.bytes or []) for entry in logprobs.content)
    assert bytes_.decode() == "é!"
    for entry in logprobs.content:
        assert entry.logprob == -0.5 and entry.top_logprobs[0].token == entry.token
        assert entry.top_logprobs[1].logprob == -9999  # JSON has no infinity
    stream = served.openai.chat.completions.create(
        model="llama", messages=USER, logprobs=True, stream=True
    )
    streamed = [c.choices[0].logprobs for c in stream]
    content = [entry for each in streamed if each and each.content for entry in each.content]
    assert [entry.token for entry in content] == [entry.token for entry in logprobs.content]
    assert not content[0].top_logprobs


def test_logprobs_of_a_completion(served: Served) -> None:
    answer = served.openai.completions.create(model="llama", prompt="x", logprobs=2)
    found = answer.choices[0].logprobs
    assert found is not None and found.tokens and found.text_offset and found.top_logprobs
    assert "".join(found.tokens) == "Hello, world!"
    for token, offset in zip(found.tokens, found.text_offset, strict=True):
        assert "Hello, world!"[offset:].startswith(token)
    assert found.token_logprobs == [-0.5] * len(found.tokens)


@pytest.mark.matrix
@pytest.mark.parametrize("stop", ["world", ["xyz", ", w"], "lo, wor"])
def test_stop_strings(served: Served, stop: Any) -> None:
    first = stop if isinstance(stop, str) else stop[-1]
    wanted = "Hello, world!".partition(first)[0]
    create = served.openai.chat.completions.create
    answer = create(model="llama", messages=USER, stop=stop)
    assert answer.choices[0].message.content == wanted
    assert answer.choices[0].finish_reason == "stop"
    stream = create(model="llama", messages=USER, stop=stop, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in stream) == wanted


def test_a_stop_string_cancels(served: Served) -> None:
    served.engine.script = forever
    answer = served.openai.completions.create(
        model="llama", prompt="x", max_tokens=400, stop=Tokenizer(FOLDER).decode([80])
    )
    assert answer.choices[0].finish_reason == "stop"
    assert served.engine.generations[0].ended.is_set()
    assert answer.usage is not None and answer.usage.completion_tokens < 400


def test_the_length_ends_an_answer(served: Served) -> None:
    served.engine.script = forever
    create = served.openai.chat.completions.create
    answer = create(model="llama", messages=USER, max_completion_tokens=5, max_tokens=9)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None and answer.usage.completion_tokens == 5
    create(model="llama", messages=USER)
    first, second = served.engine.generations
    assert first.limits.max_new_tokens == 5
    assert second.limits.max_new_tokens == 512 - len(second.prompt)


def test_how_tokens_are_chosen(served: Served) -> None:
    create = served.openai.chat.completions.create

    def sampling(**options: Any) -> Sampling:
        create(model="llama", messages=USER, **options)
        return served.engine.generations[-1].limits.sampling

    first, second = sampling(), sampling()
    assert first.do_sample and first.temperature == 1 and first.top_k == 0
    assert first.seed != second.seed
    assert not sampling(temperature=0).do_sample
    found = sampling(
        temperature=0.5,
        top_p=0.25,
        seed=-1,
        frequency_penalty=1,
        presence_penalty=-1,
        logit_bias={"7": -100},
        extra_body={"top_k": 3, "min_p": 0.5, "repetition_penalty": 1.5},
    )
    assert found == Sampling(
        True, 0.5, 3, 0.25, 0.5, 1.5, 1, -1, logit_bias={7: -100}, seed=2**64 - 1
    )
    assert served.engine.generations[-1].limits.ends == {END}


def test_messages_of_parts(served: Served) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages: Any = [{"role": "developer", "content": "x"}, {"role": "user", "content": parts}]
    served.openai.chat.completions.create(model="llama", messages=messages)
    chat = [{"role": "system", "content": "x"}, {"role": "user", "content": "a\nb"}]
    assert served.engine.generations[0].prompt == Tokenizer(FOLDER).chat(chat)


def test_errors_are_those_of_the_client(served: Served, serve: Callable[..., Served]) -> None:
    create = served.openai.chat.completions.create
    with pytest.raises(openai.NotFoundError):
        create(model="gpt-5", messages=USER)
    with pytest.raises(openai.BadRequestError, match="temperature is 9") as found:
        create(model="llama", messages=USER, temperature=9)
    assert found.value.param == "temperature" and found.value.type == "invalid_request_error"
    long: Any = [{"role": "user", "content": "x y " * 600}]
    with pytest.raises(openai.BadRequestError) as found:
        create(model="llama", messages=long)
    assert found.value.code == "context_length_exceeded"
    served.engine.most = 0
    with pytest.raises(openai.RateLimitError, match="the queue is full") as limited:
        create(model="llama", messages=USER)
    assert limited.value.response.headers["Retry-After"] == "1"
    for state in ("starting", "failed", "draining"):
        served.engine.state = state
        with pytest.raises(openai.InternalServerError) as unavailable:
            create(model="llama", messages=USER)
        assert unavailable.value.status_code == 503
    locked = serve(api_keys=(b"another",))
    with pytest.raises(openai.AuthenticationError, match="wrong API key"):
        locked.openai.models.list()


def test_ranks_that_fail(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    served.engine.fails = True
    create = served.openai.chat.completions.create
    for is_stream in (True, False):
        with pytest.raises(openai.InternalServerError, match="cannot finish") as found:
            list(create(model="llama", messages=USER, stream=is_stream))
        assert found.value.status_code == 503
    assert "a request failed: rank 1 has ended" in capsys.readouterr().err


def test_ranks_that_fail_within_a_stream(served: Served) -> None:
    served.engine.script, served.engine.delay = forever, 0.01
    stream = served.openai.chat.completions.create(model="llama", messages=USER, stream=True)
    next(stream)
    served.engine.fails = True
    with pytest.raises(openai.APIError, match="cannot finish"):
        list(stream)


def test_of_several_answers_all_or_none_are_taken(served: Served) -> None:
    served.engine.script, served.engine.most, served.engine.delay = forever, 2, 0.01
    with pytest.raises(openai.RateLimitError):
        served.openai.chat.completions.create(model="llama", messages=USER, n=3)
    first, second = served.engine.generations
    assert first.ended.wait(30) and second.ended.wait(30)
    assert math.prod(g.is_cancelled for g in (first, second)) == 1
