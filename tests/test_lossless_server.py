# SPDX-License-Identifier: Apache-2.0
"""`specops verify-exactness --url` notices every flaw, and names what it cannot compare."""

import io
import json
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
from lossy_server import AT, Lossy, lossy_server
from specops.cli import main
from specops.cli.lossless import command
from specops.cli.lossless.answers import Answer, Token, read_answer
from specops.cli.lossless.differences import difference
from specops.cli.lossless.texts import TEXTS
from specops.cli.lossless.verdict import Comparison

pytestmark = pytest.mark.ci

ROOT = Path(__file__).resolve().parent.parent
NO_CARD = {"id": "m"}


def verify(
    capsys: pytest.CaptureFixture[str], lossy: Lossy, *options: str, code: int
) -> dict[str, Any]:
    """Return the findings of the command on four prompts of eight tokens."""
    with lossy_server(lossy):
        arguments = ["--url", lossy.url, "--prompts", "4", "--max-tokens", "8", "--json", "-"]
        assert main(["verify-exactness", *arguments, *options]) == code
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


def different(found: dict[str, Any], kind: str) -> list[int]:
    """Return the number of outputs with such a difference, by comparison."""
    return [one["counts"][kind] for one in found["comparisons"]]


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_pyz_runs_without_installed_packages() -> None:
    """`make build/specops.pyz` writes one file that needs the standard library only."""
    made = ["make", "--silent", "--no-print-directory", "-C", str(ROOT), "build/specops.pyz"]
    subprocess.run([*made, f"PYTHON={sys.executable}"], check=True, timeout=300)
    command = [sys.executable, "-S", "-I", str(ROOT / "build" / "specops.pyz"), "verify-exactness"]
    with lossy_server(Lossy()) as lossy, lossy_server(Lossy(flaw="text")) as wrong:
        for url, code, start in (
            (lossy.url, 0, "Lossless with ngram: "),
            (wrong.url, 1, "Differs"),
        ):
            done = subprocess.run(
                [*command, "--url", url, "--prompts", "1"], capture_output=True, text=True
            )
            assert done.returncode == code and done.stdout.startswith(start), done.stderr


