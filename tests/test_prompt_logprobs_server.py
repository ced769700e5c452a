# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402  (where the server's packages are missing, nothing else is imported)
"""Log-probabilities of prompts over HTTP: OpenAI's echo, vLLM's field and lm-eval's request."""

import json
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest

for name in ("fastapi", "uvicorn", "pydantic", "prometheus_client", "jinja2", "httpx"):
    pytest.importorskip(name)

import httpx
import torch
from checkpoints import make_checkpoint, write_tokenizer
from fake_engine import byte_tokenizer
from serving import Served, serving
from specops.engine import Engine, EngineConfig, SamplingParams, SpeculativeConfig
from specops.server.chat import ChatFormat
from specops.server.logprobs import LegacyLogprobs

HTTP = httpx.Client(timeout=300)
CHAT = ChatFormat("{% for m in messages %}{{ m.content }}{% endfor %}")
PROMPT = "for i in range(3): for i in range"


def make(model_dir: Path, **options: Any) -> Engine:
    speculative = SpeculativeConfig.from_dict(
        {"method": "ngram", "num_speculative_tokens": 4, "min_ngram_size": 1}
    )
    return Engine(
        EngineConfig(
            model=str(model_dir),
            dtype="float32",
            device="cpu",
            speculative_config=speculative,
            served_model_name="tiny",
            **options,
        )
    )


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    make_checkpoint(directory, "Qwen3", num_hidden_layers=2, vocab_size=257)
    write_tokenizer(directory, 257)
    return directory


@pytest.fixture(scope="module")
def served(model_dir: Path) -> Iterator[Served]:
    with serving(make(model_dir, max_num_seqs=4, max_waiting=64), chat_format=CHAT) as served:
        yield served


