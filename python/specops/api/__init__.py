# SPDX-License-Identifier: Apache-2.0
"""Plain data that callers, servers and engines exchange. Nothing here imports torch.

sampling_params      parameters of one request
speculative_config   how a server drafts, and what a request may change
config               configuration of an engine
methods              descriptions of the drafting methods
outputs              what a step returns for a request
errors               errors that a caller may want to handle
structured           constraints on the output, and the formats that they are written in
messages             what a server and the process of an engine send each other
tokenizer            text to token ids and back
"""
