# SPDX-License-Identifier: Apache-2.0
"""Constrained texts of the bundled model are valid and have the bits of plain decoding."""

import json
import math
import random
import re
import struct
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest

pytest.importorskip("llguidance")
pytest.importorskip("jsonschema")

import jsonschema
from fake_gpu import FakeGpu
from row_costs import set_row_cost
from schemas import BY_HAND, bounded, generated, record
from specops.api.structured import StructuredOutput
from specops.engine import (
    Completion,
    Engine,
    EngineConfig,
    SamplingParams,
    SpeculativeConfig,
)
from specops.engine.sharing import grammar_scheduling
from specops.engine.structured import GrammarCompiler, GrammarState

NAIVE: dict[str, Any] = {"method": "naive"}
METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "min_ngram_size": 1},
    "suffix": {"method": "suffix"},
    "mtp": {"method": "mtp"},
    "mtp+ngram": {"method": "mtp+ngram"},
    "mtp+suffix": {"method": "mtp+suffix"},
}

Job = tuple[str, SamplingParams]


def with_k(method: str, k: int) -> dict[str, Any]:
    return {**METHODS[method], "num_speculative_tokens": k}


@lru_cache
def engine_of(**config: Any) -> Engine:
    speculative = SpeculativeConfig.from_dict(
        {"suffix_decoding_max_spec_factor": 4.0, "suffix_decoding_min_token_prob": 0.02}
    )
    defaults = {"device": "cpu", "max_num_seqs": 16}
    return Engine(EngineConfig(**{**defaults, **config}, speculative_config=speculative))


def prompt_of(schema: Any, example: Any) -> str:
    return f"# {json.dumps(schema)}\nvalues = [\n{json.dumps(example)},\n{json.dumps(example)},\n"


def jobs_of(cases: list[tuple[Any, Any]], temperature: float, **more: Any) -> list[Job]:
    return [
        (
            prompt_of(schema, example)[-700:],
            SamplingParams(
                max_tokens=48,
                temperature=temperature,
                top_p=0.95 if index % 2 else 1.0,
                seed=1000 + index,
                logprobs=index % 3,
                structured_output=StructuredOutput(
                    json_schema=schema,
                    disable_any_whitespace=(None, False, None, True)[index % 4],
                ),
                **more,
            ),
        )
        for index, (schema, example) in enumerate(cases)
    ]


def run(engine: Engine, jobs: list[Job], configs: list[dict[str, Any]]) -> list[Completion]:
    """Run all jobs at once, each with its own speculation method."""
    names = [
        engine.add_request(prompt, params, speculative_config=configs[index % len(configs)])
        for index, (prompt, params) in enumerate(jobs)
    ]
    while engine.has_unfinished():
        engine.step()
    assert engine.num_free_pages == engine.num_pages
    return [engine.completion(name) for name in names]


def bits(done: list[Completion]) -> list[Any]:
    def pack(value: float) -> bytes:
        return struct.pack("<f", value)

    return [
        (
            one.token_ids,
            one.text,
            one.finish_reason,
            one.stop_reason,
            [(p.token_id, pack(p.logprob), p.rank, [(i, pack(v)) for i, v in p.alternatives])
             for p in one.logprobs],
        )
        for one in done
    ]  # fmt: skip


def check(engine: Engine, jobs: list[Job], done: list[Completion]) -> int:
    """Check that each text follows its grammar. Return how many texts ended."""
    compiler = GrammarCompiler(engine.tokenizer, engine.vocab_size)
    for (_, params), one in zip(jobs, done, strict=True):
        constraint = params.structured_output
        assert constraint is not None and one.finish_reason in ("stop", "length")
        if one.finish_reason == "stop" and isinstance(constraint.json_schema, str):
            validate = jsonschema.Draft202012Validator(json.loads(constraint.json_schema)).validate
            validate(json.loads(one.text))
        text = [token for token in one.token_ids if not engine.tokenizer.is_special(token)]
        assert len(text) >= len(one.token_ids) - (one.finish_reason == "stop")
        state = GrammarState(compiler.compile(constraint), [])
        assert all(map(state.take, text)), "the text left its grammar"
        assert one.finish_reason == "length" or state.may_end
    return sum(one.finish_reason == "stop" for one in done)


