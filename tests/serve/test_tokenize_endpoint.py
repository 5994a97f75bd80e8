"""/tokenize and /detokenize, as vLLM documents them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from lazily import lazily
from serve.scripted_engine import FOLDER
from serve.servers import Served, until

tokenizers = lazily("tokenizers")
USER = [{"role": "user", "content": "gr\u00f6\u00dfer"}]
CHAT = "<s>user: gr\u00f6\u00dfer</s><s>assistant:"
Serve = Callable[..., Served]


def post(served: Served, path: str, **body: Any) -> dict[str, Any]:
    response = served.http.post(path, json=body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


@pytest.mark.parametrize("text", ["", "import os", "gr\u00f6\u00dfer \U0001f600", "<pad>x</s>"])
def test_a_text(served: Served, text: str) -> None:
    library = tokenizers.Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    wanted = library.encode(text)
    found = post(served, "/tokenize", prompt=text, model="llama")
    assert found == {
        "count": len(wanted.ids),
        "max_model_len": 512,
        "tokens": wanted.ids,
        "token_strs": None,
    }
    found = post(served, "/tokenize", prompt=text, return_token_strs=True, add_special_tokens=False)
    wanted = library.encode(text, add_special_tokens=False)
    assert found["tokens"] == wanted.ids and found["token_strs"] == wanted.tokens
    assert post(served, "/detokenize", tokens=found["tokens"]) == {"prompt": text}


def test_a_chat(served: Served) -> None:
    def text(**body: Any) -> str:
        found = post(served, "/tokenize", messages=USER, **body)
        assert found["count"] == len(found["tokens"])
        text: str = post(served, "/detokenize", tokens=found["tokens"], model="llama")["prompt"]
        return text

    assert text() == CHAT
    assert text(add_generation_prompt=False) == CHAT.removesuffix("<s>assistant:")
    assert text(continue_final_message=True) == "<s>user: gr\u00f6\u00dfer"
    assert text(chat_template_kwargs={"messages": None}, add_special_tokens=False) == CHAT
    served.post(messages=USER)
    found = post(served, "/tokenize", messages=USER)
    assert served.engine.generations[0].prompt == found["tokens"]


def test_a_key_is_needed(serve: Serve) -> None:
    served = serve(api_keys=(b"secret",))
    assert served.http.post("/tokenize", json={"prompt": "x"}).status_code == 401


def test_each_request_is_a_line(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    served = serve(access_log=True)
    served.post("completions")
    served.post("completions", stream=True)
    served.http.get("/health?a=%0ab")
    served.http.get("/no%0a" + "x" * 300)
    lines: list[str] = []

    def all_came() -> bool:  # a line comes behind its response
        lines.extend(capsys.readouterr().out.splitlines())
        return len(lines) == 4

    until(all_came)
    ends = (
        '"POST /v1/completions" 200',
        '"POST /v1/completions" 200',
        '"GET /health" 200',
        f'"GET /no%0a{"x" * 194}" 404',
    )
    for line, end in zip(lines, ends, strict=True):
        date, time, client, rest = line.split(" ", 3)
        assert rest.startswith(end) and rest.endswith(" s") and client.startswith("127.0.0.1:")
        assert len(date) == 10 and len(time) == 12
