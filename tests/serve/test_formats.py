"""Logprobs of tokens whose bytes are parts of characters."""

from __future__ import annotations

from onnxpar.llm.requests import Token
from onnxpar.llm.sampling import Sampling
from onnxpar.serve.formats import CompletionFormat
from onnxpar.serve.wanted import Wanted

BYTES = {1: b"\xc3", 2: b"\xa9", 3: b"?", 4: b"\xc4", 5: "\u20ac!".encode()}


def test_tokens_with_other_bytes_differ() -> None:
    wanted = Wanted([], 1, Sampling(), None, (), 2, False, False)
    form = CompletionFormat("m", wanted, BYTES.__getitem__, [""])
    tokens = [
        Token(1, -0.5, [(4, -0.2), (3, -0.3)]),
        Token(2, -0.1, [(2, -0.1)]),
        Token(3, -0.4, [(3, -0.4)]),
        Token(5, -0.6, [(5, -0.6)]),
        Token(3, -0.7, [(3, -0.7)]),
    ]
    found = form._logprobs(0, tokens)
    assert found["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", "?", "\u20ac!", "?"]
    assert found["text_offset"] == [0, 0, 1, 2, 4]
    assert found["top_logprobs"][0] == {"bytes:\\xc4": -0.2, "?": -0.3, "bytes:\\xc3": -0.5}
