# SPDX-License-Identifier: Apache-2.0
"""`verify-exactness` reports planted differences, and none for correct engines."""

import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from specops import sampling
from specops.cli import exactness
from specops.cli.serve import main
from specops.engine import Completion, Engine, SpeculativeStats, TokenLogprob
from specops.engine.drafters.mtp import MtpHead
from specops.engine.drafters.recurrent import RecurrentDrafter
from specops.engine.steps import runner

Change = Callable[[TokenLogprob], TokenLogprob]

COMMAND = ["verify-exactness", "--device", "cpu", "--num-threads", "2", "--max-tokens", "32"]

# Methods that the bundled model supports without another model directory.
RUNNABLE = ("ngram", "suffix", "mtp", "mtp+ngram", "mtp+suffix")


def table(text: str) -> list[dict[str, str]]:
    """Return the rows of the table at the end of the output, by column."""
    lines = text.splitlines()
    head = next(i for i, line in enumerate(lines) if line.split()[:1] == ["method"])
    names = lines[head].split()
    rows = []
    for line in lines[head + 1 :]:
        if not line.strip():
            break
        rows.append(dict(zip(names, line.split(), strict=True)))
    return rows


def test_no_difference_is_reported_for_all_methods(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, "--prompts", "6", "--num-speculative-tokens", "3"]) == 0
    captured = capsys.readouterr()
    assert captured.err == "", "no progress bar without a terminal"
    text = captured.out
    head, verdict, *_ = text.splitlines()
    assert head == "specops-bundled on cpu: 6 prompts, up to 32 tokens each"
    tokens = sum(int(row["tokens"]) for row in table(text))
    assert verdict.startswith(
        f"No difference in {tokens:,} tokens: all tokens, ranks and logprob bits"
    )
    rows = table(text)
    assert [(row["method"], row["k"], row["temp."]) for row in rows] == [
        (method, "3", temperature) for temperature in ("0", "0.8") for method in RUNNABLE
    ]
    assert all(row["differences"] == "0" for row in rows)
    assert all(len(line) <= 80 for line in text.split("\n\n")[-1].splitlines())
    # A comparison means nothing without accepted and rejected drafts.
    for row in rows[:5]:
        assert 0 < float(row["accepted"].rstrip("%")) < 100
        assert float(row["tokens/step"]) > 1


SHORT = ["--prompts", "2", "--max-tokens", "12", "--temperature", "0", "0.8", "--method", "ngram"]


def test_verbose_prints_a_line_per_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, *SHORT]) == 0
    whole = capsys.readouterr().out
    assert "drafts accepted, equal" not in whole
    assert main([*COMMAND, *SHORT, "--verbose"]) == 0
    verbose = capsys.readouterr().out
    assert verbose.count("drafts accepted, equal: 'def add(a, b)") == 2
    assert set(whole.splitlines()) <= set(verbose.splitlines()), "all other lines must be unchanged"
    assert verbose.index("ngram, temperature 0.8") < verbose.index("No difference in")


