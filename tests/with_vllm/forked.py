# SPDX-License-Identifier: Apache-2.0
"""Engines in processes that are forked from one that has imported vLLM.

The imports take ten seconds of CPU time, about half of what a short test of an engine takes.
"""

import multiprocessing
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from unittest import mock

from specops.integrations.vllm import decoding
from specops.integrations.vllm.decoding import Decoded, Job
from specops.integrations.vllm.settings import EXACT

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["preloaded"])


def decode(job: Job) -> list[Decoded]:
    """Run a job in a forked process, as `decoding.decode` does in a new one.

    vLLM reads SPECOPS_VLLM while it is imported, so only engines with all parts are forked.
    """
    return decoding.decode(job, _run_forked if job.parts == EXACT else decoding.run_apart)


def _run_forked(arguments: Sequence[str], environment: Mapping[str, str]) -> tuple[int, str]:
    log = Path(arguments[0]).with_suffix(".log")
    with mock.patch.dict(os.environ, environment):  # for the fork server, if this call starts it
        process = _CONTEXT.Process(target=_run, args=(arguments, dict(environment), log))
        process.start()
    process.join()
    return process.exitcode or 0, log.read_text()


def _run(arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
    os.environ.clear()
    os.environ.update(environment)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    decoding.main(arguments)
