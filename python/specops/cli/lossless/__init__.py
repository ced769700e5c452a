# SPDX-License-Identifier: Apache-2.0
"""Whether speculation changes what a server says: any with OpenAI's API, from outside.

Standard library only: it runs where nothing is installed, compiled or at hand but Python.
"""