@lru_cache
def plain(temperature: float) -> tuple[list[Any], int]:
    """Decode the handwritten schemas plainly. Return the bits and how many texts ended."""
    engine = engine_of(max_num_seqs=1, enable_prefix_caching=False)
    jobs = jobs_of(BY_HAND, temperature)
    done = run(engine, jobs, [NAIVE])
    assert engine.stats.speculative.num_draft_tokens == 0
    return bits(done), check(engine, jobs, done)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.fast("ngram-0.8", "mtp+suffix-0.0")
def test_constrained_texts_are_valid_and_equal_plain_decoding(
    method: str, temperature: float
) -> None:
    """Forty schemas run in one batch, with k from 1 to 8."""
    expected, num_ended = plain(temperature)
    assert len(BY_HAND) == 40 and num_ended > 15
    engine = engine_of()
    before = replace(engine.stats.speculative)
    for shift in (0, 3):
        done = run(
            engine,
            jobs_of(BY_HAND, temperature),
            [with_k(method, 1 + (i + shift) % 8) for i in range(40)],
        )
        different = [i for i, (a, b) in enumerate(zip(bits(done), expected, strict=True)) if a != b]
        assert different == []
    after = engine.stats.speculative
    drafts = after.num_draft_tokens - before.num_draft_tokens
    assert 0.2 * drafts < after.num_accepted_tokens - before.num_accepted_tokens < drafts


# A trigger that the bundled model often writes by itself.
TAGS = {
    "structures": [
        {"begin": "return ", "schema": {"enum": [["one", 1], {"two": 2}]}, "end": "  # tag\n"},
        {"begin": "return (", "schema": {"type": "integer"}, "end": ")\n"},
        {
            "begin": "self.",
            "schema": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
            "end": "\n",
        },
    ],
    "triggers": ["return ", "self."],
}
_TAGGED = (
    r'return ((\[\s*"one",\s*1\s*\]|\{\s*"two":\s*2\s*\})  # tag\n|\(-?\d+\)\n)|self\.\[[^\]]*\]\n'
)


@lru_cache
def tag_jobs() -> list[Job]:
    constraint = StructuredOutput(structural_tag=TAGS)
    return [
        (
            f"def f{i}(a):\n    return a\n\ndef g{i}(a):\n    ",
            SamplingParams(
                max_tokens=64, min_tokens=64, temperature=0.8 if i % 3 else 0.0, seed=i, logprobs=2,
                structured_output=constraint,
            ),
        )
        for i in range(16)
    ]  # fmt: skip


@lru_cache
def plain_tags() -> list[Any]:
    engine = engine_of(max_num_seqs=1, enable_prefix_caching=False)
    done = run(engine, tag_jobs(), [NAIVE])
    check(engine, tag_jobs(), done)
    num_tags = 0
    for one in done:
        for trigger in re.finditer(r"return |self\.", one.text):
            rest = one.text[trigger.start() :]
            num_tags += re.match(_TAGGED, rest) is not None
            assert re.match(_TAGGED, rest) or one.finish_reason == "length" or "\n" not in rest
    assert num_tags > 16
    return bits(done)


@pytest.mark.parametrize("method", METHODS)
def test_texts_with_structural_tags_equal_plain_decoding(method: str) -> None:
    """Drafts cross triggers and ends of tags. Drafts that do not fit are rolled back."""
    engine = engine_of()
    before = replace(engine.stats.speculative)
    done = run(engine, tag_jobs(), [with_k(method, 1 + i % 8) for i in range(8)])
    expected = plain_tags()
    assert [i for i, (a, b) in enumerate(zip(bits(done), expected, strict=True)) if a != b] == []
    after = engine.stats.speculative
    drafts = after.num_draft_tokens - before.num_draft_tokens
    assert 0.2 * drafts < after.num_accepted_tokens - before.num_accepted_tokens < drafts


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("part", range(4))
def test_generated_schemas_equal_plain_decoding_with_every_method(
    part: int, temperature: float
) -> None:
    """Generate two hundred schemas in four parts."""
    draw = random.Random(part)
    cases = [(generated(draw), None) for _ in range(50)]
    engine = engine_of()
    jobs = jobs_of(cases, temperature)
    expected = run(engine, jobs, [NAIVE])
    num_ended = check(engine, jobs, expected)
    num_texts = 0
    for method in METHODS:
        for k in (1, 2, 3, 5, 8):
            done = run(engine, jobs, [with_k(method, k)])
            assert bits(done) == bits(expected), (method, k)
            num_texts += len(done)
    ends = f"{num_ended} of {len(cases)} texts ended, valid; the others begin a valid one"
    print(f"{ends}; {num_texts} with drafts are the same")


