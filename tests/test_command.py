# SPDX-License-Identifier: Apache-2.0
"""The command `specops`: fast help, all launchers, and clear errors."""

import json
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import specops
from specops.cli import COMMANDS, byte_size, finite, main, shown_bytes
from specops.cli.options import lora_module
from specops.engine import EngineConfig, SpeculativeConfig

ROOT = Path(__file__).resolve().parent.parent
EXTRA = ("aiohttp", "rich")


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT / "python")}
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)


def require_cli_extra() -> None:
    """Skip the test if specops[cli] is not installed."""
    for package in EXTRA:
        pytest.importorskip(package)


def test_help_is_fast() -> None:
    """Importing torch alone takes two seconds."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = python("-m", "specops", "--help")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5
    for name, command in COMMANDS.items():
        assert f"  {name} " in done.stdout and command.summary in done.stdout


@pytest.mark.parametrize(
    "module", ["specops", "specops.cli", "specops.cli.plot", "specops.cli.lossless.command"]
)
def test_light_modules_import_neither_torch_nor_numpy(module: str) -> None:
    code = f"import sys, {module}; print('torch' in sys.modules, 'numpy' in sys.modules)"
    assert python("-c", code).stdout == "False False\n"


def test_bench_imports_no_torch() -> None:
    require_cli_extra()
    code = "import sys, specops.cli.bench; print('torch' in sys.modules)"
    assert python("-c", code).stdout == "False\n"


@pytest.mark.ci
def test_package_exports_all_its_names() -> None:
    assert set(specops.__all__) <= set(dir(specops))
    for name in specops.__all__:
        assert getattr(specops, name).__module__.startswith("specops")
    code = "import specops; print(specops.runtime.get_isa() == specops.get_isa()); "
    code += "print(specops.sampling.verify.__name__, 'moe' in dir(specops))"
    assert python("-c", code).stdout == "True\nverify True\n"
    with pytest.raises(AttributeError, match="module 'specops' has no attribute 'nothing'"):
        specops.nothing  # noqa: B018


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if name == "bench":
        require_cli_extra()
    with pytest.raises(SystemExit) as exit:
        main([name, "--help"])
    assert exit.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: specops {name} ")


def documented_commands() -> list[list[str]]:
    """Return the arguments of every `specops` command in the documents' shell blocks."""
    texts = [path.read_text() for path in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]]
    blocks = re.findall(r"^```bash\n(.*?)^```", "".join(texts), re.MULTILINE | re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [
        shlex.split(re.split(r" [<|>] ", found[1])[0], comments=True)
        for line in lines
        if (found := re.match(r"(?:\S*/)?specops (.*)", line)) is not None
    ]


PARSERS = {
    "serve": ("specops.cli.serve", "_parser"),
    "complete": ("specops.cli.complete", "_parser"),
    "verify-exactness": ("specops.cli.exactness", "_parser"),
    "verify-exactness --url": ("specops.cli.lossless.command", "_parser"),
    "audit": ("specops.cli.audit", "_parser"),
    "models": ("specops.cli.models", "_parser"),
    "contract": ("specops.cli.serve", "_contract_parser"),
    "bench": ("specops.cli.bench", "_parser"),
    "plot": ("specops.cli.plot", "_parser"),
}


@pytest.mark.parametrize("words", documented_commands(), ids=" ".join)
def test_documented_commands_parse(words: list[str]) -> None:
    if words[0] == "bench":
        require_cli_extra()
    asks_server = words[:2] == ["verify-exactness", "--url"]
    module, name = PARSERS["verify-exactness --url" if asks_server else words[0]]
    getattr(import_module(module), name)("specops").parse_args(words[1:])


@pytest.mark.parametrize("name", PARSERS)
def test_numeric_options_refuse_nan_and_infinity(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if name == "bench":
        require_cli_extra()
    module, function = PARSERS[name]
    parser = getattr(import_module(module), function)("specops")
    # type=float would accept NaN, which passes every comparison with a bound.
    assert {one.type for one in parser._actions} <= {
        None,
        int,
        finite,
        byte_size,
        str.lower,
        lora_module,
    }
    numbers = (int, finite, byte_size)
    for action in parser._actions:
        for text in ("nan", "inf", "-Infinity", "1e999") if action.type in numbers else ():
            with pytest.raises(SystemExit) as exit:
                parser.parse_args([f"{action.option_strings[0]}={text}"])
            assert exit.value.code == 2
            assert f"argument {'/'.join(action.option_strings)}: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "text,size",
    [("0", 0), ("68719476736", 1 << 36), ("64G", 1 << 36), ("512m", 1 << 29), ("3KiB", 3 << 10),
     ("1TB", 1 << 40), (" 7 ", 7), ("-1", -1)],
)  # fmt: skip
def test_sizes_may_have_units(text: str, size: int) -> None:
    assert byte_size(text) == size == byte_size(shown_bytes(size))


def test_options_of_serve_are_in_the_groups_of_the_page() -> None:
    """The table of docs/server.md has the groups of --help, in its order."""
    parser = import_module("specops.cli.serve")._parser()
    table = (ROOT / "docs" / "server.md").read_text().split("| --- | --- |\n")[1].split("\n\n")[0]
    rows = [row.strip("| ").split(" | ") for row in table.splitlines()]
    groups = [
        one for one in parser._action_groups if one.title not in ("options", "positional arguments")
    ]
    assert [re.sub(r"\[(.*?)\]\(.*?\)", r"\1", title) for _, title in rows] == [
        one.title for one in groups
    ]
    for (options, title), one in zip(rows, groups, strict=True):
        flags = {flag for action in one._group_actions for flag in action.option_strings}
        in_row = {flag.replace("[no-]", "") for flag in re.findall(r"`(--[a-z\[\]-]+)`", options)}
        assert in_row == {flag for flag in flags if not flag.startswith("--no-")}, title
    assert all(action.help for action in parser._actions)


def test_choices_of_serve_ignore_case() -> None:
    parser = import_module("specops.cli.serve")._parser()
    chosen = [one for one in parser._actions if one.choices and one.dest != "page_size"]
    assert {"dtype", "quantization", "quantize_head", "role"} < {one.dest for one in chosen}
    for action in chosen:
        for value in action.choices:
            args = parser.parse_args([action.option_strings[0], value.upper()])
            assert getattr(args, action.dest) == value
    for value in ("WINT4", "Wint8", "wint4"):
        drafter = {"method": "MTP", "quantization": value, "verify_strategy": "TARGET_MATCH"}
        found = SpeculativeConfig.from_dict(drafter)
        assert (found.method, found.verify_strategy) == ("mtp", "target_match")
        assert found.options["mtp"].quantization == value.lower()
        assert EngineConfig(quantization=value).quantization == value.lower()


DRAFTS = "speculative_config"


@pytest.mark.parametrize(
    "options,message",
    [
        (["--kv-transport", "nixl"], "kv_transport has no effect without role"),
        (["--kv-host", "0.0.0.0"], "kv_host has no effect without role"),
        (["--kv-port", "5"], "kv_port has no effect without role"),
        (["--kv-peers", "localhost"], "kv_peers has no effect without role"),
        (["--kv-lease-seconds", "-1"], "kv_lease_seconds has no effect without role"),
        (["--kv-lease-bytes", "5"], "kv_lease_bytes has no effect without role"),
        (["--session-bytes", "1G"], "session_bytes has no effect without session_dir"),
        (["--scheduler-host", "a"], "scheduler_host has no effect without scheduler_name"),
        (["--scheduler-port", "0"], "scheduler_port has no effect without scheduler_name"),
        (["--scheduler-password", "a"], "scheduler_password has no effect without scheduler_name"),
        (["--scheduler-topic", "a"], "scheduler_topic has no effect without scheduler_name"),
        (["--role", "mixed", "--scheduler-ttl", "-9"], "scheduler_ttl has no effect"),
        ({"method": "ngram", "quantization": "wint4"}, f"{DRAFTS}.quantization needs method 'mtp'"),
        ({"method": "suffix", "num_speculative_tokens": 4, "num_model_steps": 2},
         f"{DRAFTS}.num_model_steps needs a method that runs a model, got 'suffix'"),
        (
            {"method": "ngram", "suffix_decoding_max_tree_depth": 5},
            f"{DRAFTS}.suffix_decoding_max_tree_depth needs method 'suffix', got 'ngram'",
        ),
        ({"method": "suffix", "min_ngram_size": 1},
         f"{DRAFTS}.min_ngram_size needs method 'ngram', got 'suffix'"),
        ({"method": "mtp+ngram", "suffix_decoding_read_on": False},
         f"{DRAFTS}.suffix_decoding_read_on needs method 'suffix', got 'mtp+ngram'"),
    ],
)  # fmt: skip
def test_options_without_effect_are_refused(
    options: list[str] | dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--speculative-config", json.dumps(options)] if isinstance(options, dict) else options
    assert main(["serve", *words]) == 2
    assert f"specops: {message}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "config",
    [
        {"method": "ngram", "suffix_decoding_max_tree_depth": 64, "num_model_steps": 1},
        {"method": "mtp+suffix", "suffix_decoding_read_on": False},
        {"method": "ngram", "options": {"suffix": {"suffix_decoding_read_on": False}}},
        {"method": "ngram", "model": "modules", "quantization": "wint4"},  # for requests with mtp
        {"method": "mtp", "num_speculative_tokens": 4, "num_model_steps": 2},
        {"method": "naive", "num_speculative_tokens": 0},
    ],
)
def test_options_with_an_effect_or_at_their_defaults_are_accepted(config: dict[str, Any]) -> None:
    serve = import_module("specops.cli.serve")
    parser = serve._parser()
    words = ["--scheduler-port", "6379", "--kv-transport", "tcp", "--kv-lease-seconds", "120"]
    args = parser.parse_args([*words, "--speculative-config", json.dumps(config)])
    serve.require_effect(parser, args)
    serve.require_effective_drafts(serve.plain_settings(args))


def test_python_module_keeps_its_command_names(capsys: pytest.CaptureFixture[str]) -> None:
    engine = import_module("specops.cli.serve")
    for arguments, usage in (
        ([], "usage: python -m specops.engine ["),
        (["contract"], "usage: python -m specops.engine contract ["),
        (["verify-exactness"], "usage: python -m specops.engine verify-exactness ["),
    ):
        with pytest.raises(SystemExit):
            engine.main([*arguments, "--help"])
        assert capsys.readouterr().out.startswith(usage)


def test_contract_help_lists_only_options_that_change_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = import_module("specops.service.contract").OPTIONS
    with pytest.raises(SystemExit):
        main(["contract", "--help"])
    options_in_help = set(re.findall(r"--([a-z-]+)", capsys.readouterr().out))
    known = {"help", "config", "revision", *(name.replace("_", "-") for name in options)}
    assert options_in_help == known
    # Other options of `specops serve` are accepted, but no abbreviations.
    for command in ("contract", "complete", "verify-exactness"):
        with pytest.raises(SystemExit):
            main([command, "--num-thread=3"])
        mistake = "unrecognized arguments: --num-thread=3; did you mean --num-threads?"
        see = f"See specops {command} --help"
        assert capsys.readouterr().err == f"specops {command}: {mistake} {see}\n"
        with pytest.raises(SystemExit):
            main([command, "--threads-of-nobody"])
        assert f"--threads-of-nobody; see specops {command}" in capsys.readouterr().err
    assert main(["contract", "--device", "cpu", "--port", "1", "--max-num-seqs", "3"]) == 0


def test_contract_reads_a_config_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("yaml")
    engine = import_module("specops.cli.serve")
    options = ["--device", "cpu", "--dtype", "float32"]
    assert main(["contract", *options]) == 0
    ours = capsys.readouterr().out
    assert engine.main(["contract", *options]) == 0
    assert capsys.readouterr().out == ours
    file = tmp_path / "options.yaml"
    file.write_text("device: cpu\ndtype: float32\nport: 1234\n")
    assert main(["contract", "--config", str(file)]) == 0
    assert capsys.readouterr().out == ours
    assert json.loads(ours)["model"]["dtype"] == "float32"
    file.write_text("dtyp: float32\n")
    assert main(["contract", "--config", str(file)]) == 2
    assert "must hold names of flags, got 'dtyp'; the nearest is dtype" in capsys.readouterr().err


def test_terminals_are_told_that_pytorch_is_imported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = import_module("specops.cli.models")
    monkeypatch.setattr(module, "main", lambda *_: 0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert main(["models"]) == 0
    assert capsys.readouterr().err == "importing PyTorch...\r\x1b[K"


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"specops {specops.__version__}\n"


def test_help_is_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    alone = capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["--help"])
    assert alone.err == "" and alone.out == capsys.readouterr().out != ""


@pytest.mark.parametrize("arguments", [["nothing"], ["--nothing"]])
def test_unknown_arguments_exit_with_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert exit.value.code == 2
    assert capsys.readouterr().err.endswith("; see specops --help\n")


def raising(error: BaseException) -> Any:
    def run(*_: Any) -> int:
        raise error

    return run


@pytest.mark.parametrize("missing", EXTRA)
def test_missing_package_is_named(
    missing: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    require_cli_extra()
    for name in [name for name in sys.modules if name.startswith("specops.cli.")]:
        monkeypatch.delitem(sys.modules, name)
    for name in [name for name in sys.modules if name.split(".")[0] == missing]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    assert main(["bench"]) == 2
    assert capsys.readouterr().err == (
        f"specops: bench needs {missing}, which is not installed: pip install 'specops[cli]'\n"
    )


@pytest.mark.ci
def test_missing_kernels_are_reported(tmp_path: Path) -> None:
    """A clone has no kernels before `make`."""
    package = tmp_path / "specops"
    shutil.copytree(
        ROOT / "python" / "specops", package, ignore=shutil.ignore_patterns("*.so", "assets")
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "specops", "complete", "x"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 2
    assert done.stderr == (
        "specops: the kernels are not compiled: run `make setup`, or install the package with pip\n"
    )


@pytest.mark.ci
def test_interrupts_and_closed_pipes_print_no_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plot = import_module("specops.cli.plot")
    monkeypatch.setattr(plot, "main", raising(KeyboardInterrupt()))
    assert main(["plot"]) == 130
    assert capsys.readouterr().err == "\n"
    # The reader closes the pipe before the command writes.
    code = "import sys, specops.cli as c; sys.exit(c.main(['contract', '--device', 'cpu']))"
    shell = f'set -o pipefail; "{sys.executable}" -c "{code}" | true'
    environment = os.environ | {"PYTHONPATH": str(ROOT / "python")}
    command = ["bash", "-c", shell]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert "Traceback" not in done.stderr and done.returncode in (0, 1)


def test_installed_and_local_launchers_run_the_command(tmp_path: Path) -> None:
    project = (ROOT / "pyproject.toml").read_text()
    assert '[project.scripts]\nspecops = "specops.cli:main"\n' in project
    recipe = re.search(
        r"^\tprintf (.*) > \$\(BIN\)/specops$", (ROOT / "Makefile").read_text(), re.M
    )
    assert recipe is not None
    made = recipe[1].replace("$$", "$").replace("$(abspath $(BIN))", str(tmp_path))
    launcher = tmp_path / "specops"
    shell = ["bash", "-c", f"printf {made} > {launcher} && chmod +x {launcher}"]
    subprocess.run(shell, check=True)
    (tmp_path / "python").symlink_to(sys.executable)
    environment = os.environ | {"PYTHONPATH": str(ROOT / "python")}
    command = [str(launcher), "plot", "no such file"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 2
    assert done.stderr.startswith("specops: no such file cannot be read")


def test_prompt_files_are_validated(tmp_path: Path) -> None:
    from specops.cli.prompts import read_prompts

    file = tmp_path / "prompts"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match="must be UTF-8 text"):
        read_prompts(str(file))
    file.write_text('["a", 1]')
    with pytest.raises(
        ValueError, match="must hold prompts: a JSON list of strings, or one prompt per"
    ):
        read_prompts(str(file))
    file.write_text("a\n\nb\n")
    assert read_prompts(str(file)) == ["a", "b"]