def test_quiet_prints_only_the_verdict(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main([*COMMAND, *SHORT, "--quiet"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 and lines[0].startswith("No difference in 48 tokens")
    monkeypatch.setitem(runner._POLICIES, "normal", int(sampling.AcceptPolicy.ACCEPT_ALL))
    assert main([*COMMAND, *SHORT, "--quiet"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 and re.match(r"\d of 4 outputs differ", lines[0])


def test_progress_bar_is_shown_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then treats any stream as a terminal
    assert main([*COMMAND, *SHORT]) == 0
    captured = capsys.readouterr()
    assert "8/8" in captured.err and "ngram, temperature 0.8 is done" in captured.err
    assert captured.out.startswith("specops-bundled on cpu: 2 prompts"), (
        "the bar must not be on standard output"
    )
    for option in ("--quiet", "--verbose"):
        assert main([*COMMAND, *SHORT, option]) == 0
        assert "8/8" not in capsys.readouterr().err


def test_command_works_without_rich(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("rich.console", "rich.progress"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main([*COMMAND, *SHORT]) == 0
    assert "No difference in 48 tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    "hook,words", [("forward", "the drafter of mtp failed"), ("plan", "mtp drafted nothing")]
)
def test_lost_drafts_are_reported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, hook: str, words: str
) -> None:
    """The planted drafter raises an error or never drafts."""

    def fails(self: MtpHead, *rows: object) -> None:
        raise IndexError("planted")

    def rests(self: RecurrentDrafter, *planned: object) -> None:
        return None

    if hook == "forward":
        monkeypatch.setattr(MtpHead, hook, fails)
    else:
        monkeypatch.setattr(RecurrentDrafter, hook, rests)
    own = ["--prompts", "2", "--max-tokens", "12", "--temperature", "0", "--method", "mtp"]
    assert main([*COMMAND, *own, "--quiet"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("No verdict on mtp, temperature 0: ") and words in out


def test_wrongly_accepted_drafts_are_reported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted verifier accepts every draft."""
    monkeypatch.setitem(runner._POLICIES, "normal", int(sampling.AcceptPolicy.ACCEPT_ALL))
    assert main([*COMMAND, "--prompts", "4", "--temperature", "0.8"]) == 1
    text = capsys.readouterr().out
    each = [int(row["differences"]) for row in table(text)]
    assert len(each) == 5 and all(0 < different <= 4 for different in each)
    assert text.splitlines()[1] == (
        f"{sum(each)} of 20 outputs differ: speculation changed the output."
    )
    assert text.count("DIFFERENT: ") == sum(each)
    assert re.search(
        r"plain: +output token \d+ is token \d+ .*, logprob -\d.*\n"
        r" +drafted: +output token \d+ is token \d+ .*, logprob",
        text,
    )


def last_bit(value: float) -> float:
    """Return the next float32."""
    return float(np.nextafter(np.float32(value), np.float32(-9)))


def in_alternative(place: int, change: Callable[[int, float], tuple[int, float]]) -> Change:
    def plant(one: TokenLogprob) -> TokenLogprob:
        others = list(one.alternatives)
        others[place] = change(*others[place])
        return replace(one, alternatives=tuple(others))

    return plant


PLANTED: dict[str, Change] = {
    "logprob": lambda one: replace(one, logprob=last_bit(one.logprob)),
    "rank": lambda one: replace(one, rank=one.rank + 1),
    "alternative id": in_alternative(4, lambda i, value: (i + 1, value)),
    "alternative logprob": in_alternative(1, lambda i, value: (i, last_bit(value))),
    "alternative missing": lambda one: replace(one, alternatives=one.alternatives[:-1]),
    "alternatives swapped": lambda one: replace(one, alternatives=one.alternatives[::-1]),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_difference_in_one_token_is_reported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, planted: str
) -> None:
    """The third token of the second prompt differs, only with drafts."""
    generate = Engine.generate

    def nudged(engine: Engine, prompts: Any, params: Any, **options: Any) -> list[Completion]:
        completions = generate(engine, prompts, params, **options)
        if options["speculative_config"]["method"] != "naive":
            logprobs = completions[1].logprobs
            assert len(logprobs[2].alternatives) == 5
            logprobs[2] = PLANTED[planted](logprobs[2])
        return completions

    monkeypatch.setattr(Engine, "generate", nudged)
    options = ["--prompts", "2", "--max-tokens", "6", "--temperature", "0", "--method", "ngram"]
    assert main([*COMMAND, *options]) == 1
    text = capsys.readouterr().out
    assert [row["differences"] for row in table(text)] == ["1"]
    plain, drafted = re.findall(r"(?:plain|drafted): +output token 2 is (.*)", text)
    assert plain != drafted and ", rank 1, of [" in plain


@pytest.mark.parametrize("field", ["text", "finish_reason", "stop_reason", "token_ids"])
def test_difference_outside_the_logprobs_is_detected(field: str) -> None:
    logprobs = [TokenLogprob(token_id, -0.5, ((token_id, -0.5),), 1) for token_id in (4, 5)]
    one = Completion("a", 0, [1], [4, 5], "xy", logprobs, "stop", 0, 0, SpeculativeStats())
    others: dict[str, Any] = {"text": "xz", "finish_reason": "length", "stop_reason": "z"}
    other = replace(one, **{field: others.get(field, [4, 6])})
    assert exactness.first_difference(one, one) is None
    assert exactness.first_difference(one, other) == (1 if field == "token_ids" else 2)
    shorter = replace(one, token_ids=[4], logprobs=logprobs[:1], text="x")
    assert exactness.first_difference(one, shorter) == 1
    with pytest.raises(ValueError, match="must have a logprob, got 1 for 2 tokens"):
        exactness.first_difference(one, replace(one, logprobs=logprobs[:1]))


def test_comparisons_do_not_share_suffix_caches(
    capsys: pytest.CaptureFixture[str],
) -> None:
    methods = ["mtp+suffix", "suffix", "mtp+suffix", "suffix"]
    assert main([*COMMAND, "--prompts", "3", "--temperature", "0.8", "--method", *methods]) == 0
    rows = table(capsys.readouterr().out)
    assert rows[:2] == rows[2:]
    assert all(int(row["drafts"]) > 0 for row in rows)


def test_speculative_config_can_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--prompts", "2", "--max-tokens", "8", "--temperature", "0"]

    def compared(config: str, *more: str) -> list[tuple[str, str]]:
        assert main([*COMMAND, *options, "--speculative-config", config, *more]) == 0
        return [(row["method"], row["k"]) for row in table(capsys.readouterr().out)]

    own = '{"method": "suffix", "num_speculative_tokens": 7, "suffix_decoding_max_tree_depth": 9}'
    assert compared(own) == [("suffix", "7")]
    assert compared(own, "--num-speculative-tokens", "2") == [("suffix", "2")]
    assert compared(own, "--method", "ngram") == [("ngram", "7")]
    assert compared('{"max_ngram_size": 3}') == [(method, "4") for method in RUNNABLE]
    own = '{"method": "mtp+suffix", "num_speculative_tokens": 3}'
    assert compared(own, "--num-model-steps", "2") == [("mtp+suffix", "3")]


def test_prompts_can_be_read_from_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = tmp_path / "lines.txt"
    lines.write_text("a b c a b c a b\n\nx = 1\n")
    short = [*COMMAND, "--max-tokens", "4", "--temperature", "0"]
    assert main([*short, "--verbose", "--prompt-file", str(lines)]) == 0
    text = capsys.readouterr().out
    assert "2 prompts" in text and "'a b c a b c a b'" in text and "'x = 1'" in text
    listed = tmp_path / "prompts.json"
    listed.write_text('["one\\ntwo", "three"]')
    assert main([*short, "--verbose", "--prompt-file", str(listed)]) == 0
    assert r"'one\ntwo'" in capsys.readouterr().out


def test_little_evidence_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = tmp_path / "one.txt"
    one.write_text("x\n")
    options = ["--max-tokens", "1", "--temperature", "0", "--prompt-file", str(one)]
    assert main([*COMMAND, *options]) == 0
    assert "0 of 0 drafts of ngram were accepted; compare more tokens" in capsys.readouterr().out


@pytest.mark.parametrize(
    "options,message",
    [
        (["--prompts", "0"], "--prompts must be 1 to 20, got 0"),
        (["--json", "/nowhere/a"], "--json must be a file to write, got /nowhere/a"),
        (["--prompts", "21"], "--prompts must be 1 to 20, got 21"),
        (["--prompt-file", "/nowhere"], "No such file"),
        (["--model", "/nowhere"], "no such directory"),
        (["--max-tokens", "0"], "--max-tokens must be at least 1, got 0"),
        (["--method", "mtp", "--num-model-steps", "5"], "num_model_steps must be at most"),
        (["--method", "mtp+tree"], "--method must be one of ngram, suffix, mtp, mtp+ngram"),
        (["--method", "ngram+suffix"], "--method must be one of ngram, suffix, mtp, mtp+ngram"),
        (["--speculative-config", "{"], "speculative_config is not valid JSON"),
    ],
)
def test_invalid_options_are_refused(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*COMMAND, *options]) == 2
    assert message in capsys.readouterr().err


def test_built_in_prompts_are_distinct() -> None:
    assert len(set(exactness.PROMPTS)) == len(exactness.PROMPTS) == 20
