# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402  (where the server's packages are missing, nothing else is imported)
"""FastDeploy's command that serves a 4-bit mixture of experts with its MTP module.

python -m specops.engine --model DIR --quantization wint4 \
        --speculative-config '{"method": "mtp", "num_speculative_tokens": 1, "model": "DIR"}'
"""

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

for name in ("fastapi", "uvicorn", "pydantic", "msgspec", "prometheus_client", "jinja2", "httpx"):
    pytest.importorskip(name)

import httpx
from checkpoints import write_tokenizer
from mtp_checkpoints import make_mtp_checkpoint, save_checkpoint
from server_attacks import Server
from test_experts import MTP_BASES

pytestmark = pytest.mark.slow

FAMILIES = ("Ernie4_5_Moe", "Glm4Moe")
OWN = {"Ernie4_5_Moe": "model.mtp_", "Glm4Moe": "model.layers.2."}  # tensors of the module
TEXT = "for i in range(3): for i in range"
BODIES: list[dict[str, Any]] = [
    {"prompt": TEXT, "temperature": 0},
    {"prompt": TEXT, "temperature": 0.8, "seed": 7},
    {"prompt": [5, 9, 23, 77, 5, 9, 23], "temperature": 1, "seed": 8, "n": 2},
    {"prompt": TEXT, "temperature": 0, "frequency_penalty": 0.4},
]


def split_checkpoint(folder: Path, family: str, **changes: int) -> tuple[Path, Path]:
    """Write a target with random weights, and its MTP module in a separate directory."""
    naming, base = next(one for one in MTP_BASES if one[1][0] == family)
    made = {"num_hidden_layers": 2, "vocab_size": 257, **base[1], **changes}
    tiny = make_mtp_checkpoint(folder / "target", naming, base=(base[0], made))
    head = "lm_head.weight" if "lm_head.weight" in tiny.tensors else "model.embed_tokens.weight"
    tiny.tensors[head][40] *= 30  # one of two tokens is likely, so some drafts are right
    tiny.tensors[head][41] = -tiny.tensors[head][40]
    own = {name for name in tiny.tensors if name.startswith(OWN[family])}
    shutil.copytree(folder / "target", folder / "module")
    for part, names in (("target", tiny.tensors.keys() - own), ("module", own)):
        tensors = {name: tiny.tensors[name] for name in names}
        save_checkpoint(folder / part, tiny.config, tensors)
    write_tokenizer(folder / "target", 257)
    return folder / "target", folder / "module"


def start(folder: Path, model: Path, speculative: dict[str, Any]) -> Server:
    folder.mkdir()
    options = ["--model", str(model), "--quantization", "wint4"]
    options += ["--speculative-config", json.dumps(speculative)]
    return Server(folder, [*options, "--num-threads", "1", "--num-pages", "64"])


@pytest.fixture(params=FAMILIES)
def servers(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Server, Server]]:
    """Start a server with the command's options, and one without speculation."""
    model, module = split_checkpoint(tmp_path, request.param)
    drafts = {"method": "mtp", "num_speculative_tokens": 1, "model": str(module)}
    with ThreadPoolExecutor() as pool:
        both = [
            pool.submit(start, tmp_path / name, model, how)
            for name, how in (("on", drafts), ("off", {"method": "naive"}))
        ]
    on, off = (one.result() for one in both)
    yield on, off
    assert [*on.stop(), *off.stop()] == []


def answers(url: str) -> list[Any]:
    """Send all requests at once and return their choices."""

    def answer(body: dict[str, Any]) -> list[Any]:
        request = {"max_tokens": 24, "ignore_eos": True, "logprobs": 2, **body}
        done = http.post(f"{url}/v1/completions", json=request)
        choices = done.raise_for_status().json()["choices"]
        return [(one["text"], one["finish_reason"], one["logprobs"]) for one in choices]

    with httpx.Client(timeout=300) as http, ThreadPoolExecutor(len(BODIES)) as pool:
        return list(pool.map(answer, BODIES))


def test_answers_are_equal_with_and_without_speculation(servers: tuple[Server, Server]) -> None:
    on, off = servers
    assert answers(on.url) == answers(off.url)
    drafted, accepted = (
        [one.metrics()[f"specops:spec_decode_num_{what}_tokens_total{{}}"] for one in servers]
        for what in ("draft", "accepted")
    )
    assert drafted[0] > accepted[0] > 0 and drafted[1] == 0
