# SPDX-License-Identifier: Apache-2.0
"""Drafting: what proposes the tokens that a step verifies, and which of them are verified.

`methods` says what there is to choose from, and is all of it that a server loads; `base` is the
protocol, and a file per drafter; `drafting` has the drafters of one engine.
"""
