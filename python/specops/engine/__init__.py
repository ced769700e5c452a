# SPDX-License-Identifier: Apache-2.0
"""A minimal decoding engine composed of the specops ops."""
