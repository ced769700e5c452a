# SPDX-License-Identifier: Apache-2.0
"""Bodies with long lists are refused without building the lists."""
# ruff: noqa: E402  (where the server's packages are missing, nothing else is imported)

import json
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

for name in ("fastapi", "uvicorn", "pydantic", "prometheus_client", "jinja2", "msgspec"):
    pytest.importorskip(name)

from specops.server import outline, protocol
from specops.server.api_error import ApiError
from specops.server.generation import Generation
from specops.server.protocol import MAX_LISTS, CompletionRequest, parse

MAX_IDS = 6
MOST = {name: 3 for name in MAX_LISTS}


def outcome(body: bytes) -> Any:
    """Return the error of a body, or the request and its prompts."""
    engine: Any = SimpleNamespace(_capabilities=SimpleNamespace(max_model_len=MAX_IDS))
    try:
        request = parse(CompletionRequest, body, MAX_IDS)
        Generation._check_lengths(engine, request)
        return request, request.prompts()
    except ApiError as error:
        return error.status, error.body


def both(monkeypatch: pytest.MonkeyPatch, body: bytes) -> tuple[Any, Any]:
    """Return the outcomes with and without reading the outline first."""
    found = []
    for many in (0, 1 << 60):
        monkeypatch.setattr(outline, "_MANY", many)
        found.append(outcome(body))
    return found[0], found[1]


WORDS = ["a", "b,c", "[", "]", "{", '"', '\\",', '"\\"', "\u00fc", "\ud800", '"bad_words": [1]', ""]
BODIES = [
    {"prompt": list(range(7))},
    {"prompt": list(range(6))},
    {"prompt": [*range(6), "7"]},
    {"prompt": [1.0, *range(6)]},
    {"prompt": [True, *range(6)]},
    {"prompt": [1, 2.0, True, None, *range(6)]},
    {"prompt": [[1], *range(300)]},
    {"prompt": [1, *range(2), [1] * 7]},
    {"prompt": [list(range(7)), [1]]},
    {"prompt": [[1], list(range(7))]},
    {"prompt": ["a", list(range(7))]},
    {"prompt": [{"a": 1}, list(range(7))]},
    {"prompt": [[[1] * 7]]},
    {"prompt": [10**30] * 7},
    {"prompt": ["a"] * 300},
    {"prompt": {"a": [1] * 7}},
    {"prompt": "a", "bad_words": WORDS[:9]},
    {"prompt": "a", "bad_words": ["b,c", "d,e", "f,g"]},
    {"prompt": "a", "bad_words": "a,b,c,d,e"},
    {"prompt": "a", "bad_words": {"a": [1] * 9}},
    {"prompt": "a", "bad_words_token_ids": [[1, 2, 3, 4], [5, 6], [7]]},
    {"prompt": "a", "bad_words_token_ids": [[1, 2], [3], [4], [5], 6]},
    {"prompt": "a", "bad_words_token_ids": [[[1]], [["]"]], [3], [4], [5], 6]},
    {"prompt": "a", "logit_bias": {str(i): 1 for i in range(4)}},
    {"prompt": "a", "logit_bias": {"a,b": 1, "c,d": [1, 2, {"e": [1]}]}},
    {"prompt": "a", "allowed_token_ids": list(range(4)), "user": WORDS[10]},
    {"prompt": [1] * 7, "metadata": {"prompt": [1] * 7}},
    {"prompt": [1] * 7, "bad_words": ["a"] * 9},
    {"prompt": [1] * 7, "model": 5},
    {"prompt": [1] * 7, "no_such": [1] * 7},
    {"prompt": [1] * 7, "tools": [1] * 7},
    [{"prompt": [1] * 7}],
]
SPELLINGS = [
    b'{"prompt": [1,1,1,1,1,1,1], "prompt": "a"}',
    b'{"prompt": "a", "prompt": [1,1,1,1,1,1,1]}',
    b'{"prompt": "a", "bad_words": [1,2,3,4], "bad_words": [1,2,3,4]}',
    b'{"prom\\u0070t": [1,1,1,1,1,1,1]}',
    b'\xef\xbb\xbf { "prompt"\n:\t[ -1 , 1,1,1,1,1,1\r] } ',
    b'{"prompt": [1,1,1,1,1,1,NaN]}',
    b'{"prompt": [1,1,1,1,1,1,]}',
    b'{"prompt": [1,1,1,1,1,1,1]} x',
    b'{"prompt": [01,1,1,1,1,1,1]}',
    b'{"prompt": [1,1,1,1,1,1,1], "user": "\xff"}',
    b'{"prompt": [1,1,1,1,1,1,1], "user": "\\ud800"}',
    b'{"prompt": [1,1,1,1,1,1,1], "seed": 1e999}',
    b'{"prompt": [1,1,1,1,1,1,1], "metadata": {"a": "b", "a": "c"}}',
    b'{"prompt": "a", "bad_words": ["a","b","c",NaN,"d"]}',
    b'{"prompt": ' + b"[" * 3000 + b",]" * 3000 + b"}",
]


def test_outline_changes_no_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "MAX_LISTS", MOST)
    draw = random.Random(0)
    texts = [json.dumps(body).encode() for body in BODIES] + SPELLINGS
    for body in BODIES:
        texts.append(json.dumps(body, separators=(",", ":")).encode())
        texts.append(json.dumps(body, ensure_ascii=False, indent=1).encode("utf-8", "replace"))
    for _ in range(500):
        prompt: Any = [draw.choice([1, [1], [1] * 7, "a", "b,[", 2.5]) for _ in range(9)]
        values: Any = {"prompt": draw.choice([prompt, prompt[:3], draw.choice(prompt)])}
        for field in draw.sample(sorted(MOST), 2):
            values[field] = [
                draw.choice([*WORDS, 1, [1], [2, "a"]]) for _ in range(draw.randint(0, 6))
            ]
        texts.append(json.dumps(values).encode())
    num_long = 0
    for text in texts:
        with_outline, without = both(monkeypatch, text)
        assert with_outline == without, text
        monkeypatch.setattr(outline, "_MANY", 0)
        num_long += bool(outline.without_long_lists(text, MOST, MAX_IDS)[1])
    assert num_long > 100


LONG_LISTS: dict[str, Callable[[], Any]] = {
    "prompt": lambda: [i % 1000 for i in range(600_000)],
    "prompts": lambda: [[i % 1000 for i in range(600_000)]],
    "bad_words": lambda: [f"w,{i}" for i in range(300_000)],
    "bad_words_token_ids": lambda: [[i, 1] for i in range(300_000)],
    "allowed_token_ids": lambda: list(range(400_000)),
    "logit_bias": lambda: {str(i): 1 for i in range(300_000)},
}


@pytest.mark.parametrize("name", LONG_LISTS)
def test_long_lists_are_not_built(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    body = {"prompt": "a", name.replace("prompts", "prompt"): LONG_LISTS[name]()}
    lengths = []

    def loads(text: str, **options: Any) -> Any:
        lengths.append(len(text))
        return json.JSONDecoder(object_pairs_hook=options["object_pairs_hook"]).decode(text)

    text = json.dumps(body).encode()
    monkeypatch.setattr(protocol.json, "loads", loads)
    status, error = outcome(text)
    assert status == 400 and error["error"]["param"] in body
    assert lengths and max(lengths) < 100
