"""The chat page, in a browser."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from browser import BROWSER, PHONE, Browser, browser
from serve.scripted_engine import forever, says
from serve.servers import Served, until

pytestmark = pytest.mark.skipif(BROWSER is None, reason="there is no browser")


@pytest.fixture(scope="module")
def page() -> Iterator[Browser]:
    with browser() as opened:
        yield opened


def say(page: Browser, text: str) -> None:
    """Sends a message, as a user does."""
    page.run(f"document.getElementById('message').value = {json.dumps(text)}")
    page.run("document.getElementById('send').click()")


def texts(page: Browser, role: str) -> list[str]:
    """The texts of a role on the page."""
    found: list[str] = page.run(
        f"[...document.querySelectorAll('article.{role}')].map(each => each.textContent)"
    )
    return found


def is_shown(page: Browser, id: str) -> bool:
    return bool(page.run(f"document.getElementById('{id}').offsetParent !== null"))


@pytest.mark.slow
def test_a_chat(page: Browser, served: Served) -> None:
    text = "<b>Größe</b> & 😀\nend"
    served.engine.script = says(text)
    page.open(served.url)
    until(lambda: page.run("document.getElementById('model').textContent") == "llama")
    say(page, "hello")
    until(lambda: texts(page, "assistant") == [text] and is_shown(page, "send"))
    say(page, "again")
    until(lambda: texts(page, "assistant") == [text, text] and is_shown(page, "send"))
    assert texts(page, "user") == ["hello", "again"] and not texts(page, "error")
    first, second = served.engine.generations
    assert len(second.prompt) > len(first.prompt) + first.number  # the chat goes on
    page.run("document.getElementById('new').click()")
    assert not texts(page, "user")


def test_an_answer_comes_piece_by_piece_and_can_be_stopped(page: Browser, served: Served) -> None:
    served.engine.script, served.engine.delay = forever, 0.02
    page.open(served.url)
    say(page, "hello")
    until(lambda: len("".join(texts(page, "assistant"))) > 3)
    assert is_shown(page, "stop") and not is_shown(page, "send")
    page.run("document.getElementById('stop').click()")
    until(lambda: is_shown(page, "send"))
    (generation,) = served.engine.generations
    until(lambda: generation.ended.is_set())
    assert generation.is_cancelled and not texts(page, "error")


def test_keys_and_errors(page: Browser, serve: Callable[..., Served]) -> None:
    served = serve(api_keys=(b"right",))
    page.open(served.url)
    say(page, "hello")
    until(lambda: bool(texts(page, "error")))
    assert "needs an API key" in texts(page, "error")[0] and not texts(page, "assistant")
    until(lambda: is_shown(page, "send"))
    page.run("document.getElementById('key').value = 'right'")
    say(page, "hello")
    until(lambda: texts(page, "assistant") == ["Hello, world!"])
    served.engine.script, served.engine.delay = forever, 0.02
    until(lambda: is_shown(page, "send"))
    say(page, "hello")
    until(lambda: len(served.engine.generations) == 2 and served.engine.generations[1].number > 3)
    served.engine.fails = True
    until(lambda: len(texts(page, "error")) == 2)
    assert "cannot finish the answer" in texts(page, "error")[1]


@pytest.mark.slow
@pytest.mark.parametrize("is_dark", [False, True])
def test_on_a_phone(page: Browser, served: Served, is_dark: bool) -> None:
    served.engine.script = says("word " * 60 + "w" * 100)
    page.open(served.url, width=PHONE, dark=is_dark)
    say(page, "a" * 200)
    until(lambda: bool(texts(page, "assistant")) and is_shown(page, "send"))
    sizes: dict[str, Any] = page.run(
        "({width: document.documentElement.scrollWidth, "
        "bottom: document.getElementById('send').getBoundingClientRect().bottom, "
        "height: innerHeight})"
    )
    assert sizes["width"] <= PHONE and 0 < sizes["bottom"] <= sizes["height"]


def test_what_the_page_may_not_do(page: Browser, served: Served) -> None:
    page.open(served.url)
    script = "const s = document.createElement('script'); s.textContent = 'window.ran = 1'; "
    assert page.run(f"{script} document.body.append(s); window.ran === undefined")
    assert page.run("fetch('data:,x').then(() => 'sent', () => 'refused')") == "refused"
