# SPDX-License-Identifier: Apache-2.0
"""Drafting: proposing the tokens that a step verifies, and selecting which of them to verify.

`base` defines the protocol of drafters. Each drafting method has a file with its drafter, and
`drafting` holds the drafters of one engine. `specops.api.methods` describes the methods: a server
process loads that package only.
"""
