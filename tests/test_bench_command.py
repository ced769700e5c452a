# SPDX-License-Identifier: Apache-2.0
"""`specops bench` measures the known delays and drafts of test servers."""

import asyncio
import io
import json
import re
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("rich")
pytest.importorskip("fastapi")

from fake_engine import FakeEngine
from known_server import Known, known_server
from rich.console import Console
from serving import serving
from specops._cpu_name import cpu_name
from specops.cli import main
from specops.cli.bench import _times_table
from specops.cli.load.answers import Answer
from specops.cli.load.arrivals import due_times, keep_busy, send_at
from specops.cli.load.figures import DraftCounts, figures, request_records, spread
from specops.cli.load.rounds import Spread, compare, spread_of
from specops.cli.prompts import PROMPTS
from specops.engine import RequestOutput

pytestmark = pytest.mark.ci


def bench(url: str, file: Path, *options: str, code: int = 0) -> dict[str, Any]:
    """Run `specops bench` and return the results it writes."""
    assert main(["bench", "--url", url, "--json", str(file), *options]) == code
    results = json.loads(file.read_text())
    assert isinstance(results, dict)
    return results


def answer(due: float, sent: float, first: float, last: float, end: float, n: int) -> Answer:
    return Answer(due, sent, first, last, end, prompt_tokens=10, completion_tokens=n, pieces=n)


def test_figures_of_known_answers_are_exact() -> None:
    answers = [
        answer(1.0, 1.0, 1.5, 2.5, 2.75, 11),  # 0.1 s a token
        answer(2.0, 2.25, 2.5, 4.0, 4.0, 4),  # 0.5 s a token
        answer(2.0, 2.0, 3.0, 3.0, 3.0, 1),  # one token has no time between tokens
        Answer(2.0, 2.0, end=6.0, error="500: broken"),
        Answer(2.0, 2.0, end=5.0, error="500: broken"),
    ]
    found = figures(answers)
    assert (found["num_requests"], found["num_failed"]) == (5, 2)
    assert found["failures"] == {"500: broken": 2}
    assert found["seconds"] == 5.0
    assert (found["prompt_tokens"], found["completion_tokens"]) == (30, 16)
    assert (found["requests_per_s"], found["output_tokens_per_s"]) == (3 / 5, 16 / 5)
    assert found["first_token_ms"] == pytest.approx(
        {"mean": 2000 / 3, "p50": 500, "p90": 900, "p95": 950, "p99": 990, "max": 1000}
    )
    assert found["per_output_token_ms"]["mean"] == pytest.approx(300)
    assert found["per_output_token_ms"]["p90"] == pytest.approx(460)
    assert found["whole_ms"]["p50"] == pytest.approx(1750)
    assert found["sent_late_ms"]["max"] == 250
    assert found["server_ms"] is None and found["acceptance"] is None
    assert spread([None]) is None
    records = request_records(answers)
    assert [record["due"] for record in records] == [0, 1, 1, 1, 1]
    assert records[1]["first"] == 1.5 and records[3]["first"] is None


@pytest.mark.parametrize(
    "width,shown",
    [(80, "mean p50 p90 p95 p99 max"), (60, "mean p50 p99 max"), (44, "p50 p99"), (34, "p50")],
)
def test_narrow_terminals_show_fewer_whole_numbers(width: int, shown: str) -> None:
    times = dict.fromkeys(("mean", "p50", "p90", "p95", "p99", "max"), 1234.5)
    console = Console(width=width, file=io.StringIO())
    console.print(_times_table(console, {"per output token": times}))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert text.count("1,234.5") == len(shown.split()) and "…" not in text
    assert re.findall(r"mean|p\d\d|max", text) == shown.split()


def test_acceptance_comes_from_answers_or_else_metrics() -> None:
    one = answer(0, 0, 1, 2, 2, 5)
    counters = DraftCounts(10, 40, 30).since(DraftCounts(2, 8, 6))
    assert figures([one], counters)["acceptance"] == {
        "source": "metrics",
        "num_drafts": 8,
        "num_draft_tokens": 32,
        "num_accepted_tokens": 24,
        "rate": 0.75,
        "mean_length": 4.0,
    }
    one.num_draft_tokens, one.num_accepted_tokens = 8, 2
    found = figures([one, answer(0, 0, 1, 2, 2, 5)], counters)["acceptance"]
    assert (found["source"], found["rate"], found["mean_length"]) == ("answers", 0.25, None)
    one.num_drafts = 4
    assert figures([one], None)["acceptance"]["mean_length"] == 1.5
    assert figures([answer(0, 0, 1, 2, 2, 5)], DraftCounts(0, 0, 0))["acceptance"] is None


