# SPDX-License-Identifier: Apache-2.0
"""The plug-in finds all that it changes in vLLM, and stops with an error if something has moved."""

import subprocess
import sys
from typing import Any

import pytest
from specops.integrations.vllm import hooks
from specops.integrations.vllm.hooks import HOOKS, Hook, HookError


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: f"{hook.part or 'all'}-{hook.target}")
def test_every_hook_matches_vllm(hook: Hook) -> None:
    assert hooks.fault_of(hook) is None


def test_moved_hook_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    def _sample(self: Any, logits: Any, spec_decode_metadata: Any, more: Any) -> None: ...

    monkeypatch.setattr(GPUModelRunner, "_sample", _sample)
    with pytest.raises(HookError, match=r"_sample must take \(self, logits, spec_decode_metadata"):
        hooks.check(hooks.of_parts({"sampling"}))
    hooks.check(hooks.of_parts({"linear"}))


def in_vllm(
    code: str, parts: str, *, before: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run code in a process in which vLLM has loaded its plug-ins."""
    code = f"{before}from vllm.plugins import load_general_plugins\nload_general_plugins()\n{code}"
    environment["SPECOPS_VLLM"] = parts
    command = ["env", *(f"{name}={value}" for name, value in environment.items())]
    command += [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


REPORT = """
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.layers import utils
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
print(AttentionBackendEnum.CPU_ATTN.get_class().__module__, sorted(op_registry_oot),
      utils.dispatch_cpu_unquantized_gemm.__module__, GPUModelRunner._sample.__module__)
"""


def test_nothing_is_changed_without_the_setting() -> None:
    done = in_vllm(REPORT, "")
    assert done.stdout.split() == [
        "vllm.v1.attention.backends.cpu_attn",
        "[]",
        "vllm.model_executor.layers.utils",
        "vllm.v1.worker.gpu_model_runner",
    ], done.stderr


def test_exact_switches_on_all_parts() -> None:
    done = in_vllm(REPORT, "exact")
    assert done.stdout.split() == [
        "specops.integrations.vllm.attention",
        "['RMSNorm',",
        "'SiluAndMul']",
        "specops.integrations.vllm.packed_linear",
        "specops.integrations.vllm.sample_step",
    ], done.stderr


def test_list_switches_on_the_parts_that_it_names() -> None:
    assert in_vllm(REPORT, "linear,norm").stdout.split() == [
        "vllm.v1.attention.backends.cpu_attn",
        "['RMSNorm']",
        "specops.integrations.vllm.packed_linear",
        "vllm.v1.worker.gpu_model_runner",
    ]


ELSEWHERE = """
import vllm.platforms
from vllm.platforms.interface import UnspecifiedPlatform
vllm.platforms._current_platform = UnspecifiedPlatform()
"""


def test_exact_is_refused_unless_vllm_computes_on_a_cpu() -> None:
    done = in_vllm(REPORT, "exact", before=ELSEWHERE)
    assert done.returncode != 0
    assert "works where vLLM computes on a CPU, got UnspecifiedPlatform" in done.stderr


def test_unknown_part_stops_vllm() -> None:
    done = in_vllm(REPORT, "exactly")
    assert done.returncode != 0
    assert "SPECOPS_VLLM must be exact or a list of norm" in done.stderr


NUMBA = "from numba import get_num_threads\nprint(get_num_threads())"


def test_numba_of_the_drafter_starts_no_threads() -> None:
    assert in_vllm(NUMBA, "exact").stdout.split() == ["1"]
    assert in_vllm(NUMBA, "exact", NUMBA_NUM_THREADS="2").stdout.split() == ["2"]


def test_running_numba_is_limited_to_one_thread() -> None:
    code = "import numba\nnumba.get_num_threads()\n"
    assert in_vllm(NUMBA, "exact", before=code).stdout.split() == ["1"]
    compiled = "\nimport numpy\nprint(numba.njit(lambda x: x + 1)(numpy.zeros(1))[0])"
    assert in_vllm(NUMBA + compiled, "exact", before=code).stdout.split() == ["1", "1.0"]


def test_second_model_runner_is_refused() -> None:
    code = """
from types import SimpleNamespace
from vllm import envs
from vllm.v1.worker.cpu_worker import CPUWorker
print(envs.VLLM_USE_V2_MODEL_RUNNER)
CPUWorker.init_device(SimpleNamespace(use_v2_model_runner=True))
"""
    done = in_vllm(code, "exact")
    assert done.stdout.split() == ["False"] and done.returncode != 0
    assert "cannot be exact with vLLM's second model runner" in done.stderr
    assert in_vllm(code, "exact", VLLM_USE_V2_MODEL_RUNNER="1").stdout.split() == ["True"]
