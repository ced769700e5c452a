# SPDX-License-Identifier: Apache-2.0
"""SpeculativeConfig: defaults, documented tables, validation and overrides by requests."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from specops.api.methods import method_names, methods
from specops.api.methods.mtp import MtpOptions
from specops.api.methods.ngram import NgramOptions
from specops.api.speculative_config import SpeculativeConfig, request_fields
from specops.api.speculative_spellings import REFUSED_FIELDS

DOCS = Path(__file__).resolve().parent.parent / "docs" / "drafters.md"
FASTDEPLOY_FIELDS = {
    "method", "mtp_strategy", "num_speculative_tokens", "num_model_steps", "max_candidate_len",
    "verify_window", "max_ngram_size", "min_ngram_size", "suffix_decoding_max_tree_depth",
    "suffix_decoding_max_cached_requests", "suffix_decoding_max_spec_factor",
    "suffix_decoding_min_token_prob", "model", "quantization", "num_gpu_block_expand_ratio",
    "model_type", "sharing_model", "benchmark_mode", "enf_gen_phase_tag", "enable_draft_logprob",
    "verify_strategy", "accept_policy",
}  # fmt: skip

SYNTHETIC = {"method": "ngram", "num_speculative_tokens": 3, "accept_policy": "synthetic"}


def make(**values: Any) -> SpeculativeConfig:
    return SpeculativeConfig.from_dict(values)


def default_of_every_field() -> dict[str, Any]:
    """Return the defaults of all fields that a command line accepts, by name."""
    found = {one.name: one.default for one in dataclasses.fields(SpeculativeConfig)}
    del found["options"]
    for method in methods():
        for one in dataclasses.fields(method.options):
            found.setdefault(one.name, one.default)
    return {**found, "mtp_strategy": "default"}


def table(first_column: str) -> list[list[str]]:
    """Return the cells of the table in docs/drafters.md whose header starts with `first_column`."""
    lines = DOCS.read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(f"| {first_column} |"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def test_documented_table_has_every_field_and_its_default() -> None:
    written = {row[0].strip("`"): json.loads(row[1].strip("`")) for row in table("field")}
    assert written == default_of_every_field()


def test_documented_refused_fields_are_complete() -> None:
    assert {row[0].strip("`") for row in table("refused field")} == set(REFUSED_FIELDS)


def test_documented_request_fields_are_complete() -> None:
    section = DOCS.read_text().split("### In a request")[1]
    first = section.split(";")[0]
    names = re.findall(r"`(\w+)`", first)
    assert sorted(names) == sorted(["speculative_config", *request_fields()])


def test_every_field_of_fastdeploy_is_accepted_or_refused() -> None:
    accepted = set(default_of_every_field())
    own = {"synthetic_acceptance_rates", "ngram_match", "max_total_draft_tokens"}
    own |= {"adaptive_verification", "suffix_decoding_read_on", "draft_vocab"}
    own |= {"suffix_decoding_earlier_answers"}
    own |= {f"suffix_decoding_max_cached_{budget}" for budget in ("tokens", "bytes")}
    trees = {"tree", "medusa_choices", "speculative_token_tree"}
    assert accepted - own | set(REFUSED_FIELDS) - trees == FASTDEPLOY_FIELDS
    assert not accepted & set(REFUSED_FIELDS)


@pytest.mark.parametrize(
    "values,tokens,steps",
    [
        ({}, 0, 0),
        ({"method": "naive"}, 0, 0),
        ({"method": "naive", "num_speculative_tokens": 0}, 0, 0),
        ({"method": "ngram"}, 1, 1),
        ({"method": "ngram", "num_speculative_tokens": 40}, 40, 40),
        ({"method": "mtp", "num_speculative_tokens": 3}, 3, 3),
        ({"method": "mtp", "num_speculative_tokens": 3, "num_model_steps": 2}, 3, 2),
        ({"method": "mtp", "num_speculative_tokens": 3, "mtp_strategy": "with_ngram"}, 3, 1),
        ({"method": "mtp", "num_speculative_tokens": 3, "mtp_strategy": "with_suffix"}, 3, 1),
        ({"method": "suffix", "num_speculative_tokens": None}, 1, 1),
    ],
)
def test_draft_lengths_have_defaults(values: dict[str, Any], tokens: int, steps: int) -> None:
    config = make(**values)
    assert (config.num_speculative_tokens, config.num_model_steps) == (tokens, steps)
    assert make(**config.as_dict()) == config


@pytest.mark.parametrize("name", ["ngram", "NGRAM", "Ngram", "ngram_match", "NGram_Match"])
def test_method_names_ignore_case(name: str) -> None:
    assert make(method=name).method == "ngram"


@pytest.mark.parametrize(
    "values,message",
    [
        ({"method": "falcon"}, r"method must be one of naive, ngram, suffix, mtp, prediction, "),
        ({"method": None}, r"method must be one of .* got None"),
        ({"method": 3}, r"method must be one of .* got 3"),
        (
            {"num_speculative_tokens": 5},
            r'num_speculative_tokens must be 0 or absent .*"naive".* 5',
        ),
        ({"num_speculative_tokens": False}, r"num_speculative_tokens must be 0 or absent .*False"),
        ({"num_model_steps": 1}, r"num_model_steps must be 0 or absent .* got 1"),
        (
            {"method": "ngram", "num_speculative_tokens": 0},
            r"num_speculative_tokens .* least 1.* 0",
        ),
        (
            {"method": "ngram", "num_speculative_tokens": "5"},
            r"_tokens must be an integer, got '5'",
        ),
        (
            {"method": "ngram", "num_speculative_tokens": 2.0},
            r"_tokens must be an integer, got 2.0",
        ),
        ({"method": "ngram", "num_speculative_tokens": True}, r"must be an integer, got True"),
        (
            {"method": "mtp", "num_model_steps": 2},
            r"num_model_steps must be at most num_speculative_tokens = 1 \(the default\), got 2",
        ),
        (
            {"method": "mtp", "num_speculative_tokens": 3, "num_model_steps": 4},
            r"num_model_steps must be at most num_speculative_tokens = 3, got 4",
        ),
        (
            {"method": "mtp", "num_speculative_tokens": 3, "num_model_steps": 0},
            r"num_model_steps must be at least 1 .* got 0",
        ),
        ({"method": "ngram", "mtp_strategy": "with_ngram"}, r'needs method "mtp", got \'ngram\''),
        ({"method": "mtp", "mtp_strategy": "both"}, r"mtp_strategy must be one of .* got 'both'"),
        ({"verify_strategy": "top_p"}, r"verify_strategy must be one of target_match.* 'top_p'"),
        ({"accept_policy": "some"}, r"accept_policy must be one of normal, .* got 'some'"),
        (
            {"accept_policy": "synthetic"},
            r"rates and accept_policy .* set together, got None",
        ),
        ({"synthetic_acceptance_rates": [0.5]}, r"must be set together, got \[0.5\] with 'normal'"),
        ({**SYNTHETIC, "synthetic_acceptance_rates": []}, r"rates must be a list of numbers"),
        ({**SYNTHETIC, "synthetic_acceptance_rates": 0.5}, r"rates must be a list .* got 0.5"),
        ({**SYNTHETIC, "synthetic_acceptance_rates": ["a"]}, r"rates must be a number, got 'a'"),
        ({**SYNTHETIC, "synthetic_acceptance_rates": [1.5]}, r"rates must be in \[0, 1\], got 1.5"),
        (
            {**SYNTHETIC, "synthetic_acceptance_rates": [0.5, 0.6]},
            r"rates must not increase, got 0.6 after 0.5",
        ),
        ({"min_ngram_size": 0}, r"min_ngram_size must be at least 1 .* got 0"),
        ({"max_ngram_size": 1}, r"max_ngram_size must be at least min_ngram_size = 2, got 1"),
        ({"ngram_match": "rightmost"}, r"one of most_recent, leftmost; got 'rightmost'"),
        ({"max_total_draft_tokens": -1}, r"max_total_draft_tokens must be at least 0 .* got -1"),
        ({"max_total_draft_tokens": 0.5}, r"max_total_draft_tokens must be an integer, got 0\.5"),
        ({"max_ngram_size": 2**31}, r"max_ngram_size must .* fit 32 bits, got 2147483648"),
        ({"suffix_decoding_max_tree_depth": 0}, r"max_tree_depth must be at least 1 .* got 0"),
        ({"suffix_decoding_max_tree_depth": 32768}, r"tree_depth must be at most 32767, got 32768"),
        ({"suffix_decoding_max_cached_requests": -2}, r"cached_requests must be at least -1.* -2"),
        ({"suffix_decoding_max_cached_tokens": -2}, r"cached_tokens must be at least -1 .* got -2"),
        (
            {"suffix_decoding_max_cached_bytes": 2**63},
            r"cached_bytes must .* fit 64 bits, got 9223",
        ),
        ({"suffix_decoding_max_cached_bytes": 1.0}, r"cached_bytes must be an integer, got 1.0"),
        ({"suffix_decoding_read_on": 1}, r"suffix_decoding_read_on must be true or false, got 1"),
        ({"suffix_decoding_earlier_answers": -1}, r"earlier_answers must be at least 0 .* got -1"),
        (
            {"suffix_decoding_earlier_answers": 4, "suffix_decoding_max_cached_tokens": 0},
            r"earlier_answers must be 0 if suffix_decoding_max_cached_tokens is 0, .*, got 4",
        ),
        ({"method": "mtp", "tree": True}, r"\.tree is refused: the engine verifies chains .* ops"),
        ({"medusa_choices": "f"}, r"medusa_choices is refused: .* trees are a feature of the ops"),
        ({"suffix_decoding_max_spec_factor": float("nan")}, r"max_spec_factor must be in .* nan"),
        ({"suffix_decoding_min_token_prob": 1.5}, r"min_token_prob must be in \[0, 1\], got 1.5"),
        ({"suffix_decoding_min_token_prob": "x"}, r"min_token_prob must be a number, got 'x'"),
        ({"model": ""}, r"model must be a path or null, got ''"),
        ({"model": 1}, r"model must be a path or null, got 1"),
        ({"draft_vocab": ""}, r"draft_vocab must be a path or null, got ''"),
        ({"method": "mtp", "draft_vocab": 1}, r"draft_vocab must be a path or null, got 1"),
    ],
)
def test_invalid_values_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**values)


@pytest.mark.parametrize(
    "key,message",
    [
        (
            "num_speculative_token",
            r"'num_speculative_token'; did you mean num_speculative_tokens\?",
        ),
        ("methods", r"did you mean method\?"),
        ("Method", r"did you mean method\?"),
        ("ngram_max_size", r"did you mean m\w+_ngram_size\?"),
        ("qqq", r"no field 'qqq'; known: method, num_speculative_tokens, "),
        ("prompt_lookup_max", r"prompt_lookup_max is a field of vLLM; use max_ngram_size"),
        ("lora_path", r"lora_path is refused: drafters use no LoRA adapter"),
        ("draft_adapter", r"draft_adapter is refused: drafters use no LoRA adapter"),
        (3, r"a key that is not a string: 3"),
        *((name, rf"speculative_config\.{name} is refused: ") for name in REFUSED_FIELDS),
    ],
)
def test_unknown_and_refused_keys_are_explained(key: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SpeculativeConfig.from_dict({"method": "ngram", key: 2})
    with pytest.raises(ValueError, match=message):
        SpeculativeConfig().override({key: 2})


@pytest.mark.parametrize(
    "text,expected",
    [
        (
            '{"method": "mtp", "num_speculative_tokens": 1, "model": "/path/to/mtp"}',
            {"method": "mtp", "options": {"mtp": {"model": "/path/to/mtp"}}},
        ),
        (
            '{"method": "mtp", "verify_strategy": "greedy", "num_speculative_tokens": 1, '
            '"model": "/path/to/mtp"}',
            {"method": "mtp", "verify_strategy": "greedy", "model": "/path/to/mtp"},
        ),
        (
            '{"method": "mtp", "accept_policy": "accept_all", "num_speculative_tokens": 1}',
            {"method": "mtp", "accept_policy": "accept_all"},
        ),
        (
            '{"method": "mtp", "num_model_steps": 2, "mtp_strategy": "with_ngram", '
            '"num_speculative_tokens": 5, "model": "/path/to/mtp"}',
            {
                "method": "mtp+ngram",
                "num_model_steps": 2,
                "num_speculative_tokens": 5,
                "model": "/path/to/mtp",
            },
        ),
        (
            '{"method": "ngram_match", "num_speculative_tokens": 5, "max_ngram_size": 5}',
            {"method": "ngram", "num_speculative_tokens": 5},
        ),
        (
            '{"method": "mtp", "num_speculative_tokens": 4, "suffix_decoding_max_tree_depth": 64, '
            '"suffix_decoding_max_cached_requests": 10000, "suffix_decoding_max_spec_factor": 1.0, '
            '"suffix_decoding_min_token_prob": 0.1}',
            {
                "method": "mtp",
                "num_speculative_tokens": 4,
                "options": {"suffix": {"suffix_decoding_max_cached_requests": 10000}},
            },
        ),
    ],
)
def test_examples_of_fastdeploy_are_accepted(text: str, expected: dict[str, Any]) -> None:
    config = SpeculativeConfig.from_json(text)
    assert config == SpeculativeConfig.from_dict(expected)


def test_flat_options_belong_to_the_method_behind_an_alias() -> None:
    config = make(method="dspark", model="/m")
    assert (config.method, config.options["dflash"].model) == ("dflash", "/m")
    assert config == make(method="dflash", model="/m")


def test_options_may_be_nested_by_method() -> None:
    """Flat fields override nested ones, and every option can be read flat."""
    nested = make(method="ngram", options={"ngram": {"max_ngram_size": 7}, "mtp": {"model": "/m"}})
    assert nested == make(method="ngram", max_ngram_size=7, model="/m")
    assert nested.options["ngram"] == NgramOptions(max_ngram_size=7)
    assert nested.options["mtp"] == MtpOptions(model="/m")
    assert make(**nested.as_dict()) == nested
    shown = nested.as_dict(without_files=True)["options"]
    assert shown["ngram"]["max_ngram_size"] == 7
    assert (shown["mtp"], shown["medusa"]) == ({"quantization": None}, {"quantization": None})
    with pytest.raises(ValueError, match=r"max_ngram_size twice: also in options\.ngram"):
        make(options={"ngram": {"max_ngram_size": 7}}, max_ngram_size=8)
    for options, message in (
        ({"falcon": {}}, r"options must be one of ngram, suffix, mtp, .*; got 'falcon'"),
        ({"ngram": 3}, "options.ngram must be an object, got 3"),
        ({"ngram": {"model": "/m"}}, "has no field 'model'; known: min_ngram_size"),
        ({"ngram": {"max_ngram_sizes": 3}}, r"did you mean max_ngram_size\?"),
        (3, "options must be an object by method, got 3"),
    ):
        with pytest.raises(ValueError, match=message):
            make(method="ngram", options=options)


def test_json_is_parsed_and_validated() -> None:
    text = '{"method": "ngram", "num_speculative_tokens": 5}'
    assert SpeculativeConfig.from_json(text) == make(method="ngram", num_speculative_tokens=5)
    for bad, message in (
        ("{", "not valid JSON"),
        ("[1]", r"must be a JSON object, got '\[1\]'"),
        ('{"method": "ngram", "method": "naive"}', "has method more than once"),
        ('{"method":' * 100_000, "nested too deeply"),
    ):
        with pytest.raises(ValueError, match=message):
            SpeculativeConfig.from_json(bad)
    with pytest.raises(ValueError, match=r"must be an object, got \[1\]"):
        SpeculativeConfig.from_dict([1])  # type: ignore[arg-type]


def test_config_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        make(method="ngram").method = "mtp"  # type: ignore[misc]


@pytest.mark.parametrize(
    "request_values,expected",
    [
        ({}, {"method": "ngram", "num_speculative_tokens": 5, "num_model_steps": 5}),
        ({"method": None}, {"method": "ngram", "num_speculative_tokens": 5}),
        ({"method": "naive"}, {"method": "naive", "num_speculative_tokens": 0}),
        ({"method": "NGRAM_match"}, {"method": "ngram", "num_speculative_tokens": 5}),
        ({"method": "suffix"}, {"method": "suffix", "num_speculative_tokens": 5}),
        ({"num_speculative_tokens": 2}, {"num_speculative_tokens": 2, "num_model_steps": 2}),
        ({"num_speculative_tokens": 9}, {"num_speculative_tokens": 9, "num_model_steps": 9}),
        ({"num_model_steps": 2}, {"num_speculative_tokens": 5, "num_model_steps": 2}),
        ({"verify_strategy": "greedy"}, {"verify_strategy": "greedy", "method": "ngram"}),
        ({"accept_policy": "reject_all"}, {"accept_policy": "reject_all"}),
        (
            {"accept_policy": "synthetic", "synthetic_acceptance_rates": [0.5]},
            {"synthetic_acceptance_rates": (0.5,)},
        ),
        ({"min_ngram_size": 4}, {"min_ngram_size": 4, "max_ngram_size": 7}),
        ({"ngram_match": "leftmost"}, {"ngram_match": "leftmost", "max_ngram_size": 7}),
    ],
)
def test_request_may_override_fields(
    request_values: dict[str, Any], expected: dict[str, Any]
) -> None:
    server = make(method="ngram", num_speculative_tokens=5, max_ngram_size=7)
    config = server.override(request_values)
    shown = config.as_dict()
    shown |= shown["options"]["ngram"]
    assert {name: shown[name] for name in expected} == expected


def test_request_may_speculate_on_a_server_without_speculation() -> None:
    config = SpeculativeConfig().override({"method": "ngram"})
    assert (config.method, config.num_speculative_tokens) == ("ngram", 1)
    with pytest.raises(ValueError, match='with method "naive"'):
        SpeculativeConfig().override({"num_speculative_tokens": 3})


def test_request_may_leave_a_hybrid() -> None:
    server = make(
        method="mtp", mtp_strategy="with_ngram", num_speculative_tokens=4, num_model_steps=2
    )
    config = server.override({"method": "ngram"})
    assert (config.method, config.num_speculative_tokens) == ("ngram", 4)
    assert server.override({"num_speculative_tokens": 2}).num_model_steps == 1
    for own in ({"method": "mtp"}, {"method": "mtp", "mtp_strategy": "default"}):
        config = server.override(own)
        assert (config.method, config.num_speculative_tokens, config.num_model_steps) == (
            "mtp",
            4,
            4,
        )
    for same in ({"method": "mtp+ngram"}, {"mtp_strategy": "with_ngram"}, {"mtp_strategy": None}):
        assert server.override(same) == server
    own = {"method": "mtp+suffix", "num_model_steps": 3}
    config = server.override(own)
    assert (config.method, config.num_model_steps) == ("mtp+suffix", 3)


def test_request_may_choose_a_hybrid() -> None:
    server = make(method="ngram", num_speculative_tokens=5, model="/mtp", draft_vocab="/d2t")
    config = server.override({"method": "mtp+suffix"})
    assert (config.num_speculative_tokens, config.num_model_steps) == (5, 1)
    assert config.options["mtp"] == MtpOptions(model="/mtp", draft_vocab="/d2t")
    with pytest.raises(ValueError, match=r"needs method .mtp., got 'ngram'"):
        server.override({"mtp_strategy": "with_ngram"})
    with pytest.raises(ValueError, match=r"mtp_strategy must be one of .* got 'both'"):
        server.override({"method": "mtp", "mtp_strategy": "both"})
    with pytest.raises(ValueError, match=r"mtp_strategy must be one of .* got \['default'\]"):
        server.override({"method": "mtp", "mtp_strategy": ["default"]})
    with pytest.raises(ValueError, match=r"num_model_steps must be at most .* = 5, got 6"):
        server.override({"method": "mtp", "num_model_steps": 6})


@pytest.mark.parametrize(
    "key",
    ("max_total_draft_tokens", "model", "draft_vocab", "suffix_decoding_read_on"),
)
def test_other_fields_cannot_be_overridden_by_requests(key: str) -> None:
    with pytest.raises(ValueError, match=rf"\.{key} can only be set by the server"):
        make(method="ngram").override({key: "/etc/passwd"})


def test_request_cannot_exceed_the_draft_limit_of_the_server() -> None:
    server = make(method="ngram", num_speculative_tokens=5)
    assert server.override({"num_speculative_tokens": 8}, max_num_speculative_tokens=8)
    with pytest.raises(ValueError, match=r"must be at most 8 on this server, got 9"):
        server.override({"num_speculative_tokens": 9}, max_num_speculative_tokens=8)
    with pytest.raises(ValueError, match="num_speculative_tokens must be an integer"):
        server.override({"num_speculative_tokens": "9"}, max_num_speculative_tokens=8)


def test_request_cannot_exceed_the_model_step_limit_of_the_server() -> None:
    """A default number of model steps is lowered to the limit; an explicit one is refused."""
    server = make(method="ngram", num_speculative_tokens=20)

    def steps(**request: Any) -> int:
        own = {"method": "mtp", **request}
        return server.override(own, max_num_model_steps=16).num_model_steps

    assert steps() == 16
    assert steps(num_speculative_tokens=9) == 9
    assert steps(num_model_steps=16) == 16
    assert steps(method="mtp+suffix", num_speculative_tokens=400) == 1
    with pytest.raises(ValueError, match=r"num_model_steps must be at most 16 on this server"):
        steps(num_model_steps=17)
    assert server.override({}, max_num_model_steps=16) == server, (
        "n-gram drafts need no model passes"
    )


@pytest.mark.parametrize("method", method_names())
def test_methods_that_cannot_run_are_refused(method: str) -> None:
    config = make(method=method)
    if method in ("naive", "ngram"):
        config.require_runnable(("naive", "ngram"))
    else:
        with pytest.raises(ValueError, match=f'method "{method}" cannot run .* naive, ngram$'):
            config.require_runnable(("naive", "ngram"))
        with pytest.raises(ValueError, match=f'"{method}" .* which has naive: not installed$'):
            config.require_runnable(("naive",), missing={method: "not installed"})


def test_strategies_that_cannot_run_are_refused() -> None:
    config = make(method="ngram", verify_strategy="topp")
    config.require_runnable(("naive", "ngram"))
    with pytest.raises(ValueError, match=r'"topp" cannot run .* target_match, greedy$'):
        config.require_runnable(("naive", "ngram"), ("target_match", "greedy"))


def test_synthetic_rates_become_conditional() -> None:
    """For each draft, the config has the probability that it and all earlier ones are accepted."""
    config = make(**SYNTHETIC, synthetic_acceptance_rates=[0.8, 0.4, 0.1])
    assert config.conditional_acceptance_rates() == pytest.approx([0.8, 0.5, 0.25])
    zeros = make(**SYNTHETIC, synthetic_acceptance_rates=[0.8, 0.0, 0.0])
    assert zeros.conditional_acceptance_rates() == pytest.approx([0.8, 0, 0])
    assert make(method="ngram").conditional_acceptance_rates() == []
    assert config.override({"accept_policy": "normal"}).synthetic_acceptance_rates is None
    assert config.override({"min_ngram_size": 3}).synthetic_acceptance_rates == (0.8, 0.4, 0.1)
