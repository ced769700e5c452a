# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU platform with the worker and the request checks of specops.

vLLM imports this module while vLLM itself is being imported, so functions import vLLM's other
modules.
"""

from typing import Any

from vllm.platforms.cpu import CpuPlatform

from specops.integrations.vllm.settings import parts_of
from specops.integrations.vllm.support import NotExactError

WORKER = "specops.integrations.vllm.worker.SpecopsWorker"
_CPU_WORKER = "vllm.v1.worker.cpu_worker.CPUWorker"


class SpecopsCpuPlatform(CpuPlatform):  # type: ignore[misc]
    """CPU platform that vLLM uses if SPECOPS_VLLM names a part."""

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        """Configure vLLM for a CPU, and choose the worker of specops.

        Raises:
            NotExactError: the configuration names another worker.
        """
        super().check_and_update_config(vllm_config)
        parallel = vllm_config.parallel_config
        if parallel.worker_cls not in (_CPU_WORKER, WORKER):
            raise NotExactError(f"specops: worker_cls must be auto, got {parallel.worker_cls}")
        parallel.worker_cls = WORKER

    @classmethod
    def validate_request(cls, processed_inputs: Any, params: Any) -> None:
        """Refuse a request with a parameter that nothing would apply, before it enters the engine.

        Raises:
            VLLMValidationError: the part sampling does not support a parameter.
        """
        from vllm.exceptions import VLLMValidationError
        from vllm.sampling_params import SamplingParams

        from specops.integrations.vllm.request_parameters import check

        super().validate_request(processed_inputs, params)
        if "sampling" in parts_of() and isinstance(params, SamplingParams):
            try:
                check(params)
            except ValueError as error:
                raise VLLMValidationError(str(error)) from None
