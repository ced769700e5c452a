# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402  (where a package is missing, nothing else is imported)
"""Cached data of a request is invisible to clients with another key or another salt."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

for name in ("fastapi", "uvicorn", "pydantic", "prometheus_client", "jinja2", "httpx", "msgspec"):
    pytest.importorskip(name)

import httpx
from checkpoints import make_checkpoint, write_tokenizer
from fake_engine import FakeEngine
from serving import Served, serving
from specops.api.outputs import HIDDEN, StepDrafts, without_rejected
from specops.cli.serve import main
from specops.engine import Engine, EngineConfig, SamplingParams, SpeculativeConfig
from specops.server.clients import Clients, scoped_salt
from specops.service.file_lock import FileLock

KEYS = ["alice", "bob", "carol"]
PROMPT = list(range(20, 52))  # two pages


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    make_checkpoint(directory, "Qwen3", num_hidden_layers=1)
    write_tokenizer(directory)
    return directory


def make(model_dir: Path, **config: Any) -> Engine:
    speculative = SpeculativeConfig(
        method="suffix", num_speculative_tokens=6, adaptive_verification=False
    )
    settings: dict[str, Any] = {"dtype": "float32", "device": "cpu", "num_threads": 1}
    return Engine(
        EngineConfig(model=str(model_dir), speculative_config=speculative, **settings, **config)
    )


def ask(served: Served, key: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the content of an answer, without names and times."""
    request = {
        "max_tokens": 24,
        "temperature": 0.9,
        "seed": 4,
        "ignore_eos": True,
        "logprobs": 2,
        "stream": True,
        "stream_options": {"include_steps": True, "include_usage": True},
        **body,
    }
    response = httpx.post(
        f"{served.url}/v1/completions",
        json=request,
        headers={"Authorization": f"Bearer {key}"} if key else {},
        timeout=60,
    )
    assert response.status_code == 200, response.text
    frames = [json.loads(one[6:]) for one in response.text.split("\n\n")[:-2]]
    steps = [one["step"] for frame in frames for one in frame["choices"] if "step" in one]
    for step in steps:
        del step["seconds"]
    last = frames[-1]
    return {
        "steps": steps,
        "token_ids": [one for step in steps for one in step["token_ids"]],
        "usage": last["usage"],
        "metrics": last["metrics"],
    }


def probe(token_ids: list[int]) -> dict[str, Any]:
    """Return a request that may only emit token_ids[-1], so that all other drafts are rejected."""
    *known, last = token_ids
    return {"prompt": known, "allowed_token_ids": [last], "max_tokens": 5}


def rejected(answer: dict[str, Any]) -> list[Any]:
    """Return the tokens of rejected drafts."""
    return [
        token
        for step in answer["steps"]
        if step["drafts"] is not None
        for token in step["drafts"]["token_ids"][step["drafts"]["num_accepted"] :]
    ]


def cached(answer: dict[str, Any]) -> int:
    found: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return found


def accepted(answer: dict[str, Any]) -> int:
    found: int = answer["usage"]["completion_tokens_details"]["accepted_prediction_tokens"]
    return found


@pytest.fixture(scope="module")
def keyed(model_dir: Path) -> Iterator[Served]:
    with serving(make(model_dir), api_keys=KEYS) as served:
        yield served


def test_requests_of_one_key_are_invisible_to_another(keyed: Served) -> None:
    """After Alice's requests, Bob gets the drafts and counts that Carol got before them."""
    plain = ask(keyed, "carol", {"prompt": PROMPT})
    output_ids = plain["token_ids"]
    bodies = [
        {"prompt": PROMPT, "cache_salt": "x"},
        probe(PROMPT + output_ids[:6]),
        probe(output_ids[:4]),
    ]
    before = [ask(keyed, "carol", {**body, "cache_salt": f"{n}"}) for n, body in enumerate(bodies)]
    first = ask(keyed, "alice", {"prompt": PROMPT})
    assert first == plain
    second = ask(keyed, "alice", {"prompt": PROMPT})
    assert second["token_ids"] == output_ids, "reuse changes no token"
    assert cached(second) > 0 < accepted(second), "a key reuses its own cache"
    assert ask(keyed, "bob", {"prompt": PROMPT}) == plain
    for number, body in enumerate(bodies):
        assert ask(keyed, "bob", {**body, "cache_salt": f"{number}"}) == before[number]
    fresh = ask(keyed, "bob", {**bodies[2], "cache_salt": "new"})
    assert not set(rejected(fresh)) & (set(output_ids[4:]) - set(output_ids[:4]))
    # Alice does see her own drafts, so the comparisons above are not vacuous.
    own = rejected(ask(keyed, "alice", probe(output_ids[:4])))
    assert own[:2] == output_ids[4:6]