# ---- white space ----


@lru_cache
def bounded_schemas() -> list[Any]:
    draw = random.Random(7)
    schemas = [schema for schema, _ in BY_HAND] + [generated(draw) for _ in range(60)]
    found = [one for one in map(bounded, schemas) if one is not None]
    assert len(found) == 96, "four handwritten schemas allow texts of any length"
    return found


def bounded_jobs(temperature: float) -> list[Job]:
    """Return jobs whose prompts do not suggest JSON: the bundled model likes spaces there."""
    return [
        (
            "value = ",
            SamplingParams(
                max_tokens=900, temperature=temperature, seed=index,
                structured_output=StructuredOutput(json_schema=schema),
            ),
        )
        for index, schema in enumerate(bounded_schemas())
    ]  # fmt: skip


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.ci
def test_text_of_a_bounded_schema_ends(temperature: float) -> None:
    jobs = bounded_jobs(temperature)
    expected = run(engine_of(), jobs, [NAIVE])
    assert check(engine_of(), jobs, expected) == len(jobs)
    assert max(len(one.token_ids) for one in expected) < 200
    methods = [with_k(name, 5) for name in METHODS]
    assert bits(run(engine_of(), jobs, methods)) == bits(expected)


@pytest.mark.ci
def test_text_may_not_end_if_any_white_space_is_allowed() -> None:
    """Any white space is allowed by the engine's option, and then by each request."""
    jobs = bounded_jobs(0.0)[:40]
    by_engine = run(engine_of(json_whitespace="any"), jobs, [NAIVE])
    endless = [one.text for one in by_engine if one.finish_reason == "length"]
    assert endless and all(text.endswith(" " * 100) for text in endless)
    constraint = [job[1].structured_output for job in jobs]
    said = [
        (prompt, replace(params, structured_output=replace(form, disable_any_whitespace=False)))
        for (prompt, params), form in zip(jobs, constraint, strict=True)
        if form is not None
    ]
    assert bits(run(engine_of(), said, [NAIVE])) == bits(by_engine)


# ---- combined with other parameters ----


def mixed(index: int, draw: random.Random) -> SamplingParams:
    forms: list[dict[str, Any]] = [
        {"json_schema": BY_HAND[index % 40][0]},
        {"json_schema": {"type": "object"}, "disable_any_whitespace": True},
        {
            "regex": "[a-z ]{3,30}(\\([a-z]*\\))?",
            "prefix": 'start: (line)?\nline[lazy]: /.*/ "\\n"',
        },
        {"choice": ("return", "return None", "raise", "pass\n")},
        {"grammar": 'start: call ("." call)*\ncall: /[a-z_]+/ "(" [/[a-z0-9]+/] ")"'},
        {"grammar": 'start: called* TEXT\nTEXT: /(.|\\n)*/\ncalled[lazy]: TEXT "(" /[a-z]+/ ")"'},
    ]
    ids = range(1, 4096)
    return SamplingParams(
        max_tokens=draw.randrange(4, 50),
        temperature=draw.choice([0.0, 0.7, 1.2]),
        top_k=draw.choice([0, 0, 40]),
        top_p=draw.choice([1.0, 0.9]),
        min_p=draw.choice([0.0, 0.02]),
        typical_p=draw.choice([1.0, 0.95]),
        repetition_penalty=draw.choice([1.0, 1.1]),
        presence_penalty=draw.choice([0.0, 0.4]),
        frequency_penalty=draw.choice([0.0, -0.2]),
        logit_bias={token: draw.uniform(-5, 5) for token in draw.sample(ids, 30)},
        bad_words=draw.choice([(), ("return", '"')]),
        allowed_token_ids=draw.choice([None, None, tuple(draw.sample(ids, 3000))]),
        min_tokens=draw.choice([0, 3]),
        stop=draw.choice([(), ('",',), ("n",)]),
        stop_token_ids=draw.choice([(), tuple(draw.sample(ids, 3))]),
        stop_token_sequences=draw.choice([(), (tuple(draw.sample(ids, 1)),)]),
        ignore_eos=draw.random() < 0.3,
        seed=index,
        logprobs=draw.choice([None, 0, 2]),
        structured_output=None if index % 7 == 6 else StructuredOutput(**forms[index % len(forms)]),
    )


