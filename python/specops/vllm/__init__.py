# SPDX-License-Identifier: Apache-2.0
"""specops inside vLLM: exact kernels, exact sampling and verification, and drafters.

SPECOPS_VLLM=exact in the environment switches the plug-in on in every process of vLLM; the drafters
below are named in vLLM's speculative configuration. docs/vllm.md has the whole of it. Importing
this package does not import vLLM.
"""

from specops.vllm.proposers import NgramProposer, PredictedOutputs, SuffixProposer

__all__ = ["NgramProposer", "PredictedOutputs", "SuffixProposer"]
