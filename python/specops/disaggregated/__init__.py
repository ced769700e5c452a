# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode in engines apart: pages as bytes, their transport, and a queue of jobs.

An engine imports nothing of it unless a role is asked for.
"""
