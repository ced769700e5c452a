# SPDX-License-Identifier: Apache-2.0
"""Who may include or import whom, held by reading the include and import lines."""

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest
from conftest import BF16_OPS

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
# What several families are made of, and which these are.
SHARED = {"gemm": ("dense", "moe")}
SERVER_STACK = ("fastapi", "uvicorn", "pydantic", "prometheus_client", "starlette", "jinja2")
OPTIONAL = ("llguidance",)
# All that a server imports of the process that hosts its engine; the rest is plain data.
FRONTEND = ("specops.service.client.", "specops.service.garbage.")
# Who imports what hands prompts over, inside a function.
TO_DISAGGREGATED = {"python/specops/service/child.py"}
UNSAFE = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "multiprocessing"}

# The other commands' modules import without torch.
CLI_WITH_ENGINE = {
    "comparison.py",
    "complete.py",
    "exactness.py",
    "models.py",
    "options.py",
    "serve.py",
}

# Modules of the engine, lowest first: a module imports from its own group and those before.
ENGINE_GROUPS = (
    {"device", "drafters.trees", "features", "memory"},
    {"parallel"},
    {"models"},
    {"emitted", "prompt_logprobs"},
    {"plan"},
    {"structured"},
    {"request"},
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
    """Every module a file imports, at the top or inside a function; `from a import b` is a.b."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def sources(folder: Path, *suffixes: str) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.suffix in suffixes)


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def of_every(paths: Iterable[Path]) -> Callable[[Callable[[Path], None]], Callable[[], None]]:
    """One test of a rule for each of many files: its failure names all that break it."""

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


def test_the_files_are_found() -> None:
    assert len(CPP) > 20 and len(PYTHON) > 10


@of_every(CPP)
def test_includes(path: Path) -> None:
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
            assert area in (other, *SHARED[other]), f"{other} lies below {SHARED[other]} alone"
        if other == "pybind11" or name.endswith("dlpack.h"):
            assert binds, (
                f"{name} belongs to tensor_view.h, *ops.cpp, checks.h, ops.h, bindings.cpp"
            )
        if name == "common/tensor_view.h":
            assert checks, "only the checks see tensors"
        assert other not in ("torch", "ATen", "c10"), "no libtorch"
        if other == "simt" and area != "simt":
            assert relative(path) in SIMT_DOORS, "the interpreter has few doors"


# Where the interpreter takes the place of CUDA; its own files see the dtypes, and nothing else.
SIMT_DOORS = {"csrc/common/device.cuh", "csrc/common/ptx.cuh", "csrc/bindings.cpp"}


@of_every(sources(CSRC / "simt", ".h", ".cpp"))
def test_the_interpreter_knows_no_family(path: Path) -> None:
    for name in includes(path):
        if "/" in name and (CSRC / name).is_file():
            assert name.startswith("simt/") or name == "common/dtype.h", name


@pytest.mark.parametrize("name", sorted({*SIMT_DOORS, "csrc/common/launch.cuh"}))
def test_the_interpreter_is_included_on_request_alone(name: str) -> None:
    """Every mention of simt stands in a branch of SPECOPS_SIMT."""
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


def test_the_interpreter_is_not_shipped() -> None:
    cmake = (ROOT / "CMakeLists.txt").read_text()
    assert re.findall(r"^install\((.*)\)$", cmake, re.MULTILINE) == [
        "TARGETS _C LIBRARY DESTINATION specops"
    ]
    assert not [path for path in PYTHON if re.search(r"\b_?simt\b", path.read_text())]


# One definition of an inline standard function survives linking, and it may be the one compiled for
# AVX-512: so the files compiled once per instruction set use none.
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


@of_every([path for path in CPP if "_cpu" in path.name])
def test_kernel_files_use_no_standard_templates(path: Path) -> None:
    assert not KERNEL_HEADERS & set(includes(path))
    assert "std::sort" not in path.read_text()


def closure(path: Path, seen: set[Path]) -> set[Path]:
    """The file and what it includes of ours."""
    seen.add(path)
    for name in includes(path):
        if (CSRC / name).is_file() and CSRC / name not in seen:
            closure(CSRC / name, seen)
    return seen


def kernels_of(cmake: str, variable: str) -> set[str]:
    match = re.search(rf"^set\({variable}\n(.*?)\)", cmake, re.MULTILINE | re.DOTALL)
    assert match is not None
    return set(re.findall(r"csrc/\S+", match.group(1)))


def test_what_sets_with_bf16_have_of_their_own() -> None:
    """Files with instructions that only they have; those of the set without serve all others."""
    cmake = (ROOT / "CMakeLists.txt").read_text()
    named = {
        variable: kernels_of(cmake, variable)
        for variable in ("SPECOPS_CPU_KERNELS", "SPECOPS_BF16_KERNELS")
    }
    own = set()
    for name in named["SPECOPS_CPU_KERNELS"]:
        files = closure(ROOT / name, set()) - {CSRC / "common" / "simd.h"}
        texts = [path.read_text() for path in files]
        # float16 and float32 have files of their own, and no such products.
        is_of_floats = name.endswith(("_f16_cpu.cpp", "_f32_cpu.cpp"))
        uses_bf16 = re.compile(r"dot_pairs\(|gemm_range\(|ISA_\w+_bf16")
        if not is_of_floats and any(uses_bf16.search(text) for text in texts):
            own.add(name)
    assert own == named["SPECOPS_BF16_KERNELS"]
    # Tiles have files of their own.
    tiles = {path for path in CPP if "SPECOPS_AMX_MODEL" in path.read_text()}
    users = {
        relative(path) for path in CPP if path.suffix == ".cpp" and tiles & closure(path, set())
    }
    users.add("csrc/moe/moe_linear_cpu.cpp")  # over ranges of tiles
    assert users == kernels_of(cmake, "SPECOPS_AMX_KERNELS")
    # simd.h is everyone's: once for what the set without has as well, once for dot_pairs.
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
    # Not those for tests alone, and host code, which is compiled for any machine.
    if not {"simt", "host"} & set(folder.stem.split("_"))
]


@pytest.mark.parametrize("folder", OBJECTS, ids=lambda path: str(path.stem))
def test_no_instruction_set_lends_code_to_another(folder: Path) -> None:
    """What the linker may merge across files lies in the namespace of its instruction set."""
    if shutil.which("nm") is None:
        pytest.skip("nm is not installed")
    objects = [str(path) for path in folder.rglob("*.o")]
    command = ["nm", "-C", "--defined-only", *objects]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    isa = folder.stem.removeprefix("specops_")
    for kind, name in re.findall(r"^[0-9a-f]+ (\w) (.*)$", done.stdout, re.MULTILINE):
        assert kind not in "WVu" or f"specops::{isa}::" in name, name


@of_every(CPP + PYTHON + sources(ROOT / "tests", ".py"))
def test_spdx_line(path: Path) -> None:
    head = path.read_text()[:400]
    assert "SPDX-License-Identifier: Apache-2.0" in head or path.name == "dlpack.h"


@of_every(PYTHON)
def test_imports(path: Path) -> None:
    inside = path.relative_to(PACKAGE)
    names = imports(path)
    ours = {name for name in names if name.split(".")[0] == "specops"}
    top = {name.split(".")[0] for name in names}
    assert not top & {"tests", "bench", "conftest"}
    if inside.parts[0] == "reference":
        # QuantizedWeight is data that both sides speak of.
        assert all(name.startswith(("specops.reference", "specops.quantization")) for name in ours)
        assert top - set(sys.stdlib_module_names) <= {"torch", "specops"}
        return
    assert not any(name.startswith("specops.reference") for name in ours), "only tests and benches"
    if inside.parts[0] == "api":
        below = ("specops.api", "specops.checkpoints")
        assert all(name.startswith(below) for name in ours), "plain data knows no engine"
        assert "torch" not in top
        return
    if inside.parts[:2] == ("integrations", "vllm"):
        assert not any(name.startswith("specops._C") for name in ours), "the plug-in calls ops"
        of_engine = {name for name in ours if name.startswith("specops.engine")}
        assert not of_engine, "the plug-in is no part of the engine"
        return
    if inside.parts[0] == "cli":
        assert not any(name.startswith("specops._C") for name in ours), "nor do commands"
        heavy = {name for name in ours if name.startswith("specops.engine")} | (top & {"torch"})
        assert not heavy or inside.name in CLI_WITH_ENGINE, "what loads torch starts slowly"
        return
    if inside.parts[0] == "integrations":
        above = {name for name in ours if name.startswith(("specops._C", "specops.server"))}
        assert not above, "a host's integration takes the place of a server"
        return
    if inside.name == "__main__.py" and len(inside.parts) == 1:
        assert ours == {"specops.cli.main"}
        return
    if inside.parts == ("engine", "__main__.py"):
        assert ours == {"specops.cli.serve.main"}
        return
    assert not any(name.startswith("specops.cli") for name in ours), "the command stands above all"
    assert "vllm" not in top and not any(name.startswith("specops.integrations") for name in ours)
    above_door = any(name.startswith("specops.disaggregated") for name in ours)
    is_door = relative(path) in TO_DISAGGREGATED or inside.parts[0] == "disaggregated"
    assert is_door or not above_door, "it is imported where a role asks for it"
    if inside.parts[0] in ("engine", "server", "service", "disaggregated"):
        assert not any(name.startswith("specops._C") for name in ours), "only ops touch _C"
        assert inside.parts[0] == "server" or not any(
            name.startswith("specops.server") or name.split(".")[0] in SERVER_STACK
            for name in names
        ), "the engine runs without a server"
        above = any(name.startswith("specops.service") for name in ours) or "msgspec" in top
        assert inside.parts[0] != "engine" or not above, "the engine knows no host"
        assert not top & UNSAFE, "what crosses the door is data"
        if inside.parts[0] == "server":
            beyond = {
                name
                for name in ours
                if name.startswith(("specops.engine", "specops.service"))
                and not name.startswith(FRONTEND)
            }
            assert not beyond, "a server knows its engine by a client, and plain data"
        return
    above = ("specops.engine", "specops.api")
    assert not any(name.startswith(above) for name in ours), "ops do not know the engine"
    is_reader = inside.parts[0] == "checkpoints"
    readers = {name for name in ours if name.startswith("specops.checkpoints")}
    assert is_reader or not readers, "nor do they know files"
    if is_reader:
        assert all(name.startswith("specops.quantization") for name in ours - readers)
    assert not top & {"numpy", *SERVER_STACK}


GROUP_OF = {name: i for i, group in enumerate(ENGINE_GROUPS) for name in group}


def engine_module(parts: Sequence[str]) -> str:
    """The entry of ENGINE_GROUPS that a module of the engine belongs to; "" for the package."""
    return next((name for name in (".".join(parts[:2]), *parts[:1]) if name in GROUP_OF), "")


@of_every(sources(PACKAGE / "engine", ".py"))
def test_engine_groups(path: Path) -> None:
    inside = path.relative_to(PACKAGE / "engine").with_suffix("").parts
    module = engine_module(inside)
    assert module or inside == ("__init__",), "a new module of the engine needs its place above"
    for name in imports(path):
        parts = name.split(".")
        if parts[:2] == ["specops", "engine"]:
            other = engine_module(parts[2:])
            assert GROUP_OF[other] <= GROUP_OF[module], f"{name} stands above {module}"


def test_the_engine_imports_in_no_circle() -> None:
    """Modules of one file each; a folder's own import each other as they like, in no circle."""
    modules = {}
    for path in sources(PACKAGE / "engine", ".py"):
        name = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        names = imports(path)
        modules[name.removesuffix(".__init__")] = names | {
            found.rpartition(".")[0] for found in names
        }
    assert len(modules) > 40 and circles(modules) == []


@pytest.mark.ci
def test_the_drafters_for_vllm_import_without_it() -> None:
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
    PACKAGE / "api" / "speculative_config.py",
    *sources(PACKAGE / "api" / "methods", ".py"),
]


