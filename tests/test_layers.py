# SPDX-License-Identifier: Apache-2.0
"""Allowed directions of includes and imports, checked by reading the include and import lines."""

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest
from shared_fixtures import BF16_OPS

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
PACKAGE = ROOT / "python" / "specops"

FAMILIES = (
    "batching",
    "attention",
    "dense",
    "linear_attention",
    "moe",
    "sampling",
    "suffix_tree",
)
# Code that several families share.
SHARED = {"gemm": ("dense", "moe")}
SERVER_STACK = ("fastapi", "uvicorn", "pydantic", "prometheus_client", "starlette", "jinja2")
OPTIONAL = ("llguidance",)
# Modules of the engine's host that the server may import; everything else it shares is plain data.
SERVER_IMPORTS = ("specops.service.client.", "specops.service.garbage.")
# Modules that import specops.disaggregated, inside a function.
IMPORTS_DISAGGREGATED = {"python/specops/service/child.py"}
UNSAFE = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "multiprocessing"}

# Modules of commands that import torch.
CLI_WITH_ENGINE = {
    "audit.py",
    "comparison.py",
    "complete.py",
    "exactness.py",
    "models.py",
    "options.py",
    "serve.py",
}

# Modules of the engine, lowest first: a module imports from its own and from earlier groups.
ENGINE_GROUPS = (
    {"device", "features", "memory"},
    {"parallel"},
    {"models"},
    {"emitted", "prompt_logprobs", "structured"},
    {"request"},
    {"plan"},
    {"drafters", "sharing"},
    {"scheduling"},
    {"machine", "steps"},
    {"admission"},
    {"prompt_pages", "step_costs"},
    {"engine"},
    {""},
    {"__main__"},
)


def includes(path: Path) -> list[str]:
    return re.findall(r'^\s*#\s*include\s+["<]([^">]+)[">]', path.read_text(), re.MULTILINE)


