# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests inside vLLM, which `make -C tools test-vllm` installs and runs."""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip this folder, with a visible reason, if vLLM is not installed."""
    if importlib.util.find_spec("vllm") is not None:
        return
    for item in items:
        if item.path.is_relative_to(HERE):
            reason = "vLLM is not installed: make -C tools test-vllm"
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session", autouse=True)
def environment() -> Iterator[None]:
    """Set vLLM's variables for tests, and make the drafters of this folder importable."""
    settings = {
        "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    yield
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value


@pytest.fixture(scope="session")
def bundled(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write the bundled model in vLLM's layout."""
    from models import write_bundled

    return write_bundled(tmp_path_factory.mktemp("models") / "bundled")


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write a random Llama, wide enough for the differences of vLLM's own kernels to show."""
    from models import write_random

    return write_random(tmp_path_factory.mktemp("models") / "llama", "llama")


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give vLLM an empty cache of compiled graphs, and return its folder.

    It shares the descriptions of model classes with the usual cache, because vLLM starts a process
    that imports vLLM for each missing one.
    """
    from vllm import envs

    descriptions = Path(envs.VLLM_CACHE_ROOT, "modelinfos")
    descriptions.mkdir(parents=True, exist_ok=True)
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "modelinfos").symlink_to(descriptions)
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(cache))
    return cache / "torch_compile_cache"
