# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU worker with specops' sampling and model checks, on either of vLLM's model runners.

This module imports vLLM, so only vLLM imports it, by the name that the platform sets.
"""

from functools import partial
from typing import Any

from vllm.config import set_current_vllm_config
from vllm.v1.worker.cpu_worker import CPUWorker

from specops.integrations.vllm import experts, model_check, packed_linear, plugin


class SpecopsWorker(CPUWorker):  # type: ignore[misc]
    """CPU worker of a process in which the plug-in is enabled."""

    def init_device(self) -> None:
        """Create the model runner; prepare V2 to run without Triton."""
        if self.use_v2_model_runner:
            from specops.integrations.vllm import v2_runner

            v2_runner.prepare()
        super().init_device()

    def load_model(self, **kwargs: Any) -> None:
        """Load the model, install the sampler, and check that all of it is exact."""
        parts, runner = plugin.switched_on(), self.model_runner
        model_check.check_config(self.vllm_config, parts)
        super().load_model(**kwargs)
        if "linear" in parts:
            experts.use_routers(runner.get_model())
        if self.use_v2_model_runner:
            from specops.integrations.vllm import v2_runner

            v2_runner.install(runner, parts)
        elif "sampling" in parts:
            from specops.integrations.vllm.sample_step import sample_step

            runner._sample = partial(sample_step, runner)
        with set_current_vllm_config(self.vllm_config):
            model_check.check_model(runner, parts)

    def reload_weights(
        self,
        weights_iterator: Any = None,
        weights_path: str | None = None,
        is_checkpoint_format: bool = True,
    ) -> None:
        """Load weights again, and pack them again.

        Raises:
            ValueError: the weights are not in the checkpoint's format.
        """
        if "linear" in plugin.switched_on() and not is_checkpoint_format:
            raise ValueError(
                "specops: is_checkpoint_format must be True, got False: linear packs the weights "
                "and can only reload them in the checkpoint's format"
            )
        super().reload_weights(weights_iterator, weights_path, is_checkpoint_format)
        self._pack_again()

    def finish_weight_update(self) -> None:
        """Finish an update of the weights, and pack them again."""
        super().finish_weight_update()
        self._pack_again()

    def _pack_again(self) -> None:
        packed_linear.pack_again(self.model_runner.get_model().modules())