def imports(path: Path) -> set[str]:
    """Return all modules that a file imports, also inside functions; `from a import b` is a.b."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            # specops-suffix packages this file beside another _C.
            own = node.level == 1 and not node.module and path == PACKAGE / "suffix_tree.py"
            assert node.level == 0 or own, f"{path}: imports are absolute"
            module = "specops" if own else node.module
            names |= {f"{module}.{alias.name}" for alias in node.names}
    return names


def sources(folder: Path, *suffixes: str) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix in suffixes)


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def for_each_file(paths: Iterable[Path]) -> Callable[[Callable[[Path], None]], Callable[[], None]]:
    """Make one test of a rule for many files; its failure names all files that break the rule."""

    def decorate(rule: Callable[[Path], None]) -> Callable[[], None]:
        def test() -> None:
            broken = []
            for path in paths:
                try:
                    rule(path)
                except AssertionError as error:
                    broken.append(f"{relative(path)}: {error}")
            assert not broken, "\n".join(broken)

        test.__doc__ = rule.__doc__
        return test

    return decorate


CPP = sources(CSRC, ".h", ".cpp", ".cuh", ".cu")
PYTHON = sources(PACKAGE, ".py")


def test_source_files_are_found() -> None:
    assert len(CPP) > 20 and len(PYTHON) > 10


@for_each_file(CPP)
def test_include_directions(path: Path) -> None:
    area = path.relative_to(CSRC).parts[0]
    checks = path.name.endswith(("ops.cpp", "checks.h"))
    binds = checks or path.name in ("ops.h", "tensor_view.h", "bindings.cpp")
    for name in includes(path):
        other = name.split("/")[0]
        if other in FAMILIES:
            assert (CSRC / name).is_file(), f"{name} is not a file of csrc"
            assert area == other or path.name == "bindings.cpp", "families never include each other"
        if other in SHARED:
            assert (CSRC / name).is_file(), f"{name} is not a file of csrc"
            assert area in (other, *SHARED[other]), f"only {SHARED[other]} include {other}"
        if other == "pybind11" or name.endswith("dlpack.h"):
            assert binds, (
                f"{name} belongs to tensor_view.h, *ops.cpp, checks.h, ops.h, bindings.cpp"
            )
        if name == "common/tensor_view.h":
            assert checks, "only the checks see tensors"
        assert other not in ("torch", "ATen", "c10"), "no libtorch"
        if other == "simt" and area != "simt":
            assert relative(path) in SIMT_ENTRY_POINTS, "only entry points include it"


# Files in which the interpreter replaces CUDA.
SIMT_ENTRY_POINTS = {"csrc/common/device.cuh", "csrc/common/ptx.cuh", "csrc/bindings.cpp"}


@for_each_file(sources(CSRC / "simt", ".h", ".cpp"))
def test_interpreter_includes_no_family(path: Path) -> None:
    for name in includes(path):
        if "/" in name and (CSRC / name).is_file():
            assert name.startswith("simt/") or name == "common/dtype.h", name


@pytest.mark.parametrize("name", sorted({*SIMT_ENTRY_POINTS, "csrc/common/launch.cuh"}))
def test_interpreter_is_included_only_under_specops_simt(name: str) -> None:
    """Every mention of simt lies in a branch of SPECOPS_SIMT."""
    depth: list[bool] = []
    for line in (ROOT / name).read_text().splitlines():
        if re.match(r"\s*#\s*if", line):
            depth.append("defined(SPECOPS_SIMT)" in line and "!" not in line)
        elif re.match(r"\s*#\s*el", line):
            depth[-1] = False
        elif re.match(r"\s*#\s*endif", line):
            depth.pop()
        elif re.search(r"\bsimt/|\bsimt::|register_simt", line) and not line.startswith("//"):
            assert any(depth), f"{name}: {line}"


def test_interpreter_is_not_shipped() -> None:
    cmake = (ROOT / "CMakeLists.txt").read_text()
    assert re.findall(r"^install\((.*)\)$", cmake, re.MULTILINE) == [
        "TARGETS _C LIBRARY DESTINATION specops"
    ]
    assert not [path for path in PYTHON if re.search(r"\b_?simt\b", path.read_text())]


# The linker keeps one definition of an inline standard function, perhaps the one compiled for
# AVX-512. So files that are compiled once per instruction set use no such function.
KERNEL_HEADERS = {
    "algorithm",
    "array",
    "string",
    "vector",
    "map",
    "memory",
    "functional",
    "numeric",
}


@for_each_file([path for path in CPP if "_cpu" in path.name])
def test_kernel_files_use_no_standard_templates(path: Path) -> None:
    assert not KERNEL_HEADERS & set(includes(path))
    assert "std::sort" not in path.read_text()


def closure(path: Path, seen: set[Path]) -> set[Path]:
    """Return a file and all our files that it includes."""
    seen.add(path)
    for name in includes(path):
        if (CSRC / name).is_file() and CSRC / name not in seen:
            closure(CSRC / name, seen)
    return seen


def kernels_of(cmake: str, variable: str) -> set[str]:
    match = re.search(rf"^set\({variable}\n(.*?)\)", cmake, re.MULTILINE | re.DOTALL)
    assert match is not None
    return set(re.findall(r"csrc/\S+", match.group(1)))


def test_only_kernels_with_bf16_or_tiles_are_compiled_for_those_sets() -> None:
    """Other kernels run the code of the instruction set without bf16."""
    cmake = (ROOT / "CMakeLists.txt").read_text()
    named = {
        variable: kernels_of(cmake, variable)
        for variable in ("SPECOPS_CPU_KERNELS", "SPECOPS_BF16_KERNELS", "SPECOPS_VNNI_KERNELS")
    }
    own, with_vnni = set(), set()
    for name in named["SPECOPS_CPU_KERNELS"]:
        files = closure(ROOT / name, set()) - {CSRC / "common" / "simd.h"}
        texts = [path.read_text() for path in files]
        # Files of float16 and float32 have no such products.
        is_of_floats = name.endswith(("_f16_cpu.cpp", "_f32_cpu.cpp"))
        uses_bf16 = re.compile(r"dot_pairs\(|gemm_range\(|ISA_\w+_bf16")
        if not is_of_floats and any(uses_bf16.search(text) for text in texts):
            own.add(name)
        if any("integer_range<" in text for text in texts):
            with_vnni.add(name)
    assert with_vnni == named["SPECOPS_VNNI_KERNELS"]
    own -= with_vnni  # avx512_bf16 has VNNI, and uses the variant of these files
    assert own == named["SPECOPS_BF16_KERNELS"]
    # The same rule for kernels with tiles.
    tiles = {path for path in CPP if "SPECOPS_AMX_MODEL" in path.read_text()}
    users = {
        relative(path) for path in CPP if path.suffix == ".cpp" and tiles & closure(path, set())
    }
    users.add("csrc/moe/moe_linear_cpu.cpp")  # uses tiles through ranges
    assert users == kernels_of(cmake, "SPECOPS_AMX_KERNELS")
    # simd.h names each set twice: with the set without bf16, and for dot_pairs.
    for isa in ("avx512_bf16", "neon_bf16"):
        assert (CSRC / "common" / "simd.h").read_text().count(f"ISA_{isa}") == 2
    defined = {
        op
        for name in own
        for op in re.findall(
            r"^void (\w+?)(?:_bf16)?_cpu\(", (ROOT / name).read_text(), re.MULTILINE
        )
    }
    assert defined == BF16_OPS


OBJECTS = [
    folder
    for folder in sorted(
        ROOT.glob(f"build/cmake-{sys.implementation.cache_tag}/CMakeFiles/specops_*.dir")
    )
    # Without objects for tests, and without host code, which is compiled for any machine.
    if not {"simt", "host"} & set(folder.stem.split("_"))
]


@pytest.mark.parametrize("folder", OBJECTS, ids=lambda path: str(path.stem))
def test_instruction_sets_share_no_code(folder: Path) -> None:
    """Symbols that the linker may merge lie in the namespace of their instruction set."""
    if shutil.which("nm") is None:
        pytest.skip("nm is not installed")
    objects = [str(path) for path in folder.rglob("*.o")]
    command = ["nm", "-C", "--defined-only", *objects]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    isa = folder.stem.removeprefix("specops_")
    for kind, name in re.findall(r"^[0-9a-f]+ (\w) (.*)$", done.stdout, re.MULTILINE):
        assert kind not in "WVu" or f"specops::{isa}::" in name, name


@for_each_file(CPP + PYTHON + sources(ROOT / "tests", ".py"))
def test_files_have_an_spdx_line(path: Path) -> None:
    head = path.read_text()[:400]
    assert "SPDX-License-Identifier: Apache-2.0" in head or path.name == "dlpack.h"


@for_each_file(PYTHON)
def test_import_directions(path: Path) -> None:
    inside = path.relative_to(PACKAGE)
    names = imports(path)
    ours = {name for name in names if name.split(".")[0] == "specops"}
    top = {name.split(".")[0] for name in names}
    assert not top & {"tests", "bench", "tools", "shared_fixtures"}
    if inside.parts[0] == "reference":
        # QuantizedWeight and the groups of arguments are data that both sides use.
        shared = ("specops.reference", "specops.quantization", "specops.argument_groups")
        assert all(name.startswith(shared) for name in ours)
        assert top - set(sys.stdlib_module_names) <= {"torch", "specops"}
        return
    # Apart from tests and benches, only `autograd` needs the formulas of ops.
    uses_reference = any(name.startswith("specops.reference") for name in ours)
    assert not uses_reference or inside == Path("autograd.py")
    if inside.parts[0] == "api":
        below = ("specops.api", "specops.checkpoints")
        assert all(name.startswith(below) for name in ours), "plain data uses no engine"
        assert "torch" not in top
        return
    if inside.parts[:2] == ("integrations", "vllm"):
        assert not any(name.startswith("specops._C") for name in ours), "only ops touch _C"
        of_engine = {name for name in ours if name.startswith("specops.engine")}
        assert not of_engine, "the vLLM plug-in is independent of the engine"
        return
    if inside.parts[0] == "cli":
        assert not any(name.startswith("specops._C") for name in ours), "only ops touch _C"
        heavy = {name for name in ours if name.startswith("specops.engine")} | (top & {"torch"})
        assert not heavy or inside.name in CLI_WITH_ENGINE, "importing torch is slow"
        return
    if inside.parts[0] == "integrations":
        above = {name for name in ours if name.startswith(("specops._C", "specops.server"))}
        assert not above, "an integration uses no server"
        return
    if inside.name == "__main__.py" and len(inside.parts) == 1:
        assert ours == {"specops.cli.main"}
        return
    if inside.parts in (("audit.py",), ("scoring.py",)):
        above = ("specops._C", "specops.server", "specops.service", "specops.cli")
        assert not any(name.startswith(above) for name in ours), "these need only the engine"
        return
    if inside.parts == ("engine", "__main__.py"):
        assert ours == {"specops.cli.serve.main"}
        return
    assert not any(name.startswith("specops.cli") for name in ours), "only commands import commands"
    assert "vllm" not in top and not any(name.startswith("specops.integrations") for name in ours)
    uses_disaggregated = any(name.startswith("specops.disaggregated") for name in ours)
    may_use_disaggregated = (
        relative(path) in IMPORTS_DISAGGREGATED or inside.parts[0] == "disaggregated"
    )
    assert may_use_disaggregated or not uses_disaggregated, "a role imports it"
    if inside.parts[0] in ("engine", "server", "service", "disaggregated"):
        assert not any(name.startswith("specops._C") for name in ours), "only ops touch _C"
        assert inside.parts[0] == "server" or not any(
            name.startswith("specops.server") or name.split(".")[0] in SERVER_STACK
            for name in names
        ), "the engine runs without a server"
        above = any(name.startswith("specops.service") for name in ours) or "msgspec" in top
        assert inside.parts[0] != "engine" or not above, "the engine is independent of the service"
        assert not top & UNSAFE, "processes exchange plain data only"
        if inside.parts[0] == "server":
            beyond = {
                name
                for name in ours
                if name.startswith(("specops.engine", "specops.service"))
                and not name.startswith(SERVER_IMPORTS)
            }
            assert not beyond, "the server uses the client of the engine and plain data"
        return
    above = ("specops.engine", "specops.api")
    assert not any(name.startswith(above) for name in ours), "ops use no engine"
    is_reader = inside.parts[0] == "checkpoints"
    readers = {name for name in ours if name.startswith("specops.checkpoints")}
    assert is_reader or not readers, "ops do not read files"
    if is_reader:
        assert all(name.startswith("specops.quantization") for name in ours - readers)
    assert not top & {"numpy", *SERVER_STACK}


GROUP_OF = {name: i for i, group in enumerate(ENGINE_GROUPS) for name in group}


def engine_module(parts: Sequence[str]) -> str:
    """Return the entry of ENGINE_GROUPS of a module of the engine; "" for the package."""
    return next((name for name in (".".join(parts[:2]), *parts[:1]) if name in GROUP_OF), "")


@for_each_file(sources(PACKAGE / "engine", ".py"))
def test_engine_modules_import_lower_groups_only(path: Path) -> None:
    inside = path.relative_to(PACKAGE / "engine").with_suffix("").parts
    module = engine_module(inside)
    assert module or inside == ("__init__",), "add the new module to ENGINE_GROUPS"
    for name in imports(path):
        parts = name.split(".")
        if parts[:2] == ["specops", "engine"]:
            other = engine_module(parts[2:])
            assert GROUP_OF[other] <= GROUP_OF[module], f"{name} stands above {module}"


def test_engine_has_no_import_cycle() -> None:
    """Modules of one group may import each other, but not in a cycle."""
    modules = {}
    for path in sources(PACKAGE / "engine", ".py"):
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        names = imports(path)
        modules[name.removesuffix(".__init__")] = names | {
            found.rpartition(".")[0] for found in names
        }
    assert len(modules) > 40 and import_cycles(modules) == []


@pytest.mark.ci
def test_vllm_plugin_imports_without_vllm() -> None:
    code = """
