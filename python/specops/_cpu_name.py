# SPDX-License-Identifier: Apache-2.0
"""Name of the CPU, under which measurements are stored. Imports no compiled code."""

import platform
import re
from pathlib import Path


def cpu_name() -> str:
    """Return the model of this machine's CPU, such as "AMD EPYC family 25"."""
    file = Path("/proc/cpuinfo")
    return name_in(file.read_text()) if file.exists() else platform.processor()


def name_in(cpuinfo: str) -> str:
    """Return the name of the first CPU in the text of /proc/cpuinfo."""
    first = cpuinfo.partition("\n\n")[0]
    said: dict[str, str] = dict(re.findall(r"^(.*?)\s*: (.*)$", first, re.MULTILINE))
    if "CPU part" in said:  # ARM has numbers instead of a name
        return f"ARM {said.get('CPU implementer')} part {said['CPU part']}"
    name = said.get("model name", platform.processor())
    if "cpu family" in said and not re.search("[0-9]", name.partition("@")[0]):
        name += f" family {said['cpu family']}"  # many generations share the name
    return name
