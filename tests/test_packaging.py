# SPDX-License-Identifier: Apache-2.0
"""The source distribution builds the package; the ops require torch, the suffix cache nothing."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import specops
from test_build import configure

pytestmark = pytest.mark.ci

ROOT = Path(__file__).resolve().parent.parent
PROJECT = (
    "CHANGELOG.md",
    "CMakeLists.txt",
    "LICENSE",
    "MANIFEST.in",
    "README.md",
    "pyproject.toml",
    "setup.py",
)
OPTIONAL = (
    "aiohttp",
    "fastapi",
    "httptools",
    "jinja2",
    "llguidance",
    "msgspec",
    "prometheus_client",
    "pydantic",
    "rich",
    "safetensors",
    "tokenizers",
    "transformers",
    "uvicorn",
    "uvloop",
    "yaml",
)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield the unpacked source distribution of a copy of the tree."""
    pytest.importorskip("setuptools")
    folder = tmp_path_factory.mktemp("sdist")
    tree = folder / "tree"
    tree.mkdir()
    skip = shutil.ignore_patterns("*.egg-info", "__pycache__")
    for name in ("csrc", "python", "tests", "tools"):
        shutil.copytree(ROOT / name, tree / name, ignore=skip)
    for name in PROJECT:
        shutil.copy(ROOT / name, tree)
    build = f"from setuptools.build_meta import build_sdist; build_sdist({str(folder)!r})"
    done = subprocess.run(
        [sys.executable, "-c", build], cwd=tree, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    shutil.rmtree(tree)
    yield folder / archive.name.removesuffix(".tar.gz")
    shutil.rmtree(folder)


def files(folder: Path, *suffixes: str) -> set[str]:
    return {
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file() and (not suffixes or path.suffix in suffixes)
    }


def test_source_distribution_has_exactly_the_files_of_the_build(source: Path) -> None:
    expected = {name for name in files(ROOT / "csrc") if not name.startswith("simt/")}
    assert files(source / "csrc") == expected and len(expected) > 200
    tools = {"best_isa.cpp", "cuda_toolkit.py"}
    assert files(source / "tools") == tools
    for build_file in ("CMakeLists.txt", "setup.py"):
        text = (source / build_file).read_text()
        assert set(re.findall(r"tools/(\w+\.\w+)", text)) <= tools
        for name in re.findall(r"csrc/[\w/]+(?:\.\w+)+", text):
            assert (source / name).is_file() or name.startswith("csrc/simt/"), name
    assert {path.name for path in source.iterdir()} == {
        *PROJECT,
        "PKG-INFO",
        "csrc",
        "python",
        "setup.cfg",
        "tools",
    }


def test_source_distribution_has_every_included_header(source: Path) -> None:
    """Only tests set the macros that include the interpreter and the software AMX tiles."""
    for name in files(source / "csrc", ".h", ".cpp", ".cu", ".cuh"):
        text = (source / "csrc" / name).read_text()
        for included in re.findall(r'^\s*#include "([^"]+)"', text, re.MULTILINE):
            of_tests = included.startswith("simt/") or included == "amx_model.h"
            assert (source / "csrc" / included).is_file() or of_tests, included


def test_source_distribution_has_the_whole_package(source: Path) -> None:
    """This includes types, the bundled model and the page, but no compiled module."""
    package = ROOT / "python" / "specops"
    built = {name for name in files(package) if name.endswith(".so") or "__pycache__" in name}
    assert files(source / "python" / "specops") == files(package) - built


def test_source_distribution_can_be_configured(source: Path, tmp_path: Path) -> None:
    """CMake checks that each listed source exists."""
    done = configure(tmp_path, "native", source)
    assert done.returncode == 0, done.stderr
    built = (tmp_path / "build.ninja").read_text()
    assert "_C.dir/csrc/bindings.cpp.o" in built and "_simt" not in built


@pytest.mark.parametrize("place,strict", [("--inplace", "ON"), ("--build-lib=lib", "OFF")])
def test_warnings_are_errors_only_in_place(
    source: Path, tmp_path: Path, place: str, strict: str
) -> None:
    """`make` builds in place. The compiler of a user may have other warnings."""
    (tmp_path / "cmake").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "cmake").chmod(0o755)
    variables = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "SPECOPS_ISAS": "native"}
    done = subprocess.run(
        [sys.executable, "setup.py", "--quiet", "build_ext", place],
        cwd=source,
        env={**os.environ, **variables, "SPECOPS_CUDA": "OFF"},
        capture_output=True,
        text=True,
        check=False,  # nothing has been built, so that nothing can be copied into place
    )
    assert f" -DSPECOPS_WERROR={strict} " in done.stdout
    assert " -DSPECOPS_ISAS=native " in done.stdout and "-DSPECOPS_CUDA=OFF" in done.stdout