LIMITS: dict[str, dict[str, Any]] = {
    "alone": {"max_num_seqs": 1},
    "chunks of 24": {"max_num_seqs": 6, "max_num_batched_tokens": 24},
    "preempted": {"max_num_seqs": 16, "max_model_len": 512, "num_pages": 60},
    "processed": {"max_num_seqs": 8, "logprobs_mode": "processed_logprobs"},
}


@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.fast("preempted")
def test_drafts_change_no_bit_with_all_parameters_beside_a_grammar(limits: str) -> None:
    draw = random.Random(5)
    prompts = [prompt_of(*BY_HAND[i % 40])[-300:] for i in range(56)]
    jobs = [(prompt, mixed(i, draw)) for i, prompt in enumerate(prompts)]
    expected = run(engine_of(**{**LIMITS[limits], "max_num_seqs": 1}), jobs, [NAIVE])
    engine = engine_of(**LIMITS[limits])
    own = [with_k(name, k) for k in (2, 5, 8) for name in METHODS] + [NAIVE]
    before = engine.stats.num_preemptions
    for shift in range(2):
        done = run(engine, jobs, own[shift:] + own[:shift])
        assert bits(done) == bits(expected)
    assert (engine.stats.num_preemptions > before) == (limits == "preempted")
    reasons = Counter(one.finish_reason for one in expected)
    assert reasons["stop"] > 5 and reasons["length"] > 5


