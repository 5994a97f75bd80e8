"""When answers end, what of them is shown, and the tokens of their prompts."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from llm.test_streamed_text import family
from serve.scripted_engine import END, FOLDER, forever, says
from serve.servers import Served

from onnxpar.llm.tokenizer import Tokenizer

PAD = 2
SCRIPT = [72, PAD, 73, END, 74, 75, END, 76]
"""Letters with special tokens between them."""
A, B, C, D, E = (Tokenizer(FOLDER).decode([token]) for token in (72, 73, 74, 75, 76))


@pytest.fixture
def scripted(served: Served) -> Served:
    served.engine.script = lambda prompt, limits: iter(SCRIPT)
    return served


def answer(served: Served, **body: Any) -> tuple[str, str, int]:
    """The text of a completion, why it ended, and the number of its tokens; a stream is the same,
    and a chat."""
    body = {"max_tokens": 8, **body}
    found = served.post("completions", **body).json()
    (choice,) = found["choices"]
    chat = served.post(**body).json()["choices"][0]
    assert (chat["message"]["content"], chat["finish_reason"]) == (
        choice["text"],
        choice["finish_reason"],
    )
    chunks = list(
        served.openai.completions.create(
            model="llama", prompt="hello", stream=True, extra_body=body
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks) == choice["text"]
    assert chunks[-1].choices[0].finish_reason == choice["finish_reason"]
    return choice["text"], choice["finish_reason"], found["usage"]["completion_tokens"]


def test_what_ends_an_answer(scripted: Served) -> None:
    assert answer(scripted) == (A + B, "stop", 4)
    assert answer(scripted, stop="<pad>") == (A, "stop", 2)
    assert answer(scripted, stop=["xyz", "</s>", "<pad>"]) == (A, "stop", 2)
    assert answer(scripted, stop_token_ids=[73]) == (A, "stop", 3)
    assert answer(scripted, stop_token_ids=[PAD, 5]) == (A, "stop", 2)
    assert answer(scripted, stop_token_ids=[]) == (A + B, "stop", 4)


def test_the_end_of_the_model_may_be_ignored(scripted: Served) -> None:
    everything = A + B + C + D + E
    assert answer(scripted, ignore_eos=True) == (everything, "length", 8)
    assert answer(scripted, ignore_eos=True, stop_token_ids=[75]) == (A + B + C, "stop", 6)
    assert answer(scripted, ignore_eos=True, stop="</s>") == (A + B, "stop", 4)
    assert answer(scripted, ignore_eos=True, stop=D) == (A + B + C, "stop", 6)


def test_what_ends_an_answer_may_be_shown(scripted: Served) -> None:
    shown = {"include_stop_str_in_output": True}
    assert answer(scripted, stop=B, **shown) == (A + B, "stop", 3)
    assert answer(scripted, stop_token_ids=[73], **shown) == (A + B, "stop", 3)
    assert answer(scripted, stop="<pad>", **shown) == (A, "stop", 2)  # has no text
    both = {**shown, "skip_special_tokens": False}
    assert answer(scripted, stop="<pad>", **both) == (f"{A}<pad>", "stop", 2)
    assert answer(scripted, **both) == (f"{A}<pad>{B}</s>", "stop", 4)


def test_special_tokens_may_be_shown(scripted: Served) -> None:
    shown = {"skip_special_tokens": False}
    assert answer(scripted, **shown) == (f"{A}<pad>{B}", "stop", 4)
    assert answer(scripted, **shown, stop="<pad>") == (A, "stop", 2)
    assert answer(scripted, **shown, stop=f"d>{B}") == (f"{A}<pa", "stop", 3)
    assert answer(scripted, skip_special_tokens=True) == (A + B, "stop", 4)


def test_stop_strings_count_after_the_least_tokens(scripted: Served) -> None:
    assert answer(scripted, stop=A)[0] == "" and answer(scripted, stop=A, min_tokens=1)[0] == A + B
    assert scripted.engine.generations[-1].limits.min_new_tokens == 1
    assert answer(scripted, stop=B, min_tokens=2) == (A, "stop", 3)


def test_the_tokens_of_a_prompt(served: Served) -> None:
    """As clients score continuations of a prompt: the sum over the tokens behind it, but the last,
    which is new."""
    served.engine.script = lambda prompt, limits: iter([END])
    first, second = [0, 72, PAD, 73], [74]
    for stream in (False, True):
        body = {"prompt": [first, second], "echo": True, "logprobs": 2, "max_tokens": 1}
        if stream:
            chunks = served.openai.completions.create(
                model="llama", stream=True, prompt=body.pop("prompt"), extra_body=body
            )
            found = [[c for c in each] for each in ([], [])]
            for chunk in chunks:
                found[chunk.choices[0].index].append(chunk.choices[0].model_dump())
            choices = [
                {
                    "text": "".join(c["text"] for c in each),
                    "logprobs": {
                        name: [*chain(*(c["logprobs"][name] for c in each if c["logprobs"]))]
                        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
                    },
                }
                for each in found
            ]
        else:
            choices = served.post("completions", **body).json()["choices"]
        assert [choice["text"] for choice in choices] == [A + B, C]
        one, two = (choice["logprobs"] for choice in choices)
        assert one["tokens"] == ["<s>", A, "<pad>", B, "</s>"] and two["tokens"] == [C, "</s>"]
        assert one["token_logprobs"] == [None, -0.25, -0.5, -0.75, -0.5]
        assert two["token_logprobs"] == [None, -0.5]
        assert one["text_offset"] == [0, 0, 1, 1, 2] and two["text_offset"] == [0, 1]
        assert one["top_logprobs"][0] is None and one["top_logprobs"][1][A] == -0.25
        assert len(one["top_logprobs"][3]) == 2
        assert sum(one["token_logprobs"][2:-1]) == -1.25
    assert all(generation.limits.tells_prompt for generation in served.engine.generations)


@pytest.mark.parametrize("logprobs", [None, 0, 3])
def test_a_prompt_alone(served: Served, logprobs: int | None) -> None:
    served.engine.script = says("and more")
    body = {"prompt": "na\u00efve", "echo": True, "max_tokens": 0}
    found = served.post("completions", **body, logprobs=logprobs).json()
    (choice,) = found["choices"]
    assert choice["text"] == "na\u00efve" and choice["finish_reason"] == "length"
    assert found["usage"]["completion_tokens"] == 0
    if logprobs is None:
        assert choice["logprobs"] is None
        return
    tokens = Tokenizer(FOLDER).encode("na\u00efve")
    assert len(choice["logprobs"]["tokens"]) == len(tokens)
    assert choice["logprobs"]["token_logprobs"][1:] == [-0.25 * at for at in range(1, len(tokens))]


def test_a_prompt_before_an_answer(served: Served) -> None:
    served.engine.script = says("\u00e9 x")
    body = {"prompt": "\u00e0b", "echo": True, "logprobs": 0, "n": 2}
    choices = served.post("completions", **body).json()["choices"]
    for choice in choices:
        assert choice["text"] == "\u00e0b\u00e9 x"
        found = choice["logprobs"]
        assert len(found["tokens"]) == len(found["text_offset"]) == len(found["token_logprobs"])
        for token, begin in zip(found["tokens"], found["text_offset"], strict=True):
            if not token.startswith("bytes:") and token != "</s>":
                assert choice["text"][begin:].startswith(token)


def test_a_tokenizer_may_have_more_tokens_than_the_model(served: Served) -> None:
    served.engine.vocabulary = 300
    served.engine.script = forever
    body = {"max_tokens": 200, "response_format": {"type": "json_object"}, "logprobs": True}
    choice = served.post(**body).json()["choices"][0]
    assert choice["logprobs"]["content"]
    constraint = served.engine.generations[-1].limits.constraint
    assert constraint is not None and len(constraint.allowed()) == 300
    found = served.post("completions", logprobs=1, stop="<pad>").json()["choices"][0]
    assert found["logprobs"]["tokens"]


def test_a_space_between_prompt_and_answer_stays(served: Served, tmp_path: Path) -> None:
    """Tokenizers such as that of Llama 2 leave it out at the beginning of a text, as of one that
    answers a chat."""
    made = family("byte fallback without the first space")
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text("{{ messages[-1].content }}")
    served.engine.tokenizer = Tokenizer(tmp_path)
    ids = made.encode("b \u4f60").ids
    served.engine.script = lambda prompt, limits: iter(ids)
    assert made.decode(ids) == "b \u4f60"
    for prompt in ("a", "\u4f60", made.encode("a\u4f60").ids):
        body = {"prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": len(ids)}
        choice = served.post("completions", **body).json()["choices"][0]
        begin = prompt if isinstance(prompt, str) else "a\u4f60"
        assert choice["text"] == begin + " b \u4f60"
        assert choice["logprobs"]["text_offset"][-len(ids) :][:2] == [len(begin), len(begin) + 1]
    body = {"max_tokens": len(ids)}
    assert served.post(**body).json()["choices"][0]["message"]["content"] == "b \u4f60"
    chat = [{"role": "assistant", "content": "a"}]
    continued = served.post(messages=chat, continue_final_message=True, **body).json()
    assert continued["choices"][0]["message"]["content"] == " b \u4f60"


def test_options_of_the_template(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = served.engine.tokenizer
    begun = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I am"}]

    def prompt(messages: Any = begun, **body: Any) -> str:
        assert served.post(messages=messages, **body).status_code == 200
        text: str = tokenizer.decode(served.engine.generations[-1].prompt, specials=True)
        return text

    whole = prompt()
    assert whole == prompt(add_generation_prompt=True, continue_final_message=False)
    without = prompt(add_generation_prompt=False)
    assert whole.startswith(without) and len(whole) > len(without)
    continued = prompt(continue_final_message=True)
    assert continued.endswith("I am") and without.startswith(continued)
    messages = [{**begun[0], "name": "Ada"}, {**begun[1], "reasoning": "hm", "refusal": None}]
    template = "{{ messages[0].name }} {{ messages[1].reasoning_content }} {{ messages | length }}"
    monkeypatch.setattr(tokenizer._template, "_template", template)
    assert prompt(messages) == "Ada hm 2"
    template = "{{ messages[0].content }}{{ mood }}{{ bos_token }}"
    monkeypatch.setattr(tokenizer._template, "_template", template)
    given = {"mood": "gently", "bos_token": "!", "self": 1, "add_generation_prompt": None}
    assert prompt(chat_template_kwargs=given) == "higently!"