def post(served: Served, body: dict[str, Any], path: str = "completions") -> Any:
    response = HTTP.post(f"{served.url}/v1/{path}", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def test_echo_has_prompt_logprobs(served: Served) -> None:
    """As in OpenAI's API, the first token has null, and offsets count through prompt and output."""
    tokenizer = served.engine.tokenizer
    base = {"prompt": PROMPT, "temperature": 0, "max_tokens": 12, "logprobs": 2, "ignore_eos": True}
    (plain,) = post(served, base)["choices"]
    (choice,) = post(served, base | {"echo": True})["choices"]
    assert choice["text"] == PROMPT + plain["text"]
    ids = tokenizer.encode(PROMPT)
    logprobs, own = choice["logprobs"], plain["logprobs"]
    for name in ("tokens", "token_logprobs", "top_logprobs", "bytes"):
        assert logprobs[name][len(ids) :] == own[name] and len(logprobs[name]) == len(ids) + 12
    assert logprobs["text_offset"][: len(ids)] == [*range(len(PROMPT))]
    assert logprobs["text_offset"][len(ids) :] == [len(PROMPT) + one for one in own["text_offset"]]
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert "".join(logprobs["tokens"][: len(ids)]) == PROMPT


def test_offsets_count_special_tokens_in_the_text_of_a_prompt(served: Served) -> None:
    tokenizer = served.engine.tokenizer
    end = tokenizer.decode([0], skip_special_tokens=False)
    assert tokenizer.is_special(0)
    base = {"temperature": 0, "max_tokens": 4, "logprobs": 0, "echo": True, "ignore_eos": True}
    for prompt in (f"x = 1{end}def f{end}", f"{end}{end}a", f"{end}x{end}y"):
        ids = tokenizer.encode(prompt)
        (by_text,) = post(served, base | {"prompt": prompt})["choices"]
        (by_ids,) = post(served, base | {"prompt": ids})["choices"]
        assert by_text["text"].startswith(prompt)
        assert by_ids["text"].startswith(prompt.replace(end, ""))
        for index in range(len(ids)):
            token, at = (by_text["logprobs"][name][index] for name in ("tokens", "text_offset"))
            assert by_text["text"].startswith(token, at)
            if token != end:
                at = by_ids["logprobs"]["text_offset"][index]
                assert by_ids["text"].startswith(token, at)
        assert by_text["logprobs"]["text_offset"][len(ids)] == len(prompt)


def test_token_before_the_text_of_a_prompt_has_offset_0() -> None:
    """A tokenizer may add such a token, even if the text contains it, too."""
    tokenizer = byte_tokenizer()
    end = "<|end|>"
    for ids, text, offsets in (
        ([0, 98], "a", [0, 0]),
        ([0, 0, 98], f"{end}a", [0, 0, 7]),
        ([0, 98], f"{end}a", [0, 7]),
        ([98, 0], "a", [0, 1]),
    ):
        logprobs = LegacyLogprobs(tokenizer).build_prompt(ids, [None] * len(ids), 0, text)
        assert logprobs["text_offset"] == offsets


def test_echo_without_output_scores_the_prompt(served: Served, model_dir: Path) -> None:
    """A generated text has the same logprobs as a prompt."""
    params = SamplingParams(max_tokens=12, temperature=0, logprobs=1, ignore_eos=True)
    (done,) = make(model_dir).generate([PROMPT], params)
    prompt = done.prompt_token_ids + done.token_ids
    body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 0}
    answer = post(served, body)
    (choice,) = answer["choices"]
    assert choice["text"] == PROMPT + done.text and choice["finish_reason"] == "length"
    logprobs = choice["logprobs"]["token_logprobs"]
    assert logprobs[-12:] == [one.logprob for one in done.logprobs] and len(logprobs) == len(prompt)
    assert answer["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("max_tokens", [0, 6])
def test_echo_is_streamed_with_its_logprobs(served: Served, n: int, max_tokens: int) -> None:
    prompts = [PROMPT, "ab", "a much longer prompt than the others, for pages of sixteen"]
    body = {"prompt": prompts, "max_tokens": max_tokens, "logprobs": 1, "echo": True}
    body |= {"n": n, "seed": 4, "ignore_eos": True}
    whole = post(served, body)["choices"]
    assert [one["index"] for one in whole] == [*range(3 * n)]
    response = HTTP.post(f"{served.url}/v1/completions", json=body | {"stream": True})
    frames = response.text.split("\n\n")
    assert frames[-2] == "data: [DONE]"
    parts = [part for frame in frames[:-2] for part in json.loads(frame[6:])["choices"]]
    for choice in whole:
        own = [part for part in parts if part["index"] == choice["index"]]
        assert choice["text"].startswith(prompts[choice["index"] // n])
        assert "".join(part["text"] for part in own) == choice["text"]
        for name, values in choice["logprobs"].items():
            streamed = [one for p in own if p["logprobs"] for one in p["logprobs"][name]]
            assert streamed == values
    served.wait_until_idle()


def test_prompt_logprobs_field_of_vllm(served: Served, model_dir: Path) -> None:
    ids = served.engine.tokenizer.encode(PROMPT)
    body = {"prompt": [ids, [70, 71, 72]], "max_tokens": 1, "prompt_logprobs": 2, "n": 2}
    choices = post(served, body)["choices"]
    assert choices[0]["prompt_logprobs"] == choices[1]["prompt_logprobs"]
    assert choices[0]["logprobs"] is None
    logprobs = choices[2]["prompt_logprobs"]
    assert logprobs[0] is None and len(logprobs) == 3
    (scored,) = make(model_dir).generate([[70, 71, 72]], SamplingParams(prompt_logprobs=2))
    assert scored.prompt_logprobs is not None
    for entry, one in zip(logprobs[1:], scored.prompt_logprobs[1:], strict=True):
        assert one is not None and next(iter(entry)) == str(one.token_id)
        token = entry[str(one.token_id)]
        text = served.engine.tokenizer.decode([one.token_id])
        assert token == {"logprob": one.logprob, "rank": one.rank, "decoded_token": text}
        ranks = {key: value["rank"] for key, value in entry.items() if key != str(one.token_id)}
        assert ranks == {
            str(i): r for r, (i, _) in enumerate(one.alternatives, 1) if i != one.token_id
        }
    messages = [{"role": "user", "content": PROMPT}]
    chat = post(served, {"messages": messages, "prompt_logprobs": 2}, "chat/completions")
    assert chat["prompt_logprobs"] == choices[0]["prompt_logprobs"]
    assert "prompt_logprobs" not in post(served, {"prompt": "a"})["choices"][0]


def test_echo_and_prompt_logprobs_work_together(served: Served) -> None:
    body = {"prompt": PROMPT, "max_tokens": 0, "logprobs": 1, "echo": True}
    echoed = post(served, body)["choices"][0]["logprobs"]
    for count in (0, 3):
        (choice,) = post(served, body | {"prompt_logprobs": count})["choices"]
        assert choice["logprobs"] == echoed
        assert all(count <= len(one) <= count + 1 for one in choice["prompt_logprobs"][1:])


def test_prompt_logprobs_are_refused_in_streams(served: Served) -> None:
    body = {"prompt": "a", "prompt_logprobs": 1, "stream": True}
    response = HTTP.post(f"{served.url}/v1/completions", json=body)
    assert response.status_code == 400
    message = "prompt_logprobs must be absent when stream is true"
    assert response.json()["error"]["message"] == message


def lm_eval_loglikelihoods(answer: Any, context_lens: list[int]) -> list[tuple[float, bool]]:
    """Read an answer as `parse_logprobs` of lm-eval's `local-completions` does."""
    results = []
    choices = sorted(answer["choices"], key=itemgetter("index"))
    for choice, begin in zip(choices, context_lens, strict=True):
        logprobs = choice["logprobs"]
        values, tops = logprobs["token_logprobs"][begin:-1], logprobs["top_logprobs"][begin:-1]
        greedy = all(one == max(top.values()) for one, top in zip(values, tops, strict=True))
        results.append((sum(values), greedy))
    return results


def test_request_of_lm_eval(tmp_path: Path) -> None:
    """lm-eval requests log-likelihoods with token ids of several prompts and one output token."""
    model = make_checkpoint(tmp_path, "Qwen3", num_hidden_layers=2)
    write_tokenizer(tmp_path)
    contexts = [[5, 6, 7, 8], [9], [*range(20, 60)]]
    engine = make(tmp_path)
    with torch.no_grad():  # continuations that are greedy, and some that are not
        likeliest = model.generate(torch.tensor([contexts[0]]), max_new_tokens=3, do_sample=False)
    rests = [likeliest[0, 4:].tolist(), [1, 2, 3, 4], [33]]
    prompts = [one + rest for one, rest in zip(contexts, rests, strict=True)]
    body = {
        "model": "tiny",
        "prompt": prompts,
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    with serving(engine, chat_format=CHAT) as served:
        answers = [post(served, body) for _ in range(2)]
    results = [lm_eval_loglikelihoods(one, [*map(len, contexts)]) for one in answers]
    assert results[0] == results[1]
    for (value, greedy), context, rest in zip(results[0], contexts, rests, strict=True):
        with torch.no_grad():
            want = torch.log_softmax(model(torch.tensor([context + rest])).logits[0].double(), -1)
        rows = range(len(context) - 1, len(context) + len(rest) - 1)
        expected = sum(float(want[row, token]) for row, token in zip(rows, rest, strict=True))
        assert value == pytest.approx(expected, abs=1e-3)
        assert greedy == all(
            int(want[row].argmax()) == token for row, token in zip(rows, rest, strict=True)
        )
    assert results[0][0][1] and not results[0][1][1]