def test_salts_separate_requests_of_one_key(keyed: Served) -> None:
    prompt = [one + 60 for one in PROMPT]
    plain = ask(keyed, "alice", {"prompt": prompt, "cache_salt": "cold"})
    for salt in ("a", "b"):
        first = ask(keyed, "alice", {"prompt": prompt, "cache_salt": salt})
        assert first == plain, "as with empty caches"
        again = ask(keyed, "alice", {"prompt": prompt, "cache_salt": salt})
        assert cached(again) > 0 < accepted(again)
        assert again["token_ids"] == plain["token_ids"]
    assert cached(ask(keyed, "bob", {"prompt": prompt, "cache_salt": "a"})) == 0


def test_cache_scope_server_shares_caches_among_keys(model_dir: Path) -> None:
    """Rejected drafts are then counted, but their text is hidden."""
    with serving(make(model_dir), api_keys=KEYS, cache_scope="server") as served:
        output_ids = ask(served, "alice", {"prompt": PROMPT})["token_ids"]
        again = ask(served, "bob", {"prompt": PROMPT})
        assert again["token_ids"] == output_ids and cached(again) > 0 < accepted(again)
        found = rejected(ask(served, "bob", probe(output_ids[:4])))
        assert found and set(found) == {None}
        salted = ask(served, "bob", {"prompt": PROMPT, "cache_salt": "a"})
        assert cached(salted) == 0


def test_without_keys_clients_share_caches(model_dir: Path) -> None:
    with serving(make(model_dir)) as served:
        output_ids = ask(served, "", {"prompt": PROMPT})["token_ids"]
        again = ask(served, "", {"prompt": PROMPT})
        assert cached(again) > 0 < accepted(again)
        assert rejected(ask(served, "", probe(output_ids[:4])))[:2] == output_ids[4:6]


@pytest.mark.parametrize("keys", [[], KEYS])
def test_rejected_drafts_from_the_corpus_are_hidden(
    model_dir: Path, tmp_path: Path, keys: list[str]
) -> None:
    corpus = tmp_path / "corpus"
    engine = make(model_dir)
    text = engine.tokenizer.decode(list(range(40, 60)))
    corpus.write_text(text)
    token_ids = engine.tokenizer.encode(text, add_special_tokens=False)
    with serving(make(model_dir, suffix_corpus=str(corpus)), api_keys=keys) as served:
        for key in keys or [""]:
            answer = ask(served, key, probe(token_ids[:4]))
            found = rejected(answer)
            assert found and set(found) == {None}
            for step in answer["steps"]:
                for token, data in zip(
                    *(step["drafts"][name] for name in ("token_ids", "bytes"))
                    if step["drafts"]
                    else ([], []),
                    strict=True,
                ):
                    assert (token is None) <= (data == [])


def test_earlier_answers_are_used_only_with_their_salt(model_dir: Path) -> None:
    engine = Engine(
        EngineConfig(
            model=str(model_dir),
            dtype="float32",
            device="cpu",
            speculative_config=SpeculativeConfig.from_dict(
                {
                    "method": "suffix",
                    "num_speculative_tokens": 4,
                    "adaptive_verification": False,
                    "suffix_decoding_earlier_answers": 2,
                }
            ),
        )
    )
    stats = []
    for salt in ("a", "b", "b"):
        params = SamplingParams(max_tokens=20, seed=1, ignore_eos=True, cache_salt=salt)
        stats.append(engine.generate([PROMPT], params)[0].stats)
    assert stats[0] == stats[1]
    assert stats[2].num_accepted_tokens > stats[1].num_accepted_tokens


