# SPDX-License-Identifier: Apache-2.0
"""`specops complete` prints and writes the engine's output, and reports differences."""

import io
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from specops import sampling
from specops.api.config import BUNDLED_MODEL
from specops.cli import complete, main
from specops.cli.tint import has_colors
from specops.engine import Engine, EngineConfig, SamplingParams, SpeculativeConfig
from specops.engine.drafters.mtp import MtpHead
from specops.engine.steps import runner

pytestmark = pytest.mark.skipif(
    not (BUNDLED_MODEL / "model.safetensors").is_file(), reason="the bundled model is missing"
)

PROMPT = "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n"
COMMAND = ["complete", "--device", "cpu", "--num-threads", "1", "--max-tokens", "24"]
SEEDED = ["--temperature", "0.4", "--top-p", "0.9", "--seed", "5"]


def reported(*options: str, file: Path, code: int = 0) -> dict[str, Any]:
    assert main([*COMMAND, PROMPT, "--json", str(file), *options]) == code
    report = json.loads(file.read_text())
    assert isinstance(report, dict)
    return report


@pytest.mark.parametrize("method", ["naive", "ngram", "suffix", "mtp"])
def test_report_equals_the_engines_output(
    method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = reported("--method", method, "--logprobs", "2", *SEEDED, file=tmp_path / "a.json")
    streamed = capsys.readouterr()
    engine = Engine(EngineConfig(device="cpu", max_num_seqs=1, num_threads=1))
    params = SamplingParams(max_tokens=24, temperature=0.4, top_p=0.9, seed=5, logprobs=2)
    (want,) = engine.generate([PROMPT], params, speculative_config={"method": method})
    assert streamed.out == want.text + "\n"
    assert report["text"] == want.text and report["token_ids"] == want.token_ids
    assert report["prompt_token_ids"] == want.prompt_token_ids and report["seed"] == 5
    for entry, one in zip(report["logprobs"], want.logprobs, strict=True):
        assert (entry["token_id"], entry["logprob"], entry["rank"]) == (
            one.token_id,
            one.logprob,
            one.rank,
        )
        assert entry["alternatives"] == [list(other) for other in one.alternatives]
    assert report["finish_reason"] == want.finish_reason
    steps = report["steps"]
    assert [token for step in steps for token in step["token_ids"]] == want.token_ids
    assert [step["seconds"] for step in steps] == sorted(step["seconds"] for step in steps)
    drafts = [step["drafts"] for step in steps if step["drafts"] is not None]
    stats = report["stats"]
    assert sum(len(one["token_ids"]) for one in drafts) == stats["num_draft_tokens"]
    assert sum(one["num_accepted"] for one in drafts) == stats["num_accepted_tokens"]
    assert (method == "naive") == (stats["num_draft_tokens"] == 0)
    assert {source for one in drafts for source in one["sources"]} <= {method}
    assert f"{method}: {len(want.token_ids)} tokens in {stats['num_steps']} steps" in streamed.err
    assert "plain" not in report


def test_compare_reports_plain_decoding(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = reported("--compare", "--method", "mtp", *SEEDED, file=tmp_path / "a.json")
    error = capsys.readouterr().err
    count = len(report["token_ids"])
    per_step = f"{(count - 1) / (len(report['steps']) - 1):.2f}"
    assert (
        f"identical: {count} of {count} tokens and logprobs\n{per_step} tokens per step, " in error
    )
    assert re.search(r"[\d.]+ times as fast as plain \(.* in (half of )?\d pairs", error)
    assert 1 <= len(report["timed_pairs"]) <= 7 and report["tokens_per_step"] > 1
    assert report["speed_up"]["factor"] <= report["tokens_per_step"]
    assert report["identical"] is True and report["first_difference"] is None
    assert report["plain"]["token_ids"] == report["token_ids"]
    assert report["plain"]["logprobs"] == report["logprobs"]
    assert report["stats"]["num_accepted_tokens"] > 0
    assert report["plain"]["stats"]["num_draft_tokens"] == 0


def test_session_is_resumed_and_saved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Text and drafts are those of one engine; a file of something else is refused and kept."""
    pytest.importorskip("msgspec")
    file, method = tmp_path / "a.session", ("--method", "suffix", "--num-speculative-tokens", "4")
    drafts = SpeculativeConfig(method="suffix", num_speculative_tokens=4)
    engine = Engine(EngineConfig(device="cpu", max_num_seqs=1, speculative_config=drafts))
    prompt = PROMPT * 2
    for number in range(2):
        (want,) = engine.generate([prompt], SamplingParams(max_tokens=24, temperature=0.0))
        assert main([*COMMAND, prompt, *method, "--session", str(file)]) == 0
        output = capsys.readouterr()
        assert output.out == f"{want.text}\n"
        assert f"{want.stats.num_accepted_tokens} of {want.stats.num_draft_tokens}" in output.err
        cached, total = want.num_cached_tokens, len(want.prompt_token_ids)
        assert (cached > 0) == (number > 0)
        assert f"session: {cached} of {total} prompt tokens were resumed" in output.err
        prompt += want.text
    file.write_text("something else")
    assert main([*COMMAND, prompt, "--session", str(file)]) == 2
    assert "cannot be resumed: it is no session file" in capsys.readouterr().err
    assert file.read_text() == "something else"


def test_seed_is_printed_for_sampled_texts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*COMMAND, PROMPT, "--compare"]) == 0
    assert "seed" not in capsys.readouterr().err
    assert main([*COMMAND, PROMPT, *SEEDED]) == 0
    assert capsys.readouterr().err.endswith("ended by length, seed 5\n")


@pytest.mark.parametrize("method", ["ngram", "mtp"])
def test_accepted_drafts_are_colored_on_a_terminal(
    method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("rich")
    report = reported("--method", method, file=tmp_path / "a.json")
    plain = capsys.readouterr().out
    monkeypatch.setattr(complete, "has_colors", lambda stream: True)
    reported("--method", method, file=tmp_path / "a.json")
    shown = capsys.readouterr().out
    text, _, legend = shown.removesuffix("\n").rpartition("\n")
    color = {"ngram": "\x1b[94m", "mtp": "\x1b[95m"}[method]
    assert legend == f"colored text: accepted drafts of {color}{method}\x1b[0m"
    assert re.sub(r"\x1b\[\d+m", "", text) + "\n" == plain
    # The texts of accepted drafts can be empty, if a token is a part of a character.
    assert 0 < text.count(color) <= report["stats"]["num_accepted_tokens"]


def test_stop_strings_end_colored_texts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("rich")
    assert main([*COMMAND, PROMPT]) == 0
    whole = capsys.readouterr().out
    stop = whole[len(whole) // 2 :][:3]
    monkeypatch.setattr(complete, "has_colors", lambda stream: True)
    assert main([*COMMAND, PROMPT, "--stop", stop]) == 0
    shown = re.sub(r"\x1b\[\d+m", "", capsys.readouterr().out)
    assert shown.startswith(whole.partition(stop)[0] + "\n") and stop not in shown


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colors_require_a_terminal_that_supports_them(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert has_colors(Terminal()) and not has_colors(io.StringIO())
    monkeypatch.setenv("TERM", "dumb")
    assert not has_colors(Terminal())
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert not has_colors(Terminal())
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert not has_colors(Terminal()), "rich is not installed"


def test_difference_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted verifier accepts every draft."""
    monkeypatch.setitem(runner._POLICIES, "normal", int(sampling.AcceptPolicy.ACCEPT_ALL))
    options = ["--compare", "--method", "mtp", *SEEDED]
    report = reported(*options, file=tmp_path / "a.json", code=1)
    place = report["first_difference"]
    plain, drafted = report["plain"]["token_ids"], report["token_ids"]
    assert plain[:place] == drafted[:place] and plain[place] != drafted[place]
    assert report["identical"] is False
    error = capsys.readouterr().err
    assert f"different at output token {place}:\n" in error
    assert f"  plain:   token {plain[place]} " in error
    assert f"  drafted: token {drafted[place]} " in error
    assert "does not promise identical output" not in error


def test_lost_drafts_are_reported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: MtpHead, *rows: object) -> None:
        raise IndexError("planted")

    monkeypatch.setattr(MtpHead, "forward", fails)
    assert main([*COMMAND, PROMPT, "--compare", "--method", "mtp"]) == 1
    error = capsys.readouterr().err
    assert "identical: 24 of 24 tokens" in error
    assert "drafts were lost: the drafter of mtp failed" in error


def test_inexact_strategy_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    config = '{"method": "mtp", "num_speculative_tokens": 3, "verify_strategy": "rejection"}'
    options = ["--compare", "--temperature", "1", "--speculative-config", config]
    codes = [main([*COMMAND, PROMPT, *options, "--seed", str(seed)]) for seed in range(3)]
    assert 1 in codes
    assert "verify_strategy rejection does not promise identical output" in capsys.readouterr().err


def test_prompt_from_stdin_and_json_to_stdout(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main([*COMMAND, PROMPT]) == 0
    whole = capsys.readouterr().out
    stop = whole[len(whole) // 2 :][:3]
    monkeypatch.setattr("sys.stdin", io.StringIO(PROMPT))
    assert main([*COMMAND, "--json", "-", "--stop", stop, "--stop", "not in it"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["finish_reason"] == "stop" and printed["stop_reason"] == stop
    assert printed["text"] == whole.partition(stop)[0]
    assert main([*COMMAND, PROMPT, "--stop", stop]) == 0
    assert capsys.readouterr().out == printed["text"] + "\n"


@pytest.mark.parametrize(
    "options,message",
    [
        (["--method", "falcon"], "method must be one of naive, ngram, suffix, mtp"),
        (["--num-speculative-tokens", "0"], "num_speculative_tokens must be at least 1"),
        (["--max-tokens", "-1"], "max_tokens must be"),
        (["--temperature", "-1"], "temperature must be"),
        (["--model", "/nowhere"], "no such directory"),
        (["--model", __file__], "model must be a Hugging Face directory or a .gguf file, got the"),
        (["--method", "eagle3"], 'set speculative_config to {"method": "eagle3", "model": "DIR"}'),
        (["--speculative-config", "{"], "speculative_config is not valid JSON"),
        (["--session", "a", "--compare"], "--session must be absent with --compare"),
        (["--session", "/nowhere/a"], "--session: files in /nowhere cannot be written"),
        (["--model", "/nowhere", "--json", "/nowhere/a"], "--json must be a file to write, got"),
    ],
)
def test_invalid_options_are_refused(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*COMMAND, PROMPT, *options]) == 2
    assert message in capsys.readouterr().err


def test_terminals_are_asked_for_the_prompt_and_see_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def given(is_terminal: bool) -> tuple[str, str]:
        stdin = io.StringIO(PROMPT)
        for stream in (stdin, sys.stdout):
            monkeypatch.setattr(stream, "isatty", lambda: is_terminal, raising=False)
        monkeypatch.setattr("sys.stdin", stdin)
        monkeypatch.setenv("NO_COLOR", "1")
        assert main(COMMAND) == 0
        return capsys.readouterr()

    out, err = given(False)
    assert not err.startswith("reading")
    shown, asked = given(True)
    assert shown == PROMPT + out
    assert asked.startswith("reading the prompt from standard input; Ctrl-D ends it\n")


def test_loading_of_large_models_is_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specops.engine.models.loading._LARGE_BYTES", 1000)
    assert main([*COMMAND, PROMPT]) == 0
    lines = capsys.readouterr().err.splitlines()
    size = (BUNDLED_MODEL / "model.safetensors").stat().st_size / 1e6
    assert lines[0] == f"loading {BUNDLED_MODEL} ({size:.1f} MB, bfloat16)"
    assert lines[-2] == f"loading {BUNDLED_MODEL}: 100 %"
    pytest.importorskip("rich")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr("specops.cli._imported", lambda command: complete)
    assert main([*COMMAND, PROMPT]) == 0
    bar = capsys.readouterr()
    assert "100 %" in bar.err and "loading" not in bar.out


def test_more_threads_than_cpus_cause_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    count = len(os.sched_getaffinity(0))
    Engine(EngineConfig(device="cpu", num_threads=count))
    assert not caplog.text
    Engine(EngineConfig(device="cpu", num_threads=count + 1))
    assert f"num_threads {count + 1} exceeds the {count} CPUs of this process" in caplog.text
