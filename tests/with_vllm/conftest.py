# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests that need vLLM: `make test-vllm` runs them in its own environment."""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips this folder, visibly, where vLLM is not installed."""
    if importlib.util.find_spec("vllm") is not None:
        return
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.skip(reason="vLLM is not installed: make test-vllm"))


@pytest.fixture(scope="session", autouse=True)
def environment() -> Iterator[None]:
    """As the documentation recommends it, and with the drafters of this folder."""
    wanted = {
        "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    yield
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value


@pytest.fixture(scope="session")
def bundled(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The bundled model as vLLM takes it."""
    from models import write_bundled

    return write_bundled(tmp_path_factory.mktemp("models") / "bundled")


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random Llama, whose products are wide enough for vLLM's own to show."""
    from models import write_random

    return write_random(tmp_path_factory.mktemp("models") / "llama", "llama")
