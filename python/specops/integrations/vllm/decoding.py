# SPDX-License-Identifier: Apache-2.0
"""`python -m specops.integrations.vllm.decoding JOB RESULT`: decode texts with one vLLM engine.

Each engine has its own process, because the parts of SPECOPS_VLLM stay enabled in a process. The
engine runs inside that process, and a request enters when another finishes, so that a run has a
fixed number of concurrent requests.
"""

import json
import os
import random
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from specops.integrations.vllm.settings import TARGET_MATCH, VARIABLE, VERIFY_VARIABLE, parts_of

_LOG_LINES = 25  # of a failed engine, shown in the error


class DecodingError(RuntimeError):
    """An engine could not be started, or failed."""


@dataclass(frozen=True)
class Run:
    """Requests that are decoded together.

    Attributes:
        prompts: texts, or lists of token ids.
        params: arguments of vLLM's SamplingParams for each prompt.
        batch: number of concurrent requests.
        shuffle: seed of a random arrival order; None: in the given order.
    """

    prompts: Sequence[str | Sequence[int]]
    params: Sequence[Mapping[str, Any]]
    batch: int
    shuffle: int | None = None


@dataclass(frozen=True)
class Job:
    """An engine and its runs.

    Attributes:
        engine: arguments of vLLM's LLM.
        runs: runs, executed one after the other.
        parts: value of SPECOPS_VLLM.
        strategy: value of SPECOPS_VLLM_VERIFY; ignored if `parts` leaves sampling to vLLM.
    """

    engine: Mapping[str, Any]
    runs: Sequence[Run]
    parts: str
    strategy: str = TARGET_MATCH


@dataclass
class Decoded:
    """The results of a run, by prompt.

    Attributes:
        token_ids: token ids of each output.
        logprobs: per output token, its requested logprobs as text: token ids with the bits of their
            logprobs; empty if none were requested.
        seconds: duration of the run.
        steps: number of engine steps.
        num_preemptions: preemptions since the engine started; 0 if it keeps no statistics.
        num_drafts: drafts verified since then; 0 without statistics.
        num_accepted: drafts accepted since then; 0 without statistics.
    """

    token_ids: list[list[int]] = field(default_factory=list)
    logprobs: list[list[str]] = field(default_factory=list)
    seconds: float = 0.0
    steps: int = 0
    num_preemptions: int = 0
    num_drafts: int = 0
    num_accepted: int = 0


def decode(job: Job, python: str = sys.executable) -> list[Decoded]:
    """Run a job in its own process.

    Raises:
        DecodingError: the process failed; the message ends with its last lines of output.
    """
    with tempfile.TemporaryDirectory() as folder:
        asked, given = Path(folder, "job.json"), Path(folder, "result.json")
        asked.write_text(json.dumps(asdict(job)), encoding="utf-8")
        verifies = "sampling" in parts_of({VARIABLE: job.parts})
        environment = os.environ | {
            VARIABLE: job.parts,
            VERIFY_VARIABLE: job.strategy if verifies else "",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }
        command = [python, "-m", "specops.integrations.vllm.decoding", str(asked), str(given)]
        done = subprocess.run(
            command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        if done.returncode != 0 or not given.exists():
            last = "\n".join(done.stdout.splitlines()[-_LOG_LINES:])
            raise DecodingError(f"specops: vLLM ended with {done.returncode}:\n{last}")
        return [Decoded(**one) for one in json.loads(given.read_text(encoding="utf-8"))]


def main(arguments: Sequence[str]) -> None:
    """Read the job, decode, and write the results."""
    from vllm import LLM

    from specops.integrations.vllm.plugin import switched_on

    asked, given = map(Path, arguments)
    job = json.loads(asked.read_text(encoding="utf-8"))
    engine = LLM(**job["engine"]).llm_engine
    if switched_on() != parts_of():
        # vLLM only logs a plug-in that cannot be imported, and continues.
        raise DecodingError("specops: vLLM did not load the plug-in; its log says why")
    results = [_decode(engine, Run(**run), str(number)) for number, run in enumerate(job["runs"])]
    given.write_text(json.dumps([asdict(one) for one in results]), encoding="utf-8")


def _decode(engine: Any, run: Run, name: str) -> Decoded:
    from vllm import SamplingParams

    order = list(range(len(run.prompts)))
    if run.shuffle is not None:
        random.Random(run.shuffle).shuffle(order)
    waiting = order[::-1]
    finished: dict[int, Any] = {}
    decoded = Decoded()
    running: set[int] = set()
    started = time.perf_counter()
    while waiting or running:
        while waiting and len(running) < run.batch:
            index = waiting.pop()
            engine.add_request(
                f"{name}-{index}", _prompt(run.prompts[index]), SamplingParams(**run.params[index])
            )
            running.add(index)
        decoded.steps += 1
        for output in engine.step():
            if output.finished:
                index = int(output.request_id.split("-")[1])
                finished[index] = output.outputs[0]
                running.discard(index)
    decoded.seconds = time.perf_counter() - started
    if engine.log_stats:
        metrics = engine.get_metrics()
        decoded.num_preemptions = _count_of(metrics, "num_preemptions")
        decoded.num_drafts = _count_of(metrics, "spec_decode_num_draft_tokens")
        decoded.num_accepted = _count_of(metrics, "spec_decode_num_accepted_tokens")
    for index in range(len(run.prompts)):
        decoded.token_ids.append(list(finished[index].token_ids))
        decoded.logprobs.append([_bits(one) for one in finished[index].logprobs or []])
    return decoded


def _count_of(metrics: Sequence[Any], name: str) -> int:
    return sum(int(one.value) for one in metrics if one.name == f"vllm:{name}")


def _prompt(prompt: str | Sequence[int]) -> Any:
    return prompt if isinstance(prompt, str) else {"prompt_token_ids": list(prompt)}


def _bits(logprobs: Mapping[int, Any]) -> str:
    """Return tokens with the bits of their logprobs, sorted by token."""
    return " ".join(
        f"{token}:{struct.pack('<f', one.logprob).hex()}" for token, one in sorted(logprobs.items())
    )


if __name__ == "__main__":
    main(sys.argv[1:])