def test_poisson_arrivals_have_the_requested_rate() -> None:
    assert due_times(4, 2.0, even=True, seed=0) == [0, 0.5, 1, 1.5]
    times = due_times(20000, 10.0, even=False, seed=3)
    assert times == due_times(20000, 10.0, even=False, seed=3)
    gaps = [after - before for before, after in pairwise(times)]
    # Exponential gaps: mean and deviation are equal, within five standard errors.
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(0.1, abs=5 * 0.1 / 20000**0.5)
    assert sum((gap - mean) ** 2 for gap in gaps) / len(gaps) == pytest.approx(0.01, rel=0.12)


def test_late_requests_are_measured_from_their_due_time() -> None:
    now = [100.0]

    async def sleep(seconds: float) -> None:
        now[0] += seconds + (2.0 if now[0] < 101 else 0.0)  # the first sleep is too long

    async def send(index: int, due: float) -> Answer:
        return Answer(due, sent=now[0], end=now[0] + index)

    answers = asyncio.run(send_at([0.0, 0.5, 1.0, 4.0], send, lambda: now[0], sleep))
    assert [one.due for one in answers] == [100, 100.5, 101, 104]
    # A task starts when the loop that creates it next waits.
    assert [one.sent - one.due for one in answers[1:]] == [3.5, 3.0, 0.0]


def test_concurrency_is_kept_constant() -> None:
    seen: list[int] = []
    num_running = 0

    async def send(index: int, due: float) -> Answer:
        nonlocal num_running
        num_running += 1
        seen.append(num_running)
        await asyncio.sleep(0.001 * (index % 3))
        num_running -= 1
        return Answer(due, end=float(index))

    answers = asyncio.run(keep_busy(30, 4, send, lambda: 0.0))
    assert sorted(one.end for one in answers) == list(range(30))
    assert max(seen) == 4 and seen[4:].count(4) == 26


@pytest.mark.parametrize("load", [("--concurrency", "3"), ("--rate", "40", "--even")])
def test_known_delays_are_measured(load: tuple[str, ...], tmp_path: Path) -> None:
    """The server's sleeps give lower bounds, and the command's duration gives upper bounds."""
    known = Known(first=0.05, gap=0.01, pieces=11, tokens=21)
    with known_server(known):
        begun = time.perf_counter()
        results = bench(known.url, tmp_path / "a.json", "--requests", "12", *load)
        took = time.perf_counter() - begun
    found = results["figures"]
    assert (found["num_requests"], found["completion_tokens"]) == (12, 12 * 21)
    assert 50 <= found["first_token_ms"]["p50"] < 1e3 * took
    # Eleven pieces with ten gaps hold 21 tokens. The client may see the first piece late, so the
    # gaps alone have no lower bound.
    times = [[one[name] for name in ("due", "first", "last")] for one in results["requests"]]
    assert all(last - due >= 0.15 for due, _, last in times)
    per_token = spread((last - first) / 20 for _, first, last in times)
    assert found["per_output_token_ms"] == pytest.approx(per_token)
    assert 150 <= found["whole_ms"]["p50"] < 1e3 * took
    seconds = found["seconds"]
    least = 4 * 0.15 if load[0] == "--concurrency" else 11 / 40 + 0.15
    assert least <= seconds < took
    assert found["output_tokens_per_s"] == pytest.approx(12 * 21 / seconds)
    assert len(known.bodies) == 13, "one warm-up request, which does not count"


def test_vllm_metrics_give_the_acceptance(tmp_path: Path) -> None:
    known = Known(prefix="vllm")
    with known_server(known):
        options = ("--requests", "4", "--warm-up", "2", "--temperature", "0.5", "--seed", "9")
        results = bench(known.url + "/v1/", tmp_path / "a.json", *options, "--api-key", "k")
    assert results["figures"]["acceptance"] == {
        "source": "metrics",
        "num_drafts": 20,
        "num_draft_tokens": 80,
        "num_accepted_tokens": 60,
        "rate": 0.75,
        "mean_length": 4.0,
    }
    assert results["name"] == results["model"] == "m" and results["client"].endswith(cpu_name())
    assert set(known.keys) == {"Bearer k"} and "api_key" not in results["options"]
    assert sorted(body["seed"] for body in known.bodies[2:]) == [9, 10, 11, 12]
    assert known.bodies[0]["stream_options"] == {"include_usage": True}
    assert {body["prompt"] for body in known.bodies} == set(PROMPTS[:4])