import sys
sys.modules["vllm"] = None  # an import of it now fails
from specops.integrations.vllm import exactness, plugin
plugin.register()
"""
    environment = {name: os.environ[name] for name in os.environ if name != "SPECOPS_VLLM"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr


CONFIGURATION = [
    PACKAGE / "api" / "did_you_mean.py",
    *(PACKAGE / "api").glob("speculative_*.py"),
    *sources(PACKAGE / "api" / "methods", ".py"),
]


@for_each_file(CONFIGURATION)
def test_configuration_imports_the_standard_library_only(path: Path) -> None:
    """The --help of commands names the methods, and starts without torch."""
    for name in imports(path):
        own = ("specops.api.did_you_mean", "specops.api.methods", "specops.api.speculative")
        assert name.split(".")[0] in sys.stdlib_module_names or name.startswith(own), name


# Generic code names no method: a method is its description, its drafter and a line of the registry.
METHOD_NAMES = re.compile(
    r"""["'`](mtp|ngram|suffix)\b|[Mm]tp|[Nn]gram|[Ss]uffix|PredictionDrafter|PredictedText|DraftModel|Eagle|Medusa|Hydra|Dflash"""
)
METHOD_FILES = [
    PACKAGE / "api" / "speculative_spellings.py",
    *sources(PACKAGE / "api" / "methods", ".py"),
    *(PACKAGE / "engine" / "drafters").glob("mtp*.py"),
    *(PACKAGE / "engine" / "drafters").glob("ngram*.py"),
    *(PACKAGE / "engine" / "drafters").glob("suffix*.py"),
    *(PACKAGE / "engine" / "drafters").glob("prediction*.py"),
    *(PACKAGE / "engine" / "drafters").glob("draft_model*.py"),
    *(PACKAGE / "engine" / "drafters").glob("eagle*.py"),
    *(PACKAGE / "engine" / "drafters").glob("medusa*.py"),
    *(PACKAGE / "engine" / "drafters").glob("residual*.py"),
    *(PACKAGE / "engine" / "drafters").glob("hydra*.py"),
    *(PACKAGE / "engine" / "drafters").glob("dflash*.py"),
]
# Words that only look like a method: Python's own, OpenAI's field, and two fields of EngineConfig.
OTHER_WORDS = re.compile(
    r"""removesuffix|removeprefix|\.suffix\b|\bwith_suffix\(|\bsuffix: str|"suffix"\)"""
    r"""|"suffix": \(\)|"suffix must|param="suffix"|\bsuffix_(corpus|cache)\b"""
    r"""|suffix decoding drafts from"""
)


