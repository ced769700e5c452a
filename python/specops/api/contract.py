# SPDX-License-Identifier: Apache-2.0
"""Digests of execution contracts of requests with a LoRA adapter; see service/contract.py."""

import hashlib
from collections.abc import Mapping
from typing import Any


def digest_with_adapter(digest: str, adapter: str | None) -> str:
    """Return the digest of the contract of requests that use a LoRA adapter.

    Args:
        digest: digest of the engine's contract.
        adapter: digest of the adapter; None returns the engine's own digest.
    """
    if adapter is None:
        return digest
    return hashlib.sha256(f"{digest} {adapter}".encode()).hexdigest()[:16]


def with_adapter(contract: Mapping[str, Any], adapter: str | None) -> dict[str, Any]:
    """Return the contract of requests that use a LoRA adapter; None: that of the model alone."""
    if adapter is None:
        return dict(contract)
    digest = digest_with_adapter(contract["digest"], adapter)
    return {**contract, "adapter": adapter, "digest": digest}
