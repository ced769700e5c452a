# SPDX-License-Identifier: Apache-2.0
"""Drafting: proposing the tokens that a step verifies, and selecting which of them to verify.

`methods` describes the available methods, and is the only part that a server loads; `base` has the
protocol, followed by one file per drafter; `drafting` holds the drafters of one engine.
"""