@of_every(CONFIGURATION)
def test_config_is_standard_library_only(path: Path) -> None:
    """Methods are described without torch: a command's --help names them."""
    for name in imports(path):
        is_registry = name.startswith("specops.api.methods")
        assert name.split(".")[0] in sys.stdlib_module_names or is_registry, name


# What runs every method names none: a method is its description and its drafter, and a line of the
# registry.
METHOD_NAMES = re.compile(
    r"""["'`](mtp|ngram|suffix)\b|[Mm]tp|[Nn]gram|[Ss]uffix|PredictionDrafter|PredictedText|DraftModel|Eagle|Medusa|Hydra|Dflash"""
)
OF_METHODS = [
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
# No method's name, though they look like one: Python's own, OpenAI's field, and the two fields of
# EngineConfig that have their names from the time of one method.
OTHER_WORDS = re.compile(
    r"""removesuffix|removeprefix|\.suffix\b|\bwith_suffix\(|\bsuffix: str|"suffix"\)"""
    r"""|"suffix": \(\)|"suffix must|param="suffix"|\bsuffix_(corpus|cache)\b"""
    r"""|suffix decoding drafts from"""
)


@of_every(
    [
        path
        for folder in ("api", "engine", "server")
        for path in sources(PACKAGE / folder, ".py", ".js", ".html")
        # Models have modules for MTP, tensors' names have suffixes, and prompts may have one.
        if path not in OF_METHODS
        and "models" not in path.relative_to(PACKAGE).parts
        and path != PACKAGE / "server" / "infill.py"
    ]
    + [PACKAGE / "cli" / "exactness.py"]
)
def test_the_loop_names_no_method(path: Path) -> None:
    assert METHOD_NAMES.findall(OTHER_WORDS.sub("", path.read_text())) == []


def test_a_name_of_a_method_is_found() -> None:
    for line in ('if method == "mtp":', "MtpDrafter(x)", "min_ngram_size", "x.suffix_decoding_y"):
        assert METHOD_NAMES.search(OTHER_WORDS.sub("", line)), line


MODELS = PACKAGE / "engine" / "models"
FAMILY_FILES = {
    path.stem: path
    for path in sources(MODELS / "families", ".py")
    if "FAMILY = Family(" in path.read_text()
}
# How tools are called is a matter of formats, which bear the names of their first families.
FORMATS = ("server/call_forms.py",)


@of_every(
    [
        path
        for folder in ("api", "engine", "server")
        for path in sources(PACKAGE / folder, ".py", ".js", ".html")
        if path.parent != MODELS / "families" and not relative(path).endswith(FORMATS)
    ]
)
def test_what_runs_every_family_names_none(path: Path) -> None:
    """A family of models is its own file and a line of the registry."""
    stems = {re.split(r"[\d_]", name)[0] for name in FAMILY_FILES}
    assert {"llama", "qwen", "gemma", "ernie"} < stems
    assert re.findall("|".join(sorted(stems)), path.read_text(), re.IGNORECASE) == []


@of_every(FAMILY_FILES.values())
def test_a_family_is_one_file_and_one_line(path: Path) -> None:
    assert not {name for name in imports(path) if name.split(".")[-2] in FAMILY_FILES}
    registry = (MODELS / "families" / "__init__.py").read_text()
    assert len(re.findall(rf'^    "{path.stem}",$', registry, re.MULTILINE)) == 1
    assert len(path.read_text().splitlines()) < 150


@of_every(sources(MODELS, ".py"))
def test_models_import_in_one_direction(path: Path) -> None:
    """Blocks know no model, models no family, families no loader."""
    floors = (
        {"batch", "head_files", "kv", "shards", "weight_cache", "weights"},
        {"blocks", "prefix_states"},
        {"config"},
        {"families", "transformer"},
        {"dry_run"},
        {"loader"},
        {"mtp"},
        {"state_head"},
        {"dflash2", "eagle", "prefix_layer"},
        {"dflash", "residual_heads"},
        {"__init__"},
    )
    floor_of = {name: floor for floor, names in enumerate(floors) for name in names}
    own = floor_of[path.relative_to(MODELS).parts[0].removesuffix(".py")]
    for name in imports(path):
        parts = name.split(".")
        if parts[:3] == ["specops", "engine", "models"]:
            assert floor_of[parts[3]] <= own, name


# Who may write which fields of a request: a file, or the folder of drafters.
WRITERS = {
    "admission": {"draft_kv"},
    "drafters/drafting": {"draft_limit", "num_drafts", "draft_parents", "draft_stages"},
    "drafters": {"num_final_draft_kv"},
    "scheduling/scheduler": {"last_step"},
    "scheduling/slots": {
        "slot",
        "pages",
        "num_registered_pages",
        "num_computed",
        "num_cached_tokens",
        "was_preempted",
        "queue_seconds",
        "num_final_draft_kv",
    },
    # What steps commit, and what follows from other fields in the beginning.
    "request": {
        "token_ids",
        "logprobs",
        "thinking_state",
        "finish_reason",
        "stop_reason",
        "error",
        "prompt_logprobs",
        "draft_stages",
        "draft_limit",
    },
}
# Who writes something else of such a name: a part of a plan, a step's results.
OTHERS = {
    "memory/kv_cache": {"pages"},
    "sharing/fair_scheduling": {"last_step"},
    "structured/forcing": {"token_ids"},
    "scheduling/decode_rows": {"draft_parents"},
    "scheduling/spare_pages": {"draft_parents", "num_drafts", "draft_limit"},
    "steps/runner": {"choice_index", "finish_reason", "logprobs", "thinking_state"},
}
NO_REQUESTS = {"self", "proposals", "wider"}
CHANGES = {"append", "clear", "extend", "insert", "pop", "remove", "update"}  # of lists and dicts


def fields_written(path: Path, fields: set[str]) -> set[str]:
    """Fields of requests that a file assigns, or whose lists and dicts it changes.

    In request.py these are those of `self`; elsewhere those of all else but tables, which have
    columns of such names.
    """

    def field_of(node: ast.AST) -> str:
        while isinstance(node, ast.Subscript):
            node = node.value
        if not isinstance(node, ast.Attribute) or node.attr not in fields:
            return ""
        name = ast.unparse(node.value).rpartition(".")[2]
        is_ours = name == "self" if path.name == "request.py" else name not in NO_REQUESTS
        return node.attr if is_ours else ""

    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.Assign, ast.Delete)):
            for target in node.targets:
                parts = target.elts if isinstance(target, ast.Tuple) else [target]
                found.update(map(field_of, parts))
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
            found.add(field_of(node.target))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            found |= {field_of(node.func.value)} if node.func.attr in CHANGES else set()
    return found - {""}