@for_each_file(
    [
        path
        for folder in ("api", "engine", "server")
        for path in sources(PACKAGE / folder, ".py", ".js", ".html")
        # Models have MTP modules, tensor names have suffixes, and a field of OpenAI's is "suffix".
        if path not in METHOD_FILES
        and "models" not in path.relative_to(PACKAGE).parts
        and path not in (PACKAGE / "server" / "infill.py", PACKAGE / "server" / "unsupported.py")
    ]
    + [PACKAGE / "cli" / "exactness.py"]
)
def test_generic_code_names_no_method(path: Path) -> None:
    assert METHOD_NAMES.findall(OTHER_WORDS.sub("", path.read_text())) == []


def test_method_names_are_found() -> None:
    for line in ('if method == "mtp":', "MtpDrafter(x)", "min_ngram_size", "x.suffix_decoding_y"):
        assert METHOD_NAMES.search(OTHER_WORDS.sub("", line)), line


MODELS = PACKAGE / "engine" / "models"
FAMILY_FILES = {
    path.stem: path
    for path in sources(MODELS / "families", ".py")
    if "FAMILY = Family(" in path.read_text()
}
# Formats of tool calls and of reasoning have the names of the first families that use them.
FORMATS = ("server/call_forms.py", "server/formats.py", "server/harmony.py", "server/reasoning.py")


