# SPDX-License-Identifier: Apache-2.0
"""Reports of the drafts of a step: all verified drafts with their sources, and no side effect."""

from copy import deepcopy

import pytest
from specops.api.outputs import TARGET
from specops.engine import (
    Engine,
    EngineConfig,
    RequestOutput,
    SamplingParams,
    SpeculativeConfig,
    StructuredOutput,
)

PROMPT = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n"
# The tokens after `x =` differ, so trees branch.
TWICE = "x = 1\nx = 2\nx = 3\nx = 4\nx ="

METHODS = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 4},
    "ngram tree": {"method": "ngram", "num_speculative_tokens": 6, "tree": True},
    "suffix": {"method": "suffix", "num_speculative_tokens": 6},
    "mtp": {"method": "mtp", "num_speculative_tokens": 3},
    "mtp tree": {"method": "mtp", "num_speculative_tokens": 6, "num_model_steps": 3, "tree": True},
    "mtp+ngram": {
        "method": "mtp+ngram",
        "num_speculative_tokens": 5,
        "num_model_steps": 2,
    },
    "mtp+suffix": {
        "method": "mtp+suffix",
        "num_speculative_tokens": 5,
        "num_model_steps": 1,
    },
    "mtp+suffix tree": {
        "method": "mtp+suffix",
        "num_speculative_tokens": 12,
        "num_model_steps": 2,
        "tree": True,
    },
}


@pytest.fixture(scope="module")
def engine() -> Engine:
    speculative = SpeculativeConfig(method="ngram", num_speculative_tokens=8)
    return Engine(EngineConfig(speculative_config=speculative, max_num_seqs=4, seed=0))


def steps_of(
    engine: Engine, prompt: str, params: SamplingParams, config: dict[str, object]
) -> list[RequestOutput]:
    name = engine.add_request(prompt, params, speculative_config=config)
    outputs = []
    while engine.has_unfinished():
        outputs += engine.step()
    completion = engine.completion(name)
    stats = completion.stats
    drafts = [one.drafts for one in outputs if one.drafts is not None]
    assert sum(len(one.token_ids) for one in drafts) == stats.num_draft_tokens
    assert sum(len(one.accepted) for one in drafts) == stats.num_accepted_tokens
    assert sum(stats.num_accepted_tokens_per_pos) == stats.num_accepted_tokens
    sources = [source for one in outputs for source in one.sources]
    assert len(sources) - sources.count(TARGET) == stats.num_accepted_tokens
    assert stats.num_emitted_tokens == len(sources) - (stats.num_steps - stats.num_drafts)
    return outputs


