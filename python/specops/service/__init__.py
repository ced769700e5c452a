# SPDX-License-Identifier: Apache-2.0
"""An engine as a service, in a thread or a process: it takes jobs and returns batches of results.

A server imports only `client` and `messages`, which load neither torch nor the engine.
"""
