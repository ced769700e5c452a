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
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum
print(type(current_platform).__module__, AttentionBackendEnum.CPU_ATTN.get_class().__module__,
      sorted(op_registry_oot), utils.dispatch_cpu_unquantized_gemm.__module__)
"""


def test_nothing_is_changed_without_the_setting() -> None:
    done = in_vllm(REPORT, "")
    assert done.stdout.split() == [
        "vllm.platforms.cpu",
        "vllm.v1.attention.backends.cpu_attn",
        "[]",
        "vllm.model_executor.layers.utils",
    ], done.stderr


def test_exact_switches_on_all_parts() -> None:
    done = in_vllm(REPORT, "exact")
    assert done.stdout.split() == [
        "specops.integrations.vllm.platform",
        "specops.integrations.vllm.attention",
        "['RMSNorm',",
        "'SiluAndMul',",
        "'UnquantizedFusedMoEMethod']",
        "specops.integrations.vllm.packed_linear",
    ], done.stderr


def test_list_switches_on_the_parts_that_it_names() -> None:
    assert in_vllm(REPORT, "linear,norm").stdout.split() == [
        "specops.integrations.vllm.platform",
        "vllm.v1.attention.backends.cpu_attn",
        "['RMSNorm',",
        "'UnquantizedFusedMoEMethod']",
        "specops.integrations.vllm.packed_linear",
    ]


ELSEWHERE = """
import vllm.platforms
from vllm.platforms.interface import UnspecifiedPlatform
vllm.platforms._current_platform = UnspecifiedPlatform()
"""


def test_exact_is_refused_unless_vllm_computes_on_a_cpu() -> None:
    done = in_vllm(REPORT, "exact", before=ELSEWHERE)
    assert done.returncode != 0
    assert "requires vLLM on a CPU, got UnspecifiedPlatform" in done.stderr


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


def test_other_version_is_refused_by_name() -> None:
    before = "import vllm\nvllm.__version__ = '0.33.0'\n"
    done = in_vllm(REPORT, "norm", before=before)
    assert done.returncode != 0
    assert "specops: supports vLLM 0.32, got 0.33.0" in done.stderr