def test_selection_of_drafts_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are selected by step times in which a row is expensive, then costs nothing."""
    # slow grammars would get no drafts
    monkeypatch.setattr(grammar_scheduling, "_SLOW_SECONDS", math.inf)
    expected, _ = plain(0.8)
    engine = engine_of(max_num_seqs=12)
    own = [{**with_k(name, 6), "adaptive_verification": True} for name in METHODS]
    counts = []
    for row in (1.0, 0.0):
        before = engine.stats.speculative.num_draft_tokens
        set_row_cost(engine, row)
        assert bits(run(engine, jobs_of(BY_HAND, 0.8), own)) == expected
        counts.append(engine.stats.speculative.num_draft_tokens - before)
    assert 0 < counts[0] < counts[1]


def test_choices_share_a_prompt_but_not_their_states() -> None:
    schema = record(a={"type": "integer"}, b={"type": "string", "maxLength": 8})
    params = SamplingParams(
        n=12, max_tokens=40, temperature=1.2, seed=3, logprobs=0,
        structured_output=StructuredOutput(json_schema=schema),
    )  # fmt: skip
    prompt = prompt_of(schema, {"a": 1, "b": "x"})
    naive = engine_of().generate([prompt], params, speculative_config=NAIVE)
    for method in METHODS:
        done = engine_of().generate([prompt], params, speculative_config=with_k(method, 6))
        assert bits(done) == bits(naive)
    assert len({one.text for one in naive}) > 6
    assert any(one.num_cached_tokens for one in naive), "the prefix cache must be used"


# ---- ends of texts ----


def one(form: dict[str, Any], method: str = "", **params: Any) -> Completion:
    """Return a text of plain decoding, or of `method`."""
    constraint = StructuredOutput(**form)
    defaults = {"max_tokens": 40, "temperature": 0.0, "logprobs": 1}
    requested = SamplingParams(**{**defaults, **params}, structured_output=constraint)
    config = with_k(method, 6) if method else NAIVE
    (done,) = engine_of().generate(["value = "], requested, speculative_config=config)
    return done


@pytest.mark.parametrize("method", ["", *METHODS])
@pytest.mark.parametrize(
    "form,params,reason,text",
    [
        # A complete text that cannot continue needs no end of sequence, regardless of min_tokens.
        ({"choice": ("None",)}, {}, "stop", "None"),
        ({"choice": ("None",)}, {"min_tokens": 30}, "stop", "None"),
        ({"choice": ("None",)}, {"ignore_eos": True}, "stop", "None"),
        # The text is complete at the last allowed token.
        ({"choice": ("None",)}, {"max_tokens": 1}, "stop", "None"),
        ({"choice": ("None, None, None, None",)}, {"max_tokens": 3}, "length", None),
        # A stop string in the middle and at the end of the text.
        ({"choice": ("(None, None)",)}, {"stop": (", ",)}, "stop", "(None"),
        ({"choice": ("(None, None)",)}, {"stop": (")",)}, "stop", "(None, None"),
        # The text ends only by an end-of-sequence token, or not at all.
        ({"regex": "[ab]*"}, {"max_tokens": 4, "ignore_eos": True}, "length", None),
        ({"regex": ""}, {}, "stop", ""),
        ({"regex": "x?"}, {"logit_bias": {0: 100.0}}, "stop", ""),
        # Other parameters allow no token, after a complete text or in its middle.
        ({"regex": "(ab)?"}, {"bad_words": ("ab", "a"), "ignore_eos": True}, "stop", ""),
        ({"choice": ("ab",)}, {"allowed_token_ids": (5, 6)}, "abort", ""),
    ],
)  # fmt: skip
def test_constrained_text_ends_for_the_right_reason(
    method: str, form: dict[str, Any], params: dict[str, Any], reason: str, text: str | None
) -> None:
    done = one(form, method, **params)
    assert done.finish_reason == reason
    assert text is None or done.text == text
    assert done.stop_reason == ("structured_output" if reason == "abort" else
                                params["stop"][0] if "stop" in params else None)  # fmt: skip
    assert bits([done]) == bits([one(form, **params)])
    assert len(done.logprobs) == len(done.token_ids)


@pytest.mark.parametrize("method", ["", *METHODS])
@pytest.mark.parametrize(
    "regex,stop,text,is_cut",
    [
        # A stop token that is also text may continue an incomplete text: it then cuts the text.
        ("[ab][xy]{3}", "x", "[ab]", True),
        ("[ab]{2}[xy]{3}", "x", "[ab]{2}", True),
        # After a whole text, a stop token ends it even if the text could continue with that token.
        ("[ab]([xy]{3})?", "x", "[ab]", False),
        ("[ab]{3}", "x", "[ab]{3}", False),
        ("[ab]{3}(\n\n)?", "<|endoftext|>", "[ab]{3}", False),
    ],
)
def test_stop_token_that_cuts_a_text_is_reported(
    method: str, regex: str, stop: str, text: str, is_cut: bool
) -> None:
    (token,) = engine_of().tokenizer.encode(stop)
    bias = {token: 100.0} if text != "[ab]{3}" or token == 0 else {}
    params = {"stop_token_ids": (token,), "ignore_eos": True, "logit_bias": bias}
    done = one({"regex": regex}, method, **params)
    assert re.fullmatch(text, done.text)
    assert (done.finish_reason, done.stop_reason) == ("stop", token if is_cut else None)
    assert bits([done]) == bits([one({"regex": regex}, **params)])


def test_special_tokens_are_never_part_of_a_text() -> None:
    params = {"logit_bias": {0: 100.0}, "max_tokens": 30}
    done = one(
        {"json_schema": {"type": "array", "minItems": 2, "items": {"type": "string"}}}, **params
    )
    assert 0 not in done.token_ids[:-1]
    if done.token_ids[-1] == 0:
        assert len(json.loads(done.text)) >= 2


# ---- after thinking ----


@pytest.mark.parametrize("method", METHODS)
def test_grammar_begins_after_the_thinking(method: str) -> None:
    """The thinking ends at its end token, anywhere among the drafts, or by force."""
    engine = engine_of()
    newline, comma = (engine.tokenizer.encode(text)[0] for text in ("\n", ","))
    constraint = StructuredOutput(
        json_schema={"type": "array", "items": {"type": "integer"}, "minItems": 2}
    )
    jobs, ended = [], []
    for index in range(24):
        params = SamplingParams(
            max_tokens=40, temperature=(0.0, 0.8)[index % 2], seed=index, logprobs=1,
            structured_output=constraint,
            think_end_token_id=newline,
            think_inject_token_ids=[None, (comma, newline), (newline, comma)][index % 3],
            reasoning_max_tokens=(3, 12, 30)[index // 8],
            response_max_tokens=None if index % 4 else 10,
        )  # fmt: skip
        jobs.append(("def f(a):\n    x = [1, 2]\n    return x\n\nx = f(", params))
    expected = run(engine, jobs, [NAIVE])
    done = run(engine, jobs, [with_k(method, 1 + i % 8) for i in range(8)])
    assert bits(done) == bits(expected)
    compiler = GrammarCompiler(engine.tokenizer, engine.vocab_size)
    for (_, params), got in zip(jobs, expected, strict=True):
        budget = params.reasoning_max_tokens or 0
        inject = params.think_inject_token_ids or (newline,)
        thinking = got.token_ids[:budget]
        if newline in thinking:
            begin = thinking.index(newline) + 1
        else:
            begin = budget + len(inject)
            assert tuple(got.token_ids[budget:begin]) == inject
        ended.append(newline in thinking)
        reply = [token for token in got.token_ids[begin:] if token]
        assert all(map(GrammarState(compiler.compile(constraint), []).take, reply))
        assert reply, "the reply must not be empty"
    assert 0 < sum(ended) < len(ended)


# ---- output distribution ----


@pytest.mark.parametrize("strategy", ["rejection", "block"])
@pytest.mark.parametrize("method", ["mtp", "ngram"])
@pytest.mark.slow
def test_texts_follow_the_distribution_of_constrained_sampling(method: str, strategy: str) -> None:
    """Compare the texts of plain and speculative sampling by a chi-square test."""
    choices = ("a + b", "a - b", "b + a", "a", "None", "a.b", "b")
    size = 750

    def texts(seed: int, config: dict[str, Any]) -> Counter[str]:
        params = SamplingParams(
            n=125, max_tokens=8, temperature=1.5, seed=seed,
            structured_output=StructuredOutput(choice=choices),
        )  # fmt: skip
        requested = [replace(params, seed=seed + i) for i in range(size // 125)]
        prompts = ["def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return "] * len(
            requested
        )
        done = engine_of().generate(prompts, requested, speculative_config=config)
        assert all(one.finish_reason == "stop" for one in done)
        return Counter(one.text for one in done)

    plain_texts = texts(1, NAIVE)
    before = engine_of().stats.speculative.num_draft_tokens
    got = texts(900, {**with_k(method, 3), "verify_strategy": strategy})
    assert engine_of().stats.speculative.num_draft_tokens - before > size // 2
    assert set(plain_texts) | set(got) <= set(choices) and len(plain_texts) > 4
    statistic = sum(
        (plain_texts[text] - got[text]) ** 2 / (plain_texts[text] + got[text])
        for text in set(plain_texts) | set(got)
    )
    assert statistic < 30, "at 6 degrees of freedom, chance is 1 in 20,000"


def test_policies_that_emit_unverified_drafts_are_refused() -> None:
    constraint = SamplingParams(structured_output=StructuredOutput(regex="a+"))
    for policy in ("accept_all", "synthetic"):
        own: dict[str, Any] = {**with_k("ngram", 2), "accept_policy": policy}
        if policy == "synthetic":
            own["synthetic_acceptance_rates"] = [0.5]
        with pytest.raises(ValueError, match="structured_output needs accept_policy"):
            engine_of().add_request("x", constraint, speculative_config=own)
    own = {**with_k("ngram", 2), "accept_policy": "reject_all"}
    assert bits([one({"choice": ("abc",)})]) == bits(
        engine_of().generate(
            ["value = "],
            SamplingParams(max_tokens=40, temperature=0, logprobs=1,
                           structured_output=StructuredOutput(choice=("abc",))),
            speculative_config=own,
        )
    )  # fmt: skip
    with pytest.raises(ValueError, match="structured_output must be a StructuredOutput"):
        SamplingParams(structured_output="a+")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="think_inject_token_ids must hold a token"):
        SamplingParams(
            structured_output=StructuredOutput(regex="a"), reasoning_max_tokens=3,
            think_inject_token_ids=(),
        )  # fmt: skip


# ---- forced tokens ----


def test_forced_tokens_are_drafted_at_no_cost() -> None:
    """Every method drafts them; a request without speculation does not."""
    fixed = record(**{f"a long name {i}": {"const": f"value {i}"} for i in range(4)})
    form = {"json_schema": fixed, "disable_any_whitespace": True}
    plain_text = one(form, max_tokens=200)
    assert plain_text.finish_reason == "stop" and plain_text.stats.num_draft_tokens == 0
    for method in METHODS:
        done = one(form, method, max_tokens=200)
        assert bits([done]) == bits([plain_text])
        stats = done.stats
        assert stats.num_accepted_tokens > 0.95 * stats.num_draft_tokens
        assert len(done.token_ids) > 5.5 * stats.num_steps, method


def test_grammar_limit_ends_only_the_text_that_meets_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A limit met after a draft does not count. The request ends if the text itself meets one."""
    import llguidance

    def limited(**given: Any) -> Any:
        return llguidance_limits(**given | {"max_items_in_row": 20})

    llguidance_limits = llguidance.LLParserLimits
    monkeypatch.setattr(llguidance, "LLParserLimits", limited)
    engine = Engine(
        EngineConfig(device="cpu", speculative_config=SpeculativeConfig(method="naive"))
    )
    forms: list[dict[str, Any]] = [
        {"grammar": 'start: s\ns: s s | "a" | "b" | "(" s ")"'},  # ambiguity grows with length
        {"choice": ("abc", "abd")},
        {"json_schema": BY_HAND[25][0]},
    ]
    jobs = [
        ("value = ", SamplingParams(max_tokens=30, temperature=0.9, seed=i, logprobs=1,
                                    structured_output=StructuredOutput(**forms[i % 3])))
        for i in range(9)
    ]  # fmt: skip
    expected = run(engine, jobs, [NAIVE])
    reasons = [got.finish_reason for got in expected]
    assert "abort" in reasons and "stop" in reasons
    for method in METHODS:
        assert bits(run(engine, jobs, [with_k(method, 5)])) == bits(expected)


