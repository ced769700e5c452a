# SPDX-License-Identifier: Apache-2.0
"""Disaggregated prefill and decode: pages as bytes, their transfer, and a shared job queue.

An engine imports this package only if it has a role (`--role`).
"""