@pytest.mark.parametrize("shape", ["completions", "chat"])
@pytest.mark.parametrize("has_ids", [False, True])
def test_server_without_flaw_is_lossless(
    shape: str, has_ids: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    found = verify(capsys, Lossy(shape=shape, has_ids=has_ids), code=0)
    assert found["status"] == "lossless" and found["sentence"].startswith("Lossless with ngram: ")
    assert "in 128 tokens, alone or beside others, greedy or seeded." in found["sentence"]
    assert [mode["drafts"]["num_accepted_tokens"] for mode in found["modes"]] == [0, 32]
    assert len(found["comparisons"]) == 8
    for one in found["comparisons"]:
        assert one["num_compared"] == 4 and one["num_tokens"] == 32 and one["differences"] == []
        assert set(one["missing"]) == (set() if has_ids else {"ids"})
    assert [("ids are not reported" in note) for note in found["notes"]] == [True] * (not has_ids)


FLAWS = {
    "text": ("text",),
    "token": ("text", "token"),
    "logprob": ("logprob",),
    "alternative": ("logprob",),
    "ending": ("ending",),
}


@pytest.mark.parametrize("flaw", FLAWS)
def test_every_flaw_is_noticed(flaw: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = verify(capsys, Lossy(flaw=flaw), code=1)
    assert found["status"] == "differs"
    for kind in ("text", "token", "logprob", "ending"):
        wrong = 4 if kind in FLAWS[flaw] else 0
        assert different(found, kind) == [0, 0, 0, 0, *[wrong] * 4]
    assert "8 of 8 greedy and 8 of 8 seeded" in found["sentence"]
    assert found["sentence"].startswith("Differs in logprobs only: ") == (
        FLAWS[flaw] == ("logprob",)
    )
    (one, *_) = found["comparisons"][-1]["differences"]
    place = {"text": one["difference"]["place"], "ending": 8}.get(flaw, AT)
    assert one["difference"]["unit"] == ("character" if flaw == "text" else "token")
    assert one["difference"]["place"] == place
    plain, other = one["difference"]["plain"], one["difference"]["other"]
    if flaw == "token":  # each side reports its token, and the other one's logprob
        assert plain["next"] != other["next"] and plain["logprob"] == other["others_logprob"]
    if FLAWS[flaw] == ("logprob",):
        assert one["difference"]["logprob_gap"] == 2.0**-24
    if flaw == "ending":
        assert (plain["ending"], other["ending"]) == ("length", "stop")


def test_flaws_in_batches_or_with_seeds_are_noticed(capsys: pytest.CaptureFixture[str]) -> None:
    """Eight requests of a batch run at a time."""
    in_batch = verify(capsys, Lossy(flaw="token", in_batch=True), code=1)
    assert different(in_batch, "token")[:6] == [0] * 6 and min(different(in_batch, "token")[6:]) > 0
    assert "Without speculation, all outputs repeat." in in_batch["sentence"]
    seeded = verify(capsys, Lossy(flaw="token", seeded=True), code=1)
    assert different(seeded, "token") == [0, 0, 0, 0, 0, 4, 0, 4]
    assert "0 of 8 greedy and 8 of 8 seeded outputs" in seeded["sentence"]


def test_batch_that_changes_plain_decoding_is_reported(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lossy = Lossy(flaw="token", in_batch=True, plain=True)
    sentence = verify(capsys, lossy, code=1)["sentence"]
    assert "Alone, none differs: the batch changes them. Without speculation, " in sentence
    one = Lossy(flaw="token", in_batch=True, plain=True, card=NO_CARD)
    sentence = verify(capsys, one, code=1)["sentence"]
    assert sentence.startswith("Differs without speculation: of the outputs, ")
    assert sentence.endswith(" of 8 beside others differ from the first run alone.")


def test_baseline_server_is_the_plain_one(capsys: pytest.CaptureFixture[str]) -> None:
    with lossy_server(Lossy(card=NO_CARD, speculates=False)) as plain:
        baseline = ("--baseline-url", plain.url, "--baseline-model", "plain-m")
        found = verify(capsys, Lossy(card=NO_CARD, flaw="logprob"), *baseline, code=1)
        assert {body["model"] for body in plain.bodies} == {"plain-m"}
        assert not any("speculative_config" in body for body in plain.bodies)
        assert [mode["name"] for mode in found["modes"]] == ["plain", "drafts"]
        # Counts of drafts are found in any of these places.
        for counts in ("metrics", "usage", "timings", "counters"):
            found = verify(capsys, Lossy(card=NO_CARD, counts=counts), *baseline, code=0)
            assert found["modes"][1]["drafts"]["num_accepted_tokens"] == 32


def test_fields_turn_speculation_off_and_on(capsys: pytest.CaptureFixture[str]) -> None:
    lossy = Lossy(card=NO_CARD)
    plain = ("--plain-body", '{"speculative_config": {"method": "naive"}}')
    two = ("--drafted-body", '{"speculative_config": {"method": "a"}}', "--drafted-body", "{}")
    found = verify(capsys, lossy, *plain, *two, code=0)
    names = [mode["name"] for mode in found["modes"]]
    assert names == ["plain", '{"speculative_config": {"method": "a"}}', "{}"]


@pytest.mark.parametrize(
    "lossy,options,reason",
    [
        (Lossy(card=NO_CARD), (), "no known request field turns its speculation off"),
        (Lossy(card=NO_CARD), ("--plain-body", '{"x": 1}'), "without speculation had drafts"),
        (Lossy(counts=None), (), "the server reports no drafts"),
        (Lossy(accepts=0), (), "no draft was accepted"),
        (Lossy(failing=40), (), "4 requests failed, for example with: 500: broken"),
        (
            Lossy(failing=40, hangs_up=True),
            (),
            "failed, for example with: the connection was closed",
        ),
        (Lossy(failing=6), (), "32 requests failed"),
    ],
)
def test_inconclusive_comparisons_name_the_reason(
    lossy: Lossy, options: tuple[str, ...], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = verify(capsys, lossy, *options, code=2)
    assert found["status"] == "cannot say" and reason in found["sentence"]


def test_server_without_counts_may_be_trusted(capsys: pytest.CaptureFixture[str]) -> None:
    verify(capsys, Lossy(counts=None), "--trust-speculation", code=0)
    verify(capsys, Lossy(accepts=0), "--trust-speculation", code=2)


def test_missing_features_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    found = verify(capsys, Lossy(shape=None), code=0)
    assert "no text differs from plain decoding's in" in found["sentence"]
    assert "tokens are not reported (400: logprobs are not for you)" in found["notes"][0]
    verify(capsys, Lossy(shape=None, flaw="text"), code=1)
    verify(capsys, Lossy(shape=None, flaw="logprob"), code=0)
    # Ids alone distinguish tokens.
    found = verify(capsys, Lossy(shape=None, has_ids=True), code=0)
    assert "no text or token differs" in found["sentence"]
    for lacking, instead in (
        ("/v1/completions", "all prompts were sent as messages"),
        ("/v1/chat/completions", "chats were sent as prompts"),
    ):
        lossy = Lossy(refused=(lacking,), flaw="token")
        found = verify(capsys, lossy, code=1)
        assert f"does not answer at {lacking} (404: no such path): {instead}" in found["notes"][0]
        assert {"messages" in body for body in lossy.bodies[8:]} == {lacking == "/v1/completions"}


def test_requests_have_the_expected_bodies(capsys: pytest.CaptureFixture[str]) -> None:
    lossy = Lossy(has_ids=True)
    verify(capsys, lossy, "--seed", "7", "--api-key", "secret", "--temperature", "0.5", code=0)
    assert set(lossy.keys) == {"Bearer secret"}
    probes, outputs = lossy.bodies[:2], lossy.bodies[2:10]
    assert [body["max_tokens"] for body in probes] == [1, 1]
    assert [body["temperature"] for body in outputs] == [0, 0.5] * 4
    assert [body.get("seed") for body in outputs] == [None, 7, None, 8, None, 9, None, 10]
    assert ["messages" in body for body in outputs] == [False] * 4 + [True] * 2 + [False] * 2
    configs = [body["speculative_config"]["method"] for body in lossy.bodies[2:]]
    assert configs == ["naive"] * 24 + ["ngram"] * 16
    assert [text.kind for text in TEXTS[:4]] == ["prose", "code", "chat", "copy"]


def test_temperature_0_sends_greedy_requests_only(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lossy = Lossy(has_ids=True)
    card = tmp_path / "card.svg"
    verify(capsys, lossy, "--temperature", "0", "--card", str(card), code=0)
    assert {body["temperature"] for body in lossy.bodies[2:]} == {0}
    texts = [element.text for element in ET.parse(card).getroot().iter() if element.text]
    assert texts.count("0 of 4") == 4, "plain decoding and drafts, alone and beside others"


def test_prompts_are_distinct_and_copies_share_their_beginning() -> None:
    assert len({text.prompt for text in TEXTS}) == len(TEXTS) == 20
    copies = [text.prompt for text in TEXTS if text.kind == "copy"]
    assert len({prompt[:150] for prompt in copies}) == 1


def test_card_and_json_are_written_to_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with lossy_server(Lossy(flaw="token", seeded=True)) as lossy:
        files = ["--card", str(tmp_path / "card.svg"), "--json", str(tmp_path / "all.json")]
        command = ["verify-exactness", "--url", f"{lossy.url}/v1/", "--prompts", "2"]
        assert main([*command, *files, "--quiet", "--api-key", "secret"]) == 1
    printed = capsys.readouterr().out
    assert printed.count("\n") == 1 and printed.startswith(
        "Differs: with speculation, 0 of 4 greedy"
    )
    found = json.loads((tmp_path / "all.json").read_text())
    assert found["sentence"] == printed.strip() and "secret" not in json.dumps(found)
    picture = ET.parse(tmp_path / "card.svg").getroot()
    words = [element.text for element in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert "✗ differs" in words and words.count("2 of 2") == 2 and words.count("0 of 2") == 6
    assert "ngram" in words and "plain" in words


def test_files_are_written_even_if_the_pipe_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    monkeypatch.setattr("sys.stdout", Closed())
    with lossy_server(Lossy()) as lossy, pytest.raises(BrokenPipeError):
        files = ["--card", str(tmp_path / "card.svg"), "--json", str(tmp_path / "all.json")]
        command.main(["--url", lossy.url, "--prompts", "1", *files], "specops")
    assert json.loads((tmp_path / "all.json").read_text())["status"] == "lossless"
    assert ET.parse(tmp_path / "card.svg").getroot() is not None


def test_printed_lines_show_both_sides_in_context(capsys: pytest.CaptureFixture[str]) -> None:
    with lossy_server(Lossy(flaw="token")) as lossy:
        command = ["verify-exactness", "--url", lossy.url, "--prompts", "1", "--max-tokens", "8"]
        assert main(command) == 1
    lines = capsys.readouterr().out.splitlines()
    at = lines.index("prose, greedy, ngram, alone: token 3 (text, token)")
    assert lines[at + 1] == "  after ' w9 w29 w14'"
    likely = "57.4252% (-0.5546875)", "21.1255% (-1.5546875)"
    assert lines[at + 2] == f"  plain: ' w7' {likely[0]}; ' w8' {likely[1]}"
    assert lines[at + 3] == f"  ngram: ' w8' {likely[1]}; ' w7' {likely[0]}"
    assert "1 more differences; --verbose shows them." in lines
    table = lines[next(n for n, line in enumerate(lines) if line.startswith("decoding")) :]
    columns = "decoding requests outputs texts tokens logprobs ends accepted"
    assert table[0].split() == columns.split()
    assert table[5].split() == ["ngram", "greedy,", "alone", "1", "1", "1", "0", "0", "67%"]
    assert len(table) == 9 and all(len(line) <= 80 for line in table)


@pytest.mark.parametrize(
    "options,message",
    [
        (("--prompts", "0"), "--prompts must be 1 to 20, got 0"),
        (("--max-tokens", "0"), "--max-tokens must be at least 1, got 0"),
        (("--concurrency", "1"), "--concurrency must be at least 2, got 1"),
        (("--temperature", "-1"), "--temperature must be at least 0, got -1"),
        (("--plain-body", "{"), "--plain-body is not valid JSON"),
        (("--drafted-body", "[1]"), "--drafted-body must be a JSON object, got [1]"),
        (("--baseline-url", "here"), "--baseline-url must begin with http:// or https://"),
        (("--card", "/nowhere/card.svg"), "--card must be a file to write"),
        (("--url", "http://127.0.0.1:1"), "no OpenAI-compatible server at http://127.0.0.1:1: "),
    ],
)
def test_invalid_options_are_refused(
    options: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with lossy_server(Lossy()) as lossy:
        assert main(["verify-exactness", "--url", lossy.url, *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("specops: ") and message in error and error.count("\n") == 1


def test_server_that_refuses_everything_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    refused = ("/v1/completions", "/v1/chat/completions")
    with lossy_server(Lossy(refused=refused)) as lossy, lossy_server(Lossy()) as other:
        assert main(["verify-exactness", "--url", lossy.url]) == 2
        assert (
            f"the server at {lossy.url} refuses requests: 404: no such path"
            in capsys.readouterr().err
        )
        assert (
            main(["verify-exactness", "--url", lossy.url + "/v2", "--baseline-url", other.url]) == 2
        )
        assert "no OpenAI-compatible server at" in capsys.readouterr().err
    with (
        lossy_server(Lossy(refused=refused[:1])) as a,
        lossy_server(Lossy(refused=refused[1:])) as b,
    ):
        assert main(["verify-exactness", "--url", a.url, "--baseline-url", b.url]) == 2
        assert (
            f"--url {a.url} and --baseline-url {b.url} support no common endpoint"
            in capsys.readouterr().err
        )


def test_difference_of_two_answers() -> None:
    def answer(*tokens: Token, text: str = "ab", ending: str = "stop") -> Answer:
        return Answer(text, ending, tokens)

    one = answer(Token("a", 1, -0.5), Token("b", 2, -0.25))
    assert difference(one, answer(Token("a", 1, -0.5), Token("b", 2, -0.25))) is None
    # The same text in other tokens; the same tokens by text, where one side has no ids.
    found = difference(one, answer(Token("ab", 3, -0.5)))
    assert found is not None and (found.kinds, found.place) == (("token",), 0)
    assert difference(one, answer(Token("a", None, -0.5), Token("b", None, -0.25))) is None
    found = difference(one, answer(Token("a", 1, -0.5), Token("b", 9, -0.25)))
    assert found is not None and (found.kinds, found.place) == (("token",), 1)
    # The place is that of the different token, although an earlier logprob differs.
    found = difference(one, answer(Token("a", 1, -0.75), Token("c", 3, -0.25)))
    assert found is not None and (found.kinds, found.place) == (("token", "logprob"), 1)
    assert (found.logprob_place, found.logprob_gap) == (0, 0.25)
    # Zeros of two signs differ; so does a missing logprob, unless one side has none at all.
    zero, minus = answer(Token("ab", 1, 0.0)), answer(Token("ab", 1, -0.0))
    found = difference(zero, minus)
    assert found is not None and found.kinds == ("logprob",)
    found = difference(one, answer(Token("a", 1), Token("b", 2, -0.25)))
    assert found is not None and (found.kinds, found.place) == (("logprob",), 0)
    assert difference(one, answer(Token("a", 1), Token("b", 2))) is None
    # Logprobs after a different token are not compared.
    later = answer(Token("x", 5, -0.5), Token("b", 2, -9.0), text="xb")
    found = difference(one, later)
    assert found is not None and found.kinds == ("text", "token")
    # If a text ends early, its ending is not a further difference.
    found = difference(one, answer(Token("a", 1, -0.5), text="a", ending="length"))
    assert found is not None and (found.kinds, found.place) == (("text", "token"), 1)
    assert found.plain.next == "b" and found.other.next is None and found.other.ending == "length"


def test_thinking_and_tool_calls_are_compared_as_text() -> None:
    message = {"content": None, "reasoning_content": "hm", "tool_calls": [{"id": 1}]}
    reply = {"choices": [{"message": message, "finish_reason": "tool_calls"}]}
    assert read_answer(reply) == Answer("hm[{'id': 1}]", "tool_calls")


def test_answers_without_text_can_be_compared() -> None:
    one = Comparison("m", True, "alone", "greedy")
    one.add(TEXTS[0], Answer(ending="stop"), Answer(ending="stop"))
    assert one.num_compared == 1 and not one.missing