AMBIGUOUS = {"grammar": 'start: a\na: "x" | a a | a a a'}


def test_grammar_limit_is_reported_even_for_a_whole_text() -> None:
    """The text could end anywhere, so the stop reason must tell that a limit ended it."""
    params = {"max_tokens": 200, "logit_bias": {0: -100.0}, "temperature": 0.8, "seed": 1}
    done = one(AMBIGUOUS, **params)
    assert set(done.text) == {"x"} and done.finish_reason == "abort"
    assert str(done.stop_reason).startswith("structured_output: llguidance met a limit: ")
    assert "max is 500" in str(done.stop_reason)
    for method in ("ngram", "suffix"):
        assert bits([one(AMBIGUOUS, method, **params)]) == bits([done])


@pytest.mark.parametrize("row", [1e-4, 1e-3, 1.0], ids=["many drafts", "few drafts", "copies"])
@pytest.mark.fast("few drafts")
def test_slow_grammars_skip_steps_and_change_no_bit(
    row: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each mask seems to take a second and is computed beside the steps."""
    expected, _ = plain(0.8)

    def slowly(self: GrammarState, num_rows: int) -> None:
        self.step_seconds, self.row_seconds = 1.0, row

    prepared: list[bool] = []
    prepare = GrammarState.prepare

    def noting(self: GrammarState) -> None:
        prepare(self)
        prepared.append(self.ready is not None)

    monkeypatch.setattr(GrammarState, "note_step", slowly)
    monkeypatch.setattr(GrammarState, "prepare", noting)
    monkeypatch.setattr("specops.engine.sharing.grammar_scheduling._SLOW_FRACTION", 1.0)
    free = [(f"# {i}\ndef f(", SamplingParams(max_tokens=48, seed=i)) for i in range(8)]
    others = bits(run(engine_of(), free, [NAIVE]))
    engine = engine_of(max_num_seqs=24, max_model_len=512, num_pages=90)  # some are preempted
    before = replace(engine.stats)
    own = [with_k(name, 6) for name in METHODS]
    jobs = [job for pair in zip(jobs_of(BY_HAND, 0.8), free * 5, strict=True) for job in pair]
    done = run(engine, jobs, own)
    assert bits(done)[::2] == expected
    assert bits(done)[1::2] == others * 5
    assert engine.stats.num_paused_steps - before.num_paused_steps > 100
    assert engine.stats.num_preemptions > before.num_preemptions
    assert len(prepared) > 100 and all(prepared)


def test_request_may_be_aborted_while_its_mask_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, may_end = threading.Event(), threading.Event()

    def prepare(self: GrammarState) -> None:
        begun.set()
        assert may_end.wait(300)

    def slowly(self: GrammarState, num_rows: int) -> None:
        self.step_seconds = self.row_seconds = 1.0

    monkeypatch.setattr(GrammarState, "note_step", slowly)
    monkeypatch.setattr(GrammarState, "prepare", prepare)
    engine = Engine(EngineConfig(device="cpu", speculative_config=SpeculativeConfig()))
    constraint = SamplingParams(max_tokens=9, structured_output=StructuredOutput(regex="[ab]{20}"))
    name = engine.add_request("x", constraint)
    while not begun.is_set():
        engine.step()
    assert engine.abort(name) and engine.num_free_pages == engine.num_pages
    try:
        (free,) = run(engine, [("x", SamplingParams(max_tokens=9, ignore_eos=True))], [NAIVE])
        assert len(free.token_ids) == 9, "a request waited for the mask of an aborted one"
    finally:
        may_end.set()


# ---- fake GPU ----


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeGpu]:
    def make(**arguments: Any) -> FakeGpu:
        device = FakeGpu(**arguments)
        monkeypatch.setattr("specops.engine.engine.open_device", lambda *_, **__: device)
        return device

    return make


@pytest.mark.parametrize("captures", [True, False], ids=["graphs", "eager"])
def test_masks_are_copied_with_the_inputs_of_a_step(
    fake_gpu: Callable[..., FakeGpu], captures: bool
) -> None:
    """Cover padding, poisoned memory and replays, beside requests without a grammar."""
    jobs = jobs_of(BY_HAND[20:36], 0.8)
    for index in (3, 7):
        prompt, params = jobs[index]
        allowed_ids = tuple(range(1, 4096, 2)) if index == 3 else None
        jobs[index] = prompt, replace(params, structured_output=None, allowed_token_ids=allowed_ids)
    expected = bits(run(engine_of(max_num_seqs=1), jobs, [NAIVE]))
    device = fake_gpu(captures=captures)
    engine = Engine(
        EngineConfig(device="cpu", max_num_seqs=8, speculative_config=SpeculativeConfig())
    )
    for own in (NAIVE, with_k("ngram", 4), with_k("mtp", 3), with_k("suffix", 6)):
        assert bits(run(engine, jobs, [own])) == expected
    assert (engine.num_captures > 0) == captures == ("replay" in device.log)


def test_masks_are_made_only_for_restricted_requests() -> None:
    """A grammar needs a mask per row, fixed allowed tokens need one mask, others need none."""
    engine = engine_of()
    shapes: list[int] = []
    shape_of = engine._runner._shape_of

    def noting(plan: Any) -> Any:
        shape = shape_of(plan)
        shapes.append(shape.masks)
        return shape

    engine._runner._shape_of = noting  # type: ignore[method-assign]
    try:
        run(engine, [("x = ", SamplingParams(max_tokens=4, min_tokens=2))], [NAIVE])
        assert set(shapes) == {0}
        shapes.clear()
        run(engine, [("x = ", SamplingParams(max_tokens=4, allowed_token_ids=[5, 6, 7]))], [NAIVE])
        assert set(shapes) == {1}
        shapes.clear()
        one({"choice": ("abcdef",)}, "ngram")
        assert max(shapes) > 0
    finally:
        engine._runner._shape_of = shape_of  # type: ignore[method-assign]
