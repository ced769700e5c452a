# SPDX-License-Identifier: Apache-2.0
"""Training of the model that ships in `python/specops/assets`: see README.md in this folder."""
