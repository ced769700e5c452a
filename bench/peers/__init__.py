# SPDX-License-Identifier: Apache-2.0
"""The peers; each runs in bench/.venv in its own process."""
