# SPDX-License-Identifier: Apache-2.0
"""lm-eval run twice: against this server, and against transformers with the same weights.

`make -C tools test-lm-eval` runs the tests in an environment of their own. Both models compute in
fp32 and differ only in the order of their sums. So texts and `is_greedy` are equal, and
log-likelihoods nearly so.
"""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="lm-eval is not installed: make -C tools test-lm-eval")

from serving import serving
from specops.api.config import BUNDLED_MODEL
from specops.engine import Engine, EngineConfig, SpeculativeConfig

HERE = Path(__file__).resolve().parent
TASKS = ("code_generate", "code_choose", "code_perplexity")
# Allowance for the order of sums in fp32. Near 0, which is a certain token, ABSOLUTE counts.
RELATIVE, ABSOLUTE = 1e-5, 1e-5


def run(folder: Path, model: str, arguments: dict[str, Any], batch_size: int) -> dict[str, Any]:
    """Run the command line over all tasks; return the samples of each, by document."""
    command = [sys.executable, "-m", "lm_eval", "--model", model, "--include_path", str(HERE)]
    command += ["--model_args", ",".join(f"{name}={one}" for name, one in arguments.items())]
    command += ["--tasks", ",".join(TASKS), "--batch_size", str(batch_size), "--device", "cpu"]
    command += ["--log_samples", "--output_path", str(folder)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "home")}
    done = subprocess.run(
        command, cwd=HERE, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    samples = {}
    for task in TASKS:
        (file,) = folder.rglob(f"samples_{task}_*.jsonl")
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        samples[task] = sorted(lines, key=lambda one: one["doc_id"])
    return samples


@pytest.fixture(scope="module")
def of_transformers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    arguments = {"pretrained": BUNDLED_MODEL, "dtype": "float32", "max_length": 1024}
    return run(tmp_path_factory.mktemp("transformers"), "hf", arguments, 1)


def of_method(method: str, folder: Path) -> dict[str, Any]:
    """Return the samples of a server that drafts with this method."""
    num_drafts = 0 if method == "naive" else 4
    speculative = SpeculativeConfig(method=method, num_speculative_tokens=num_drafts)
    sizes = {"device": "cpu", "dtype": "float32", "max_num_seqs": 8}
    engine = Engine(EngineConfig(**sizes, speculative_config=speculative))
    with serving(engine) as served:
        arguments = {
            "model": engine.model_name,
            "base_url": f"{served.url}/v1/completions",
            "tokenizer": BUNDLED_MODEL,
            "max_length": 1024,
            "num_concurrent": 3,
        }
        samples = run(folder, "local-completions", arguments, 4)
    assert (engine.stats.speculative.num_draft_tokens > 0) == (method != "naive")
    return samples


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return of_method("naive", tmp_path_factory.mktemp("naive"))


@pytest.fixture(scope="module", params=["naive", "ngram", "mtp"])
def of_server(
    request: pytest.FixtureRequest,
    plain: dict[str, Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Any]:
    method = request.param
    return plain if method == "naive" else of_method(method, tmp_path_factory.mktemp(method))


@cache
def _num_documents(kind: str) -> int:
    return sum(1 for _ in (HERE / f"{kind}.jsonl").open())


def test_texts_equal_those_of_transformers(
    of_server: dict[str, Any], of_transformers: dict[str, Any]
) -> None:
    ours, theirs = (one["code_generate"] for one in (of_server, of_transformers))
    assert len(ours) == len(theirs) == _num_documents("generate")
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["resps"] == other["resps"], mine["doc"]
    assert sum(len(one["resps"][0][0]) > 20 for one in theirs) > 6, "there must be texts to compare"


def test_log_likelihoods_equal_those_of_transformers(
    of_server: dict[str, Any], of_transformers: dict[str, Any]
) -> None:
    are_greedy, apart = [], 0.0
    ours, theirs = (one["code_choose"] for one in (of_server, of_transformers))
    assert len(ours) == len(theirs) == _num_documents("choose")
    for mine, other in zip(ours, theirs, strict=True):
        for (value, greedy), (want, want_greedy) in zip(
            map(_pair, mine["resps"]), map(_pair, other["resps"]), strict=True
        ):
            assert value == pytest.approx(want, rel=RELATIVE, abs=ABSOLUTE), mine["doc"]
            assert greedy == want_greedy, mine["doc"]
            are_greedy.append(greedy)
            apart = max(apart, abs(value - want))
        assert mine["acc"] == other["acc"]
    assert 0 < sum(are_greedy) < len(are_greedy), "some ends must be greedy, and some not"
    print(
        f"{len(are_greedy)} log-likelihoods, at most {apart:.1e} apart, "
        f"{sum(are_greedy)} of them greedy"
    )


def test_whole_texts_are_as_likely_as_in_transformers(
    of_server: dict[str, Any], of_transformers: dict[str, Any]
) -> None:
    ours, theirs = (one["code_perplexity"] for one in (of_server, of_transformers))
    assert len(ours) == len(theirs) == _num_documents("perplexity")
    for mine, other in zip(ours, theirs, strict=True):
        (value,), (want,) = (_number(one["resps"]) for one in (mine, other))
        assert value == pytest.approx(want, rel=RELATIVE), mine["doc"]
        print(f"{value:.6f}, {abs(value - want):.1e} apart")


def test_speculation_changes_no_answer(of_server: dict[str, Any], plain: dict[str, Any]) -> None:
    """Compare every text and every number to the last digit."""
    for task in TASKS:
        for mine, other in zip(of_server[task], plain[task], strict=True):
            assert mine["resps"] == other["resps"], mine["doc"]


def _pair(response: Any) -> tuple[float, bool]:
    """Return a log-likelihood and whether it is greedy; lm-eval writes numbers or texts of them."""
    ((value, greedy),) = response
    return float(value), str(greedy) == "True"


def _number(response: Any) -> list[float]:
    while isinstance(response[0], list):
        response = response[0]
    return [float(response[0])]