@for_each_file(
    [
        path
        for folder in ("api", "engine", "server")
        for path in sources(PACKAGE / folder, ".py", ".js", ".html")
        if path.parent != MODELS / "families" and not relative(path).endswith(FORMATS)
    ]
)
def test_generic_code_names_no_model_family(path: Path) -> None:
    """A model family is one file and a line of the registry."""
    stems = {re.split(r"[\d_]", name)[0] for name in FAMILY_FILES}
    assert {"llama", "qwen", "gemma", "ernie"} < stems
    text = path.read_text().replace("llama.cpp", "")
    assert re.findall("|".join(sorted(stems)), text, re.IGNORECASE) == []


@for_each_file(FAMILY_FILES.values())
def test_model_family_is_one_file_and_one_registry_line(path: Path) -> None:
    assert not {name for name in imports(path) if name.split(".")[-2] in FAMILY_FILES}
    registry = (MODELS / "families" / "__init__.py").read_text()
    assert len(re.findall(rf'^    "{path.stem}",$', registry, re.MULTILINE)) == 1


@for_each_file(sources(MODELS, ".py"))
def test_models_import_in_one_direction(path: Path) -> None:
    """Blocks import no model, models no family, and families no loader."""
    levels = (
        {"adapters", "batch", "head_files", "kv", "loading", "shards", "weight_cache", "weights"},
        {"blocks", "prefix_states"},
        {"config"},
        {"families", "transformer"},
        {"adapter_files", "dry_run"},
        {"loader"},
        {"mtp"},
        {"state_head"},
        {"assistant", "dflash2", "eagle", "prefix_layer"},
        {"dflash", "residual_heads"},
        {"__init__"},
    )
    level_of = {name: level for level, names in enumerate(levels) for name in names}
    own = level_of[path.relative_to(MODELS).parts[0].removesuffix(".py")]
    for name in imports(path):
        parts = name.split(".")
        if parts[:3] == ["specops", "engine", "models"]:
            assert level_of[parts[3]] <= own, name