def python(code: str) -> subprocess.CompletedProcess[str]:
    blocked = f"import sys; sys.modules.update(dict.fromkeys({OPTIONAL!r}))\n"  # imports fail now
    return subprocess.run(
        [sys.executable, "-c", blocked + code], capture_output=True, text=True, timeout=300
    )


def test_ops_require_only_torch() -> None:
    done = python("""
import torch, specops
from specops import attention, batching, dense, linear_attention, moe, ngram, runtime
from specops import sampling, suffix_tree
print(sampling.sample(torch.eye(3), positions=torch.arange(3, dtype=torch.int32)).tolist())
print(specops.SuffixCache().num_cached_requests)
""")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[0, 1, 2]\n0\n"


def test_commands_name_the_extra_that_they_require() -> None:
    extras = {
        "serve": "server",
        "complete": "engine",
        "verify-exactness": "engine",
        "contract": "engine",
        "bench": "cli",
    }
    done = python(f"""
from specops.cli import main
for command in {list(extras)}:
    assert main([command]) == 2
""")
    assert done.returncode == 0, done.stderr
    for line, (command, extra) in zip(done.stderr.splitlines(), extras.items(), strict=True):
        sentence = rf"specops: {command} needs \w+, which is not installed: "
        assert re.fullmatch(sentence + rf"pip install 'specops\[{extra}\]'", line)


SUFFIX_CACHE = """
import array, sys
from {module} import SuffixCache, SuffixDecodingCache
cache = SuffixCache(max_cached_requests=3)
number = cache.start("a", [10, 11, 12, 13, 14, 11, 12])
print(number, cache.speculate("a", 4), cache.speculate("a", 4, use_tree=True))
cache.extend("a", array.array("i", [13, 9] * 40))
cache.stop("a")
cache.add((5, 6, 7, 8), "b")
cache.start("c", memoryview(array.array("i", [12, 13])))
print(cache.speculate("c", 8), cache.count([13, 9]), cache.cached_requests)
cache.save("{module}", label="tokens")
cache.evict("a")
print(cache.speculate("c", 8), cache.count([13, 9]), cache.cached_requests)
loaded = SuffixCache()
loaded.load("specops.suffix_tree")  # the file that the package wrote
print(SuffixCache.read_label("{module}"), loaded.num_cached_tokens, loaded.count([13, 9]))
old = SuffixDecodingCache()
old.start_request(1, [1, 2, 3, 1, 2])
print(old.speculate(1, [3, 1, 2]), cache.check_integrity() or loaded.check_integrity())
for wrong in ("a", [1, -1], array.array("d", [1.0])):
    try:
        cache.add(wrong)
    except ValueError as error:
        print(error)
print({{"torch", "numpy"}} & set(sys.modules))
"""


@pytest.mark.ci
def test_suffix_cache_is_a_small_wheel_without_torch(tmp_path: Path) -> None:
    """The wheel has the results of the full package, which can be loaded in the same process."""
    pytest.importorskip("pybind11")

    def run(*command: object, **env: str) -> str:
        done = subprocess.run(
            list(map(str, command)),
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, **env},
            cwd=tmp_path,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    skip = shutil.ignore_patterns("build", "*.egg-info")  # a build in place leaves them
    shutil.copytree(ROOT / "suffix", tmp_path / "suffix", ignore=skip)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir=.", "./suffix")
    (wheel,) = tmp_path.glob("specops_suffix-*.whl")
    assert wheel.name.startswith(f"specops_suffix-{specops.__version__}-")
    assert wheel.stat().st_size < 1_000_000
    run(sys.executable, "-m", "venv", "--without-pip", "alone")
    alone = tmp_path / "alone" / "bin" / "python"
    run(*pip, "--python", alone, "install", "--no-deps", "--no-index", wheel)

    of_package = SUFFIX_CACHE.format(module="specops.suffix_tree")
    of_wheel = SUFFIX_CACHE.format(module="specops_suffix")
    expected = run(sys.executable, "-c", of_package)
    assert expected.endswith("set()\n") and "token_ids=[13, 14]" in expected
    assert run(alone, "-c", of_wheel) == expected
    (installed,) = (tmp_path / "alone").glob("lib/*/site-packages")
    places = os.pathsep.join((str(ROOT / "python"), str(installed)))
    assert run(sys.executable, "-c", of_package + of_wheel, PYTHONPATH=places) == 2 * expected
