# SPDX-License-Identifier: Apache-2.0
"""Disaggregated prefill and decode, and sessions as files: pages as bytes, and a shared job queue.

An engine imports this package only if it has a role (`--role`) or sessions (`--session-dir`).
"""
