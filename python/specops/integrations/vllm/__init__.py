# SPDX-License-Identifier: Apache-2.0
"""specops as a vLLM plug-in: exact kernels, exact sampling and verification, and drafters.

SPECOPS_VLLM=exact in the environment enables the plug-in in every process of vLLM; the drafters
below are named in vLLM's speculative configuration. docs/vllm.md documents both. Importing this
package does not import vLLM.
"""

from specops.integrations.vllm.proposers import NgramProposer, PredictedOutputs, SuffixProposer

__all__ = ["NgramProposer", "PredictedOutputs", "SuffixProposer"]
