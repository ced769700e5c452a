# SPDX-License-Identifier: Apache-2.0
"""A load generator for OpenAI-compatible servers: requests, when they are sent, and figures."""
