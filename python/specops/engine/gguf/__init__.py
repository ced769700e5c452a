# SPDX-License-Identifier: Apache-2.0
"""GGUF files as models: what they hold, and the directory of a model that is made from one."""