# All ways to end a request, with parameters derived from the output of plain decoding.
ENDINGS = {
    "string": lambda text, ids: {"stop": (text[len(text) // 2 :][:3],)},
    "token": lambda text, ids: {"stop_token_ids": (ids[len(ids) // 2],)},
    "sequence": lambda text, ids: {"stop_token_sequences": (tuple(ids[len(ids) // 2 :][:2]),)},
    "thinking": lambda text, ids: {
        "think_end_token_id": 1,
        "reasoning_max_tokens": len(ids) // 2,
        "think_inject_token_ids": (ids[len(ids) // 2], 5, 1),
    },
    "response": lambda text, ids: {
        "think_end_token_id": ids[len(ids) // 3],
        "response_max_tokens": len(ids) // 3,
    },
    "grammar": lambda text, ids: {"structured_output": StructuredOutput(regex="(ab){9}|(ba){9}c")},
    "max_tokens": lambda text, ids: {"max_tokens": len(ids) // 2},
}


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.pairwise
def test_accepted_drafts_count_only_tokens_of_the_output(
    engine: Engine, name: str, ending: str
) -> None:
    """If a request ends among accepted drafts, only the drafts before the end count."""
    before = deepcopy(engine.stats)
    num_ended_in_drafts, found = 0, []
    for length in range(15, 21):
        plain = {"max_tokens": length, "temperature": 0.0, "ignore_eos": True}
        (done,) = engine.generate(
            [TWICE], SamplingParams(**plain), speculative_config={"method": "naive"}
        )
        options = {**plain, **ENDINGS[ending](done.text, done.token_ids)}
        params = SamplingParams(**options, report_drafts=True)
        (same,) = engine.generate([TWICE], params, speculative_config={"method": "naive"})
        assert same.stats.num_accepted_tokens == 0
        outputs = steps_of(engine, TWICE, params, METHODS[name])
        assert [token for one in outputs for token in one.token_ids] == same.token_ids
        last = outputs[-1]
        num_ended_in_drafts += last.drafts is not None and len(last.drafts.accepted) == len(
            last.token_ids
        )
        found.append(outputs)
    speculative, drafts = engine.stats.speculative, before.speculative
    steps = [one.drafts for outputs in found for one in outputs if one.drafts is not None]
    assert speculative.num_accepted_tokens - drafts.num_accepted_tokens == sum(
        len(one.accepted) for one in steps
    )
    without = [s.num_steps - s.num_drafts for s in (speculative, drafts)]
    assert speculative.num_emitted_tokens - drafts.num_emitted_tokens == (
        engine.stats.generation_tokens - before.generation_tokens - (without[0] - without[1])
    )
    if ending in ("string", "token") and name.startswith("ngram"):
        assert num_ended_in_drafts, "a request must end among accepted drafts"


def test_aborted_request_counts_its_accepted_drafts(engine: Engine) -> None:
    before = deepcopy(engine.stats)
    params = SamplingParams(max_tokens=40, temperature=0.0, report_drafts=True)
    name = engine.add_request(TWICE, params, speculative_config=METHODS["ngram"])
    outputs = []
    while sum(len(one.token_ids) for one in outputs) < 20:
        outputs += engine.step()
    engine.launch()
    assert engine.abort(name)
    assert engine.collect() == []
    accepted = sum(len(one.drafts.accepted) for one in outputs if one.drafts is not None)
    now, then = engine.stats.speculative, before.speculative
    assert 0 < accepted == now.num_accepted_tokens - then.num_accepted_tokens
    assert now.num_steps - then.num_steps == len(outputs)


@pytest.mark.parametrize("prompt", [PROMPT, TWICE], ids=["new", "repeating"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.pairwise
def test_every_verified_draft_is_reported(
    engine: Engine, name: str, temperature: float, prompt: str
) -> None:
    params = SamplingParams(
        max_tokens=60, temperature=temperature, seed=3, logprobs=1, report_drafts=True
    )
    outputs = steps_of(engine, prompt, params, METHODS[name])
    seen = set()
    for output in outputs:
        drafts = output.drafts
        if drafts is None:
            assert len(output.token_ids) == 1, "a step without drafts emits one token"
            continue
        count = len(drafts.token_ids)
        assert len(drafts.parents) == len(drafts.sources) == count
        if "tree" not in name:
            assert drafts.parents == list(range(-1, count - 1))
            assert drafts.accepted == list(range(len(drafts.accepted)))
        before = -1
        for token, node in zip(output.token_ids, drafts.accepted, strict=False):
            assert (drafts.token_ids[node], drafts.parents[node]) == (token, before)
            before = node
        seen.update(drafts.sources)
        if name.startswith("mtp+") and not name.endswith("tree"):
            first = METHODS[name]["num_model_steps"]
            both = ["mtp"] * first + [name[4:]] * (count - first)
            assert drafts.sources == both[:count], "drafts of the MTP modules come first"
    expected = set(name.split()[0].split("+"))
    assert seen == expected if prompt == TWICE else seen <= expected
    if name.endswith("tree") and prompt == TWICE:
        parents = [one.drafts.parents for one in outputs if one.drafts is not None]
        assert any(of != list(range(-1, len(of) - 1)) for of in parents), "a tree must branch"


@pytest.mark.parametrize("name", METHODS)
def test_reports_change_no_logprob(engine: Engine, name: str) -> None:
    plain = SamplingParams(max_tokens=40, temperature=0.0, logprobs=2)
    reporting = SamplingParams(max_tokens=40, temperature=0.0, logprobs=2, report_drafts=True)
    without_report = steps_without_report(engine, plain, METHODS[name])
    assert all(one.drafts is None for one in without_report)
    with_report = steps_of(engine, PROMPT, reporting, METHODS[name])
    assert [one for step in without_report for one in step.logprobs] == [
        one for step in with_report for one in step.logprobs
    ]


def steps_without_report(
    engine: Engine, params: SamplingParams, config: dict[str, object]
) -> list[RequestOutput]:
    name = engine.add_request(PROMPT, params, speculative_config=config)
    outputs = []
    while engine.has_unfinished():
        outputs += engine.step()
    engine.completion(name)
    return outputs


def test_requests_of_one_step_have_separate_reports(engine: Engine) -> None:
    reporting = SamplingParams(max_tokens=30, temperature=0.0, report_drafts=True)
    quiet = SamplingParams(max_tokens=30, temperature=0.0)
    names = [
        engine.add_request(TWICE, params, speculative_config=METHODS[method])
        for params, method in ((reporting, "mtp+ngram"), (quiet, "mtp+ngram"), (reporting, "ngram"))
    ]
    found: dict[str, set[str]] = {name: set() for name in names}
    while engine.has_unfinished():
        for output in engine.step():
            if output.drafts is not None:
                found[output.request_id].update(output.drafts.sources)
    for name in names:
        engine.completion(name)
    assert [found[name] for name in names] == [{"mtp", "ngram"}, set(), {"ngram"}]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_merged_trees_do_not_depend_on_the_batch(temperature: float) -> None:
    """The suffix tree does not learn from other requests here."""
    own = {**METHODS["mtp+suffix tree"], "suffix_decoding_max_cached_requests": 0}
    engine = Engine(
        EngineConfig(speculative_config=SpeculativeConfig.from_dict(own), max_num_seqs=3, seed=0)
    )
    reporting = SamplingParams(max_tokens=30, temperature=temperature, seed=5, report_drafts=True)
    prompts = [PROMPT, TWICE, TWICE + " 5\nx"]

    def drafts_of(*together: str) -> list[list[object]]:
        names = [engine.add_request(prompt, reporting) for prompt in together]
        found: dict[str, list[object]] = {name: [] for name in names}
        while engine.has_unfinished():
            for output in engine.step():
                if output.drafts is not None:
                    found[output.request_id].append(output.drafts)
        return list(found.values())

    alone = [drafts_of(prompt)[0] for prompt in prompts]
    assert drafts_of(*prompts) == alone
    assert sum(map(len, alone)) > 10


@pytest.mark.parametrize("name", ["ngram", "mtp", "mtp+ngram"])
def test_forced_tokens_are_distinguished_from_drafts(engine: Engine, name: str) -> None:
    schema = {
        "type": "object",
        "properties": {"a_long_name_of_a_property": {"enum": ["yes", "no"]}},
        "required": ["a_long_name_of_a_property"],
        "additionalProperties": False,
    }
    params = SamplingParams(
        max_tokens=60,
        temperature=0.0,
        report_drafts=True,
        structured_output=StructuredOutput(json_schema=schema),
    )
    outputs = steps_of(engine, PROMPT, params, METHODS[name])
    forced = [
        source == "forced"
        for one in outputs
        if one.drafts is not None
        for place, source in enumerate(one.drafts.sources)
        if place in one.drafts.accepted
    ]
    assert any(forced), "the grammar must force tokens"


def test_report_drafts_must_be_a_bool() -> None:
    with pytest.raises(ValueError, match="report_drafts must be True or False, got 1"):
        SamplingParams(report_drafts=1)  # type: ignore[arg-type]
