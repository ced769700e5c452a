# SPDX-License-Identifier: Apache-2.0
"""Building blocks of decoder layers. A model is a list of layers, each of any configuration."""
