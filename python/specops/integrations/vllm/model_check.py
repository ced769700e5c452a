# SPDX-License-Identifier: Apache-2.0
"""Check of each model that vLLM's CPU worker loads: with all parts enabled, it must be exact."""

import logging
from collections.abc import Collection, Sequence
from typing import Any

from specops.integrations.vllm import compiled, support, threads
from specops.integrations.vllm.op_check import OpCheck, look_at
from specops.integrations.vllm.settings import PARTS

_logger = logging.getLogger("vllm.specops")


def check_config(config: Any, parts: Collection[str]) -> None:
    """Refuse a configuration that cannot be exact, and prepare compilation.

    Args:
        config: vLLM's configuration.
        parts: parts of SPECOPS_VLLM. Unless all are enabled, inexact settings are only a warning.

    Raises:
        NotExactError: all parts are enabled, and a setting cannot be exact.
    """
    _refuse(support.faults_of_config(config, parts) + compiled.faults_of(config), _is_exact(parts))
    compiled.prepare(config, parts)


def check_model(runner: Any, parts: Collection[str]) -> None:
    """Refuse a loaded model that cannot be exact.

    Args:
        runner: vLLM's V1 or V2 model runner.
        parts: parts of SPECOPS_VLLM. Unless all are enabled, inexact layers are only a warning.

    Raises:
        NotExactError: specops cannot compute a layer; or all parts are enabled, and a layer cannot
            be exact.
    """
    unable = support.faults_of_ops(runner.get_model())
    faults = unable + _faults_of_model(runner, parts, not unable)
    _refuse(faults, _is_exact(parts) or bool(unable))
    if _is_exact(parts):
        threads.rest_openmp()


def _is_exact(parts: Collection[str]) -> bool:
    return len(parts) == len(PARTS)


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
    if runs and _is_exact(parts):
        try:
            look_at(runner, check)
        except Exception as raised:  # perhaps by a layer that is refused below
            error = raised
    faults = support.faults_of_layers(runner.get_model(), parts, check.found)
    if error is not None and not faults:
        raise error
    return faults + support.faults_of_ranks(get_tp_group())