def test_ratios_are_computed_per_round() -> None:
    """In the second round, the machine is half as fast for both servers."""
    rounds = [
        ({"output_tokens_per_s": a, "first_token_ms": {"p50": 2.0}}, {"output_tokens_per_s": b})
        for a, b in ((300.0, 100.0), (150.0, 50.0), (320.0, 100.0), (280.0, 100.0))
    ]
    full = {"requests_per_s": 0.0, "per_output_token_ms": None, "whole_ms": None}
    (row,) = compare([(full | a, full | {"first_token_ms": None} | b) for a, b in rounds])
    assert row.title == "output tokens/s"
    assert row.of_each == (Spread(290, 247.5, 305), Spread(100, 87.5, 100))
    assert row.ratio == Spread(3.0, 2.95, pytest.approx(3.05))
    assert spread_of([7.0]) == Spread(7, 7, 7)


def test_two_servers_are_measured_alternately(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    order: list[str] = []

    class Watched(list[dict[str, Any]]):
        def append(self, body: dict[str, Any]) -> None:
            super().append(body)
            order.append(body["user"])

    fast, slow = (Known(gap=gap, bodies=Watched()) for gap in (0.02, 0.04))
    with known_server(fast), known_server(slow):
        options = ["--against", slow.url + "/v1", "--rounds", "3", "--requests", "1"]
        bodies = ["--body", '{"user": "a"}', "--against-body", '{"user": "b"}']
        names = ["--name", "fast", "--against-name", "slow"]
        results = bench(fast.url, tmp_path / "a.json", *options, *bodies, *names)
    assert "".join(order) == "aa" + "bb" + "b" + "a" + "a" + "b", (
        "each server has one warm-up request"
    )
    assert results["names"] == ["fast", "slow"] and len(results["rounds"]) == 3
    assert [run["options"]["url"] for run in results["rounds"][1]] == [fast.url, slow.url]
    figures = results["figures"]["per output token, ms"]
    times = [
        [run["figures"]["per_output_token_ms"]["p50"] for run in one] for one in results["rounds"]
    ]
    ratio = sorted(a / b for a, b in times)[1]
    assert figures["ratio"]["middle"] == pytest.approx(ratio)
    output = capsys.readouterr().out
    assert "3 alternating rounds: " in output and "Ratios are fast / slow within a round" in output


def test_server_can_be_compared_with_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with known_server(Known()) as known:
        options = ("--against-body", '{"user": "b"}', "--model", "other", "--rounds", "1")
        bench(known.url, tmp_path / "a.json", *options, "--requests", "2", "--warm-up", "0")
    assert [body.get("user") for body in known.bodies] == [None, None, "b", "b"]
    assert {body["model"] for body in known.bodies} == {"other"}
    assert "Ratios are other / the other" in capsys.readouterr().out
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("yes\nno\n")
    with known_server(Known()) as good, known_server(Known(refuse=503)) as bad:
        options = ("--against", bad.url, "--rounds", "1", "--prompt-file", str(prompts))
        bench(good.url, tmp_path / "a.json", *options, "--requests", "2", code=1)
    assert "1 requests to the other failed" in capsys.readouterr().out


def test_tokens_are_counted_by_pieces_without_usage(tmp_path: Path) -> None:
    """U+2028 and U+0085 end lines for Python, but not in a stream."""
    with known_server(Known(tokens=None, text="a\u2028b\x85c", pieces=5)) as known:
        found = bench(known.url, tmp_path / "a.json", "--requests", "2")["figures"]
    assert (found["num_failed"], found["completion_tokens"]) == (0, 10)
    assert found["tokens_are_counted_by"] == "pieces of text, since the server sends no usage"
    assert found["acceptance"] is None


def test_failures_are_counted_and_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("yes\nno\n")
    options = ("--requests", "6", "--prompt-file", str(prompts))
    with known_server(Known(refuse=503)) as known:
        found = bench(known.url, tmp_path / "a.json", *options, code=1)["figures"]
    assert (found["num_failed"], found["completion_tokens"]) == (3, 9)
    assert found["failures"] == {"503: as you wished": 3}
    assert "3 failed: 503: as you wished" in capsys.readouterr().out
    with known_server(Known(cut=True)) as known:
        options = ("--requests", "2", "--warm-up", "0")
        found = bench(known.url, tmp_path / "a.json", *options, code=1)["figures"]
    assert found["failures"] == {"the stream ended before [DONE]": 2}


def test_figures_match_the_engines_counters(tmp_path: Path) -> None:
    class Full(FakeEngine):
        """Engine that starts when it has eight requests, four of which wait for slots."""

        has_begun = False

        def step(self) -> list[RequestOutput]:
            if not self.has_begun:
                self.holds_at = 0
                self.has_begun = self.num_running + self.num_waiting == 8
            else:
                self.holds_at = None
            return super().step()

    engine = Full(step_seconds=0.002, most_accepted=2)
    with serving(engine) as served:
        options = ("--requests", "12", "--warm-up", "0", "--max-tokens", "32")
        found = bench(served.url, tmp_path / "a.json", *options)["figures"]
        stats = engine.stats.speculative
        assert found["completion_tokens"] == engine.stats.generation_tokens == 12 * 32
        assert found["prompt_tokens"] == engine.stats.prompt_tokens
        acceptance = found["acceptance"]
        assert acceptance["source"] == "answers"
        assert acceptance["num_drafts"] == stats.num_drafts
        assert acceptance["num_draft_tokens"] == stats.num_draft_tokens
        assert acceptance["num_accepted_tokens"] == stats.num_accepted_tokens
        assert set(found["server_ms"]) == {"queue", "prefill", "decode", "verify", "draft"}
        # One token, then three per step: eleven more steps of at least 2 ms.
        assert found["server_ms"]["decode"]["p50"] >= 22
        assert found["whole_ms"]["p50"] >= found["server_ms"]["decode"]["p50"]
        # Eight concurrent requests in four slots: some wait for others.
        assert found["first_token_ms"]["max"] >= 22
        plain = ("--body", '{"speculative_config": {"method": "naive"}}', "--chat", "--ignore-eos")
        found = bench(served.url, tmp_path / "a.json", *options, *plain)["figures"]
        assert found["acceptance"] is None and found["completion_tokens"] == 12 * 32
        served.wait_until_idle()


@pytest.mark.parametrize(
    "options,message",
    [
        (["--requests", "0"], "--requests must be at least 1, got 0"),
        (["--concurrency", "0"], "--concurrency must be at least 1, got 0"),
        (["--warm-up", "-1"], "--warm-up must be at least 0, got -1"),
        (["--rate", "0"], "--rate must be above 0, got 0"),
        (["--timeout", "-1"], "--timeout must be above 0, got -1"),
        (["--url", "127.0.0.1"], "--url must begin with http:// or https://, got 127.0.0.1"),
        (["--even"], "--even requires --rate"),
        (["--against", "there"], "--against must begin with http:// or https://, got there"),
        (["--against-body", "[]"], "--against-body must be a JSON object, got []"),
        (["--rounds", "0"], "--rounds must be at least 1, got 0"),
        (["--body", "{"], "--body is not valid JSON"),
        (["--body", "[]"], "--body must be a JSON object, got []"),
        (["--prompt-file", "/nowhere"], "No such file"),
        (["--json", "/nowhere/a"], "--json must be a file to write, got /nowhere/a"),
        (
            ["--url", "http://127.0.0.1:1"],
            "--url must be an OpenAI-compatible server, got http://127.0.0.1:1: cannot connect: "
            "Connection refused",
        ),
    ],
)
def test_invalid_options_are_refused(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith("specops: ") and message in error and error.count("\n") == 1


def test_refused_request_ends_the_bench_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(FakeEngine()) as served:
        assert main(["bench", "--url", served.url, "--body", '{"nonsense": 1}']) == 2
        assert "the server refused a request: 400: unknown field" in capsys.readouterr().err
        assert main(["bench", "--url", served.url, "--model", "another"]) == 2
        assert "the server refused a request: 404:" in capsys.readouterr().err
