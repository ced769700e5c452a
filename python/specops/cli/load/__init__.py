# SPDX-License-Identifier: Apache-2.0
"""Load generator for OpenAI-compatible servers: requests, arrival times and figures."""