def test_engine_imports_without_optional_packages() -> None:
    code = f"""
import sys
for name in {SERVER_STACK + OPTIONAL!r}:
    sys.modules[name] = None  # an import of it now fails
import specops.engine
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_server_never_refers_to_an_engine() -> None:
    """The server's process need not load torch either."""
    for path in sources(PACKAGE / "server", ".py"):
        for node in ast.walk(ast.parse(path.read_text())):
            name = getattr(node, "id", getattr(node, "attr", getattr(node, "arg", None)))
            assert name not in ("engine", "_engine", "Engine"), path
    code = "import sys; sys.modules['torch'] = None; import specops.server, specops.cli.serve"
    code += "; import specops.service.process"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 or "No module named 'fastapi'" in done.stderr, done.stderr


def import_cycles(modules: dict[str, set[str]]) -> list[str]:
    """Return the modules that remain after removing, repeatedly, those that import no other."""
    left = {name: of & modules.keys() - {name} for name, of in modules.items()}
    while free := {name for name, of in left.items() if not of}:
        left = {name: of - free for name, of in left.items() if name not in free}
    return sorted(left)


def test_benches_and_tools_have_no_import_cycle() -> None:
    """tools/gpu_check imports benches, and benches import tools/cuda_toolkit.py."""
    modules: dict[str, set[str]] = {}
    for path in [*sources(ROOT / "bench", ".py"), *sources(ROOT / "tools", ".py")]:
        parts = path.relative_to(ROOT).with_suffix("").parts
        if ".venv" in parts or "work" in parts:
            continue
        name = ".".join(parts).removesuffix(".__init__")
        names = imports(path)
        modules[name] = names | {found.rpartition(".")[0] for found in names}
    assert len(modules) > 40
    assert import_cycles(modules) == []
    assert import_cycles({"a": {"b"}, "b": {"a"}, "c": {"a"}, "d": set()}) == ["a", "b", "c"]
