# SPDX-License-Identifier: Apache-2.0
"""Check of each model that vLLM's CPU worker loads: with all parts enabled, it must be exact."""

import functools
import logging
from collections.abc import Collection, Sequence
from typing import Any

from specops.integrations.vllm import compiled, support, threads
from specops.integrations.vllm.op_check import OpCheck, look_at
from specops.integrations.vllm.settings import PARTS

# Environment variable that selects vLLM's second model runner, which is unsupported.
SECOND_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
_logger = logging.getLogger("vllm.specops")


def switch_on(parts: Collection[str]) -> None:
    """Install the checks: wrap vLLM's construction of the model runner and its model loading.

    Args:
        parts: parts of SPECOPS_VLLM. Unless all are enabled, inexact parts are only a warning.
    """
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner
    from vllm.v1.worker.cpu_worker import CPUWorker

    init_device = CPUWorker.init_device
    load_model = CPUModelRunner.load_model

    @functools.wraps(init_device)
    def with_first_runner(self: Any) -> None:
        if self.use_v2_model_runner:
            raise support.NotExactError(
                "specops: cannot be exact with vLLM's second model runner; do not set "
                f"{SECOND_RUNNER}=1, watermarking or HiSparse"
            )
        init_device(self)

    @functools.wraps(load_model)
    def looked_at(self: Any, *args: Any, **kwargs: Any) -> None:
        is_exact = len(parts) == len(PARTS)
        config = self.vllm_config
        _refuse(support.faults_of_config(config, parts) + compiled.faults_of(config), is_exact)
        compiled.prepare(config, parts)
        load_model(self, *args, **kwargs)
        unable = support.faults_of_ops(self.get_model())
        _refuse(unable + _faults_of_model(self, parts, not unable), is_exact or bool(unable))
        if is_exact:
            threads.rest_openmp()

    CPUWorker.init_device = with_first_runner
    CPUModelRunner.load_model = looked_at


def _refuse(faults: Sequence[str], is_error: bool) -> None:
    if faults and is_error:
        raise support.NotExactError(f"specops: cannot be exact with {'; '.join(faults)}")
    for fault in faults:
        _logger.warning("specops: not exact: %s.", fault)


def _faults_of_model(runner: Any, parts: Collection[str], runs: bool) -> list[str]:
    """Return descriptions of the parts of a loaded model that cannot be exact.

    Args:
        runner: vLLM's model runner.
        parts: parts of SPECOPS_VLLM.
        runs: whether the model can be run.
    """
    from vllm.distributed import get_tp_group

    check = OpCheck()
    error = None
    if runs and len(parts) == len(PARTS):
        try:
            look_at(runner, check)
        except Exception as raised:  # perhaps by a layer that is refused below
            error = raised
    faults = support.faults_of_layers(runner.get_model(), parts, check.found)
    if error is not None and not faults:
        raise error
    return faults + support.faults_of_ranks(get_tp_group())
