# SPDX-License-Identifier: Apache-2.0
"""The engine behind a door: jobs in, batches of what steps brought out, in a thread or a process.

A server imports `client` and `messages` alone, which load neither torch nor the engine.
"""