def test_each_field_of_a_request_has_one_writer() -> None:
    """But for two that change hands: what a slot begins with, drafters or steps count on."""
    engine = PACKAGE / "engine"
    tree = ast.parse((engine / "request.py").read_text())
    (body,) = [n.body for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Request"]
    declared = [node.target for node in body if isinstance(node, ast.AnnAssign)]
    fields = {target.id for target in declared if isinstance(target, ast.Name)}
    assert {"token_ids", "pages", "slot", "draft_stages", "error"} < fields
    written: dict[str, set[str]] = {}
    for path in sources(engine, ".py"):
        name = relative(path).removeprefix("python/specops/engine/").removesuffix(".py")
        if name.startswith("drafters/") and name != "drafters/drafting":
            name = "drafters"
        written[name] = written.get(name, set()) | fields_written(path, fields)
    found = {name: written[name] - OTHERS.get(name, set()) for name in written}
    assert {name: own for name, own in found.items() if own} == WRITERS
    assert all(others <= written[name] for name, others in OTHERS.items())


def test_the_engine_imports_without_what_is_optional() -> None:
    code = f"""
import sys
for name in {SERVER_STACK + OPTIONAL!r}:
    sys.modules[name] = None  # an import of it now fails
import specops.engine
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_a_server_reads_nothing_of_an_engine() -> None:
    """No name in server/ stands for one; and its process need not load torch."""
    for path in sources(PACKAGE / "server", ".py"):
        for node in ast.walk(ast.parse(path.read_text())):
            name = getattr(node, "id", getattr(node, "attr", getattr(node, "arg", None)))
            assert name not in ("engine", "_engine", "Engine"), path
    code = "import sys; sys.modules['torch'] = None; import specops.server, specops.cli.serve"
    code += "; import specops.service.process"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 or "No module named 'fastapi'" in done.stderr, done.stderr


def circles(modules: dict[str, set[str]]) -> list[str]:
    """The modules that are left when whatever imports nothing else of them is taken away."""
    left = {name: of & modules.keys() - {name} for name, of in modules.items()}
    while free := {name for name, of in left.items() if not of}:
        left = {name: of - free for name, of in left.items() if name not in free}
    return sorted(left)


def test_benches_and_tools_import_in_no_circle() -> None:
    """tools/gpu_check runs benches, and these ask tools/cuda_toolkit.py where nvcc is."""
    modules: dict[str, set[str]] = {}
    for path in [*sources(ROOT / "bench", ".py"), *sources(ROOT / "tools", ".py")]:
        parts = path.relative_to(ROOT).with_suffix("").parts
        if ".venv" in parts or "work" in parts:
            continue
        name = ".".join(parts).removesuffix(".__init__")
        names = imports(path)
        modules[name] = names | {found.rpartition(".")[0] for found in names}
    assert len(modules) > 40
    assert circles(modules) == []
    assert circles({"a": {"b"}, "b": {"a"}, "c": {"a"}, "d": set()}) == ["a", "b", "c"]
