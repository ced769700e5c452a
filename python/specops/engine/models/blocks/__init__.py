# SPDX-License-Identifier: Apache-2.0
"""What decoder layers are made of. A model is a list of layers, which may differ in everything."""
