# SPDX-License-Identifier: Apache-2.0
"""`python -m specops.integrations.vllm.decoding JOB RESULT`: decode texts with one vLLM engine.

Each engine has its own process, because parts of SPECOPS_VLLM, once enabled, stay enabled in a
process. A request is added whenever another one finishes, so that a run has a fixed number of
concurrent requests.
"""

import json
import os
import random
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from specops.integrations.vllm.settings import TARGET_MATCH, VARIABLE, VERIFY_VARIABLE, parts_of

_LOG_LINES = 25  # last lines of a failed engine's output, shown in the error


class DecodingError(RuntimeError):
    """Error: an engine could not be started, or failed."""


@dataclass(frozen=True)
class Run:
    """A set of requests to decode together.

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
    """An engine's configuration and the runs to execute on it.

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
        logprobs: per token, its requested logprobs as text: token ids with the bits of their
            logprobs. The tokens are those of the prompt after its first, if their logprobs were
            requested, and then those of the output.
        seconds: duration of the run.
        steps: number of engine steps.
        num_preemptions: preemptions since the engine started; 0 if it keeps no statistics.
        num_drafts: drafts verified since the engine started; 0 without statistics.
        num_accepted: drafts accepted since the engine started; 0 without statistics.
    """

    token_ids: list[list[int]] = field(default_factory=list)
    logprobs: list[list[str]] = field(default_factory=list)
    seconds: float = 0.0
    steps: int = 0
    num_preemptions: int = 0
    num_drafts: int = 0
    num_accepted: int = 0


def run_apart(
    arguments: Sequence[str], environment: Mapping[str, str], python: str = sys.executable
) -> tuple[int, str]:
    """Run `main` in a new process; return its exit status and what it printed."""
    command = [python, "-m", "specops.integrations.vllm.decoding", *arguments]
    done = subprocess.run(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    return done.returncode, done.stdout


def decode(
    job: Job, run: Callable[[Sequence[str], Mapping[str, str]], tuple[int, str]] = run_apart
) -> list[Decoded]:
    """Run a job in its own process, started by `run`.

    Raises:
        DecodingError: the process failed; the message ends with its last lines of output.
    """
    with tempfile.TemporaryDirectory() as folder:
        job_file = Path(folder, "job.json")
        result_file = Path(folder, "result.json")
        job_file.write_text(json.dumps(asdict(job)), encoding="utf-8")
        verifies = "sampling" in parts_of({VARIABLE: job.parts})
        environment = os.environ | {
            VARIABLE: job.parts,
            VERIFY_VARIABLE: job.strategy if verifies else "",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }
        status, log = run([str(job_file), str(result_file)], environment)
        if status != 0 or not result_file.exists():
            last = "\n".join(log.splitlines()[-_LOG_LINES:])
            raise DecodingError(f"specops: vLLM ended with exit status {status}:\n{last}")
        results = json.loads(result_file.read_text(encoding="utf-8"))
        return [Decoded(**result) for result in results]


def main(arguments: Sequence[str]) -> None:
    """Read the job, decode, and write the results."""
    from vllm import LLM

    from specops.integrations.vllm.plugin import switched_on

    job_file, result_file = map(Path, arguments)
    job = json.loads(job_file.read_text(encoding="utf-8"))
    engine = LLM(**job["engine"]).llm_engine
    if switched_on() != parts_of():
        # Check this here, since vLLM only logs a plug-in that cannot be imported, and continues.
        raise DecodingError("specops: vLLM did not load the plug-in; see its log")
    results = [_decode(engine, Run(**run), str(number)) for number, run in enumerate(job["runs"])]
    result_file.write_text(json.dumps([asdict(result) for result in results]), encoding="utf-8")


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
                finished[index] = output
                running.discard(index)
    decoded.seconds = time.perf_counter() - started
    if engine.log_stats:
        metrics = engine.get_metrics()
        decoded.num_preemptions = _count_of(metrics, "num_preemptions")
        decoded.num_drafts = _count_of(metrics, "spec_decode_num_draft_tokens")
        decoded.num_accepted = _count_of(metrics, "spec_decode_num_accepted_tokens")
    for index in range(len(run.prompts)):
        request, output = finished[index], finished[index].outputs[0]
        decoded.token_ids.append(list(output.token_ids))
        of_prompt = (request.prompt_logprobs or [])[1:]  # the first token has none
        decoded.logprobs.append([_bits(entry) for entry in (*of_prompt, *(output.logprobs or ()))])
    return decoded


def _count_of(metrics: Sequence[Any], name: str) -> int:
    return sum(int(metric.value) for metric in metrics if metric.name == f"vllm:{name}")


def _prompt(prompt: str | Sequence[int]) -> Any:
    return prompt if isinstance(prompt, str) else {"prompt_token_ids": list(prompt)}


def _bits(logprobs: Mapping[int, Any]) -> str:
    """Return tokens with the bits of their logprobs, sorted by token."""
    return " ".join(
        f"{token}:{struct.pack('<f', entry.logprob).hex()}"
        for token, entry in sorted(logprobs.items())
    )


if __name__ == "__main__":
    main(sys.argv[1:])
