# SPDX-License-Identifier: Apache-2.0
"""An audit confirms every answer of the engine, and finds every change of one."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from audit_campaign import all_weights, one_value
from specops.api.structured import StructuredOutput
from specops.audit import AuditRecord, AuditVerdict, audit
from specops.cli import main
from specops.engine import Engine, EngineConfig, SamplingParams, TokenLogprob
from specops.quantization import QuantizedWeight

PROMPTS = ["def add(a, b):\n", "class Stack:\n    def push", "import os\nimport sys\n", "for i in"]
SEEDED = {"temperature": 0.9, "seed": 11}

# Requests of which each changes the logits, the choice or the end in another way.
REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {**SEEDED, "logprobs": None},
    "filters": {**SEEDED, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.95},
    "penalties": {
        **SEEDED,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.4,
    },
    "biases": {
        **SEEDED,
        "logit_bias": {40: 3.0, 41: -100.0},
        "bad_words": ("self",),
        "min_tokens": 20,
    },
    "choices": {**SEEDED, "n": 2, "allowed_token_ids": tuple(range(600))},
    "stops": {**SEEDED, "stop": ("return", "\n\n"), "stop_token_ids": (5,), "ignore_eos": True},
    "grammar": {**SEEDED, "structured_output": StructuredOutput(regex="(ab|[0-9 ]){5,30}")},
}


def engine_of(**settings: Any) -> Engine:
    return Engine(EngineConfig(device="cpu", max_num_seqs=4, num_threads=1, **settings))


@pytest.fixture(scope="module")
def engine() -> Engine:
    return engine_of()


def params_of(name: str) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 40, "logprobs": 2, **REQUESTS[name]})


def records_of(engine: Engine, name: str, method: str = "ngram") -> list[AuditRecord]:
    params = params_of(name)
    done = engine.generate(PROMPTS, params, speculative_config={"method": method})
    return [AuditRecord.of(one, params, contract="this") for one in done]


def through_json(record: AuditRecord) -> AuditRecord:
    return AuditRecord.from_dict(json.loads(json.dumps(record.as_dict(), allow_nan=False)))


@pytest.fixture(scope="module")
def greedy(engine: Engine) -> AuditRecord:
    return records_of(engine, "greedy")[0]


@pytest.fixture(scope="module")
def seeded(engine: Engine) -> AuditRecord:
    return replace(records_of(engine, "filters")[0], contract=None)


def verdict_on(engine: Engine, record: AuditRecord) -> AuditVerdict:
    (verdict,) = audit(engine, [record])
    return verdict


@pytest.mark.parametrize("method", ["naive", "ngram", "mtp"])
@pytest.mark.parametrize("name", REQUESTS)
def test_every_answer_is_confirmed(engine: Engine, name: str, method: str) -> None:
    records = records_of(engine, name, method)
    assert [through_json(record) for record in records] == records
    steps = engine.stats.num_steps
    verdicts = audit(engine, records, contract="this")
    assert all(verdict.is_confirmed and verdict.same_contract for verdict in verdicts)
    assert [one.num_confirmed for one in verdicts] == [len(one.token_ids) for one in records]
    assert engine.stats.num_steps - steps <= 3 * len(records) // 4 + 2, "40 tokens fit one step"


@pytest.mark.parametrize("kind", ["wint8", "wint4"])
def test_answers_of_quantized_models_are_confirmed(kind: str) -> None:
    records = records_of(engine_of(quantization=kind), "filters", "mtp")
    other = engine_of(quantization=kind, page_size=64, max_num_batched_tokens=24)
    assert all(verdict.is_confirmed for verdict in audit(other, records))


def test_a_beginning_of_an_answer_is_confirmed(engine: Engine, greedy: AuditRecord) -> None:
    part = replace(
        greedy, token_ids=greedy.token_ids[:7], logprobs=greedy.logprobs[:7], finish_reason=None
    )
    assert verdict_on(engine, part) == AuditVerdict(7)
    assert verdict_on(engine, replace(part, token_ids=(), logprobs=())) == AuditVerdict(0)
    assert not engine.has_unfinished(), "the rest is not computed"


def with_logprob(record: AuditRecord, place: int, **changes: Any) -> AuditRecord:
    logprobs = list(record.logprobs)
    logprobs[place] = replace(logprobs[place], **changes)
    return replace(record, logprobs=tuple(logprobs))


def next_float(value: float) -> float:
    return float(torch.nextafter(torch.tensor(value), torch.tensor(torch.inf)))


def with_token(record: AuditRecord, place: int) -> AuditRecord:
    token_ids = list(record.token_ids)
    token_ids[place] ^= 1
    return replace(record, token_ids=tuple(token_ids))


def shorter(record: AuditRecord) -> AuditRecord:
    return replace(record, token_ids=record.token_ids[:9], logprobs=record.logprobs[:9])


def swapped(record: AuditRecord, place: int) -> tuple[tuple[int, float], ...]:
    (a, x), (b, y) = record.logprobs[place].alternatives
    return (a, y), (b, x)


# Changes of a greedy answer, each with what the audit finds and where.
CHANGES: dict[str, tuple[Callable[[AuditRecord], AuditRecord], str, int]] = {
    "a token": (lambda one: with_token(one, 20), "token", 20),
    "the last bit of a logprob": (
        lambda one: with_logprob(one, 30, logprob=next_float(one.logprobs[30].logprob)),
        "logprob",
        30,
    ),
    "a rank": (lambda one: with_logprob(one, 3, rank=7), "rank", 3),
    "alternatives": (
        lambda one: with_logprob(one, 4, alternatives=swapped(one, 4)),
        "alternatives",
        4,
    ),
    "an end that is cut off": (
        lambda one: replace(shorter(one), finish_reason="stop"),
        "token",
        9,
    ),
    "an output that is cut off": (shorter, "token", 9),
    "the finish reason": (lambda one: replace(one, finish_reason="stop"), "ending", 40),
    "the stop reason": (lambda one: replace(one, stop_reason="x"), "ending", 40),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_of_an_answer_are_found(engine: Engine, greedy: AuditRecord, name: str) -> None:
    change, what, place = CHANGES[name]
    verdict = verdict_on(engine, change(greedy))
    assert (verdict.what, verdict.num_confirmed) == (what, place)
    assert not engine.has_unfinished()


# Other requests than the one that the record states, each of which gives other tokens.
OTHER_REQUESTS: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 1.1},
    "top_p": {"top_p": 0.5},
    "top_k": {"top_k": 2},
    "seed": {"seed": 12},
    "greedy": {"temperature": 0.0},
    "bias": {"logit_bias": {10: 50.0}},
    "penalty": {"repetition_penalty": 1.5},
}


@pytest.mark.parametrize("name", OTHER_REQUESTS)
def test_another_request_is_found(engine: Engine, seeded: AuditRecord, name: str) -> None:
    params = replace(seeded.params, **OTHER_REQUESTS[name])
    verdict = verdict_on(engine, replace(seeded, params=params))
    assert verdict.what == "token" and verdict.num_confirmed < len(seeded.token_ids)
    assert verdict.given == seeded.token_ids[verdict.num_confirmed] != verdict.derived


def test_another_prompt_and_choice_are_found(engine: Engine, seeded: AuditRecord) -> None:
    prompt = (*seeded.prompt_token_ids[:-1], seeded.prompt_token_ids[-1] ^ 1)
    assert not verdict_on(engine, replace(seeded, prompt_token_ids=prompt)).is_confirmed
    assert not verdict_on(engine, replace(seeded, choice_index=1)).is_confirmed


# Other engines than the one that gave the answer: weight kind of that one, the other settings, and
# the change of its weights while they are loaded.
OTHER_ENGINES: dict[str, tuple[str, dict[str, Any], Any]] = {
    "int8 KV": ("none", {"kv_cache_dtype": "int8"}, nullcontext),
    "fp8 KV": ("none", {"kv_cache_dtype": "fp8_e4m3"}, nullcontext),
    "weight kind": ("wint8", {"quantization": "wint4"}, nullcontext),
    "dtype": ("none", {"dtype": "float32"}, nullcontext),
    "one int8 value": ("wint8", {}, partial(one_value, QuantizedWeight, Random(1))),
    "one int4 value": ("wint4", {}, partial(one_value, QuantizedWeight, Random(2))),
    "the last bit of a 16-bit value": ("none", {}, partial(one_value, torch.Tensor, Random(2))),
    "version of the model": ("none", {}, partial(all_weights, Random(4))),
}


@pytest.mark.parametrize("name", OTHER_ENGINES)
def test_another_engine_is_found(name: str) -> None:
    kind, settings, loading = OTHER_ENGINES[name]
    (record, *_) = records_of(engine_of(quantization=kind), "greedy")
    with loading():
        other = engine_of(**{"quantization": kind, **settings}, methods=())
    verdict = verdict_on(other, record)
    assert verdict.what in ("logprob", "token", "alternatives")


def test_a_weight_that_no_token_reads_is_not_found(greedy: AuditRecord) -> None:
    """One answer shows a change of an embedding only if it has the token."""
    other = engine_of(methods=())
    embedding = other._runner.parts.model.embedding
    used = {*greedy.prompt_token_ids, *greedy.token_ids}
    unused = next(one for one in range(len(embedding)) if one not in used)
    embedding[unused] += 1.0
    assert verdict_on(other, greedy).is_confirmed
    embedding[greedy.prompt_token_ids[0]] += 1.0
    assert not verdict_on(other, greedy).is_confirmed


@pytest.mark.parametrize("change", [{"seed": 12}, {"top_p": 0.5}, {"top_k": 2}, {"min_p": 0.3}])
def test_parameters_that_change_no_choice_are_not_found(
    engine: Engine, greedy: AuditRecord, change: dict[str, Any]
) -> None:
    assert verdict_on(engine, replace(greedy, params=replace(greedy.params, **change))).is_confirmed


def test_processed_logprobs_show_parameters_at_the_first_token() -> None:
    (record, *_) = records_of(engine := engine_of(logprobs_mode="processed_logprobs"), "filters")
    for change in ({"temperature": 0.901}, {"top_p": 0.899}):
        verdict = verdict_on(engine, replace(record, params=replace(record.params, **change)))
        assert verdict.what in ("token", "logprob", "alternatives")


def test_contracts_are_compared(engine: Engine, greedy: AuditRecord) -> None:
    (verdict,) = audit(engine, [greedy], contract="another")
    assert verdict.is_confirmed and verdict.same_contract is False
    assert verdict.sentence() == "confirmed: 40 tokens (under another contract)"
    assert verdict_on(engine, greedy).same_contract is None


# Values of a record that are refused, and a part of the message.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "strategy": ({"verify_strategy": "rejection"}, "cannot be audited"),
    "no seed": ({"seed": None}, "seed must be"),
    "token ids": ({"token_ids": [1, "2"]}, "token_ids must be a list of token ids"),
    "logprobs": ({"logprobs": [{"logprob": 0.0}]}, "one entry for each of 40 tokens, got 1"),
    "a logprob": ({"logprobs": [{"rank": 1}]}, "must have a logprob"),
    "unknown": ({"tokens": []}, "record.tokens is not known"),
    "parameters": ({"params": {"temprature": 1}}, "record.params.temprature is not known"),
    "parameter": ({"params": {"top_p": 7}}, "top_p must be in"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_malformed_records_are_refused(greedy: AuditRecord, name: str) -> None:
    changes, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        AuditRecord.from_dict({**greedy.as_dict(), **changes})


def test_records_without_a_prompt_are_refused(greedy: AuditRecord) -> None:
    values = greedy.as_dict()
    del values["prompt_token_ids"]
    with pytest.raises(ValueError, match=r"record\.prompt_token_ids is missing"):
        AuditRecord.from_dict(values)


def test_improbable_tokens_have_a_logprob_in_json() -> None:
    record = AuditRecord(
        prompt_token_ids=(1,),
        token_ids=(2,),
        params=SamplingParams(seed=0),
        logprobs=(TokenLogprob(2, -float("inf"), ((3, 0.0),)),),
    )
    assert through_json(record) == record


COMMAND = ["complete", PROMPTS[0], "--device", "cpu", "--num-threads", "1", "--max-tokens", "24"]


def test_command_audits_what_complete_wrote(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer, verdicts = tmp_path / "answer.json", tmp_path / "verdicts.json"
    assert main([*COMMAND, "--temperature", "0.8", "--json", str(answer)]) == 0
    record = json.loads(answer.read_text())["audit"]
    changed = tmp_path / "changed.jsonl"
    others = [record, {**record, "seed": record["seed"] ^ 1}]
    changed.write_text("\n".join(json.dumps({"choices": [{"audit": one}]}) for one in others))
    capsys.readouterr()
    assert main(["audit", str(answer)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{answer}: record 1: confirmed: 24 tokens",
        "1 of 1 answers confirmed",
    ]
    assert main(["audit", str(answer), str(changed), "--quiet", "--json", str(verdicts)]) == 1
    differing, count = capsys.readouterr().out.splitlines()
    assert differing.startswith(f"{changed}: record 2: token differs at output token ")
    assert count == "2 of 3 answers confirmed"
    report = json.loads(verdicts.read_text())
    assert [one["confirmed"] for one in report["verdicts"]] == [True, True, False]
    assert report["contract"] == record["contract"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no JSON", "must be a file of JSON or JSON lines"),
        ('{"choices": []}', "no audit record in"),
        ('{"params": {}, "prompt_token_ids": [1]}', "record.token_ids is missing"),
    ],
)
def test_command_refuses_other_files(
    text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file.json"
    file.write_text(text)
    assert main(["audit", str(file)]) == 2
    assert message in capsys.readouterr().err
