# SPDX-License-Identifier: Apache-2.0
"""Check over HTTP whether speculation changes the output of an OpenAI-compatible server.

Uses only the standard library, so that it runs wherever Python is installed.
"""
