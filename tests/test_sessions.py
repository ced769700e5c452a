# SPDX-License-Identifier: Apache-2.0

"""Sessions as files: a resumed conversation equals an uninterrupted one, bit for bit."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("msgspec")

from checkpoints import write_config
from engine_campaign import FAMILIES
from specops.disaggregated.sessions import Sessions
from specops.engine import Completion, Engine, SamplingParams
from test_kv_transfer import METHODS, NAIVE, STATES, make

GREEDY = SamplingParams(max_tokens=20, temperature=0.0, logprobs=2, seed=1)
SEEDED = replace(GREEDY, temperature=0.9, top_p=0.9, seed=7)
KINDS: dict[str, dict[str, Any]] = {
    "dense": {},
    "window": FAMILIES["gpt_oss"],
    "latent": FAMILIES["deepseek_v3"],
    "states": STATES,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    sizes = {"num_hidden_layers": 2, "max_position_embeddings": 192}
    return {
        kind: write_config(
            tmp_path_factory.mktemp(kind), **config | sizes, num_nextn_predict_layers=1
        )
        for kind, config in KINDS.items()
    }


def conversation(
    ask: Callable[[list[int], SamplingParams], Completion], params: SamplingParams
) -> list[tuple[Any, ...]]:
    """Hold a conversation of three turns, and repeat the last one; return all results.

    The second turn leaves the first answer's last tokens out, as a chat template may do.
    """
    draw = random.Random(1)
    text: list[int] = draw.choices(range(3, 150), k=37)
    results = []
    for left_out in (0, 3, 0):
        done = ask(text, params)
        results.append(result_of(done))
        text = text + done.token_ids[: len(done.token_ids) - left_out]
        text += draw.choices(range(3, 150), k=9)
    results.append(result_of(ask(text, params)))
    return [*results, result_of(ask(text, params))]


def result_of(done: Completion) -> tuple[Any, ...]:
    return done.token_ids, done.logprobs, done.stats, done.num_cached_tokens


CASES = [
    ("dense", {}, "naive"),
    ("dense", {}, "ngram"),
    ("dense", {}, "suffix"),
    ("dense", {}, "mtp"),
    ("dense", {"kv_cache_dtype": "int8"}, "mtp"),
    ("dense", {"kv_cache_dtype": "fp8_e4m3"}, "suffix"),
    ("window", {}, "suffix"),
    ("latent", {}, "mtp"),
    ("states", {}, "suffix"),
    ("states", {"kv_cache_dtype": "int8"}, "mtp"),
    ("states", {}, "draft_model"),
]


@pytest.mark.parametrize("kind,settings,method", CASES, ids=str)
@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_resumed_conversation_equals_an_uninterrupted_one(
    models: dict[str, Path],
    tmp_path: Path,
    kind: str,
    settings: dict[str, Any],
    method: str,
    params: SamplingParams,
) -> None:
    """Tokens, logprobs, drafts, accepted drafts and cached tokens are equal."""
    own = {"model": str(models["states"])} if method == "draft_model" else {}
    options = {**settings, "model": str(models[kind])}
    file = tmp_path / "a.session"

    def resumed(prompt: list[int], params: SamplingParams) -> Completion:
        engine = make(METHODS[method] | own, **options)
        sessions = Sessions(engine)
        if file.exists():
            assert sessions.restore(file, params) > 0
        (done,) = engine.generate([prompt], params)
        sessions.save(file, done, params)
        assert engine.num_free_pages == engine.num_pages
        return done

    def asking(engine: Engine) -> Callable[[list[int], SamplingParams], Completion]:
        return lambda prompt, params: engine.generate([prompt], params)[0]

    got = conversation(resumed, params)
    assert got == conversation(asking(make(METHODS[method] | own, **options)), params)
    plain = conversation(asking(make(NAIVE, **options, enable_prefix_caching=False)), params)
    assert [one[:2] for one in got] == [one[:2] for one in plain]
    if method not in ("naive", "ngram"):
        assert sum(one[2].num_draft_tokens for one in got) > 0