def test_rejected_drafts_of_named_methods_are_hidden() -> None:
    drafts = StepDrafts([5, 6, 7, 8], ["suffix", "suffix", "suffix", "mtp"], 1)
    assert without_rejected(drafts, {"suffix"}).token_ids == [5, HIDDEN, HIDDEN, 8]
    assert without_rejected(drafts, ()) == drafts


# ---- the salt of a request ----

CHAT = [{"role": "user", "content": "abc"}]
BODIES = {
    "completions": {"prompt": "abc", "max_tokens": 4},
    "chat/completions": {"messages": CHAT, "max_tokens": 4},
    "responses": {"input": "abc", "max_output_tokens": 4},
    "messages": {"messages": CHAT, "max_tokens": 4},
}


@pytest.mark.parametrize("path", BODIES)
def test_every_api_accepts_a_cache_salt(path: str) -> None:
    with serving(FakeEngine(), api_keys=KEYS) as served:

        def status(key: str, **more: Any) -> tuple[int, str]:
            answer = httpx.post(
                f"{served.url}/v1/{path}",
                content=json.dumps(BODIES[path] | more),
                headers={"x-api-key": key, "Content-Type": "application/json"},
            )
            return answer.status_code, answer.text

        for key in KEYS[:2]:
            for more in ({}, {"cache_salt": None}, {"cache_salt": "x"}, {"cache_salt": "y"}):
                assert status(key, **more)[0] == 200
        one, null, x, y, *others = served.engine.salts
        assert one == null and len({one, x, y, *others}) == 6
        scope = Clients(KEYS).cache_scope("key-0")
        assert (one, x) == (scoped_salt(scope, None), scoped_salt(scope, "x"))
        for wrong in ("", 3, ["x"], {}):
            code, text = status("bob", cache_salt=wrong)
            assert code == 400 and "cache_salt must be a" in text
        assert status("bob", cache_salt="\ud800")[0] == 400


def test_cache_scope_depends_on_the_key() -> None:
    one, other = Clients(["a", "b"]), Clients(["c", "b", "a"])
    assert one.cache_scope("key-0") == other.cache_scope("key-2") != one.cache_scope("key-1")
    assert one.cache_scope("key-0") != "a" and len(one.cache_scope("key-0")) == 64
    assert one.cache_scope("from 10.0.0.1") == "" and not one.shares_caches
    shared = Clients(["a", "b"], "server")
    assert shared.cache_scope("key-0") == "" and shared.shares_caches
    assert not Clients(["a"], "server").shares_caches
    assert scoped_salt("", None) is None
    assert len({scoped_salt(*one) for one in [("", "a"), ("a", None), ("a", "a"), ("b", "a")]}) == 4


@pytest.mark.parametrize("wrong", ["", 3, b"x", "\udc00"])
def test_cache_salt_must_be_a_nonempty_string(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"^cache_salt must be"):
        SamplingParams(cache_salt=wrong)


# ---- a file of two servers ----


def test_suffix_cache_file_is_locked_by_one_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "cache"
    holder = (
        "import sys; from specops.service.file_lock import FileLock\n"
        "lock = FileLock('suffix_cache', sys.argv[1]); print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", holder, str(file)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        assert main(["--suffix-cache", str(file), "--port", "0"]) == 2
        error = capsys.readouterr().err
        assert f"suffix_cache: {file} is in use by another server (process {process.pid})" in error
        process.kill()
    with FileLock("suffix_cache", str(file)):
        with pytest.raises(ValueError, match="is in use by another server"):
            FileLock("suffix_cache", str(file))
        lock = tmp_path / "cache.lock"
        assert lock.stat().st_mode & 0o777 == 0o600
    with FileLock("suffix_cache", str(file)):
        pass
    FileLock("suffix_cache", str(tmp_path / "nowhere" / "file"))  # the engine reports the error
