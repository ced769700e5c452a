# SPDX-License-Identifier: Apache-2.0
"""Rules for the text of device code and where they apply. The interpreter relies on them."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path


@dataclass(frozen=True)
class Rule:
    """A pattern that only a few files may contain."""

    pattern: str
    allowed: tuple[str, ...]
    why: str


RULES = (
    Rule(
        r"\basm\b|__asm",
        ("common/ptx.cuh", "simt/*", "common/pool.h", "gemm/*_cpu.h"),
        "inline assembly of device code lives in common/ptx.cuh",
    ),
    Rule(r"<<<", (), "kernels are started by launch() of common/launch.cuh"),
    Rule(r"\bcudaLaunch\w+", ("common/launch.cuh",), "kernels are started by launch()"),
    Rule(
        r"\b__shared__\b",
        ("common/device.cuh", "simt/*"),
        "shared memory is dynamic: shared_memory() of common/device.cuh",
    ),
    Rule(r"\b__CUDA_ARCH\w*", ("common/*",), "architectures are told apart in common/ only"),
    Rule(
        r"#\s*include\s*[<\"](cuda|cub/|thrust/|cooperative_groups|mma\.h|nv/)",
        ("common/*",),
        "common/device.cuh is the only way to CUDA",
    ),
    Rule(r"\b__activemask\b", ("simt/*",), "a warp collective names its lanes"),
)


def code_lines(text: str) -> list[str]:
    """Return the lines of a C++ file without its comments."""

    def blank(match: re.Match[str]) -> str:
        return match[0] if match[0][0] in "\"'" else "\n" * match[0].count("\n")

    comment_or_text = r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"' + r"|'(?:\\.|[^'\\\n])'"
    return re.sub(comment_or_text, blank, text, flags=re.DOTALL).split("\n")


def violations(csrc: Path) -> Iterator[str]:
    """Yield every violation in the headers and CUDA files below `csrc`."""
    for path in sorted(csrc.rglob("*")):
        if path.suffix not in (".cu", ".cuh", ".h"):
            continue
        name = path.relative_to(csrc).as_posix()
        for number, line in enumerate(code_lines(path.read_text()), 1):
            for rule in RULES:
                if any(fnmatchcase(name, pattern) for pattern in rule.allowed):
                    continue
                if re.search(rule.pattern, line):
                    yield f"csrc/{name}:{number}: {rule.why}: {line.strip()}"
