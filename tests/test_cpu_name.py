# SPDX-License-Identifier: Apache-2.0
"""Names of CPU models, under which figures and cost tables are stored."""

from pathlib import Path

import pytest
from specops import runtime
from specops._cpu_name import name_in

INTEL = "processor\t: 0\ncpu family\t: 6\nmodel name\t: Intel(R) Xeon(R) Gold 6342 CPU @ 2.80GHz"


@pytest.mark.parametrize(
    ("cpuinfo", "name"),
    [
        ("cpu family\t: 26\nmodel name\t: AMD EPYC\n\ncpu family\t: 25", "AMD EPYC family 26"),
        ("cpu family\t: 6\nmodel name\t: Xeon @ 2.20GHz\n", "Xeon @ 2.20GHz family 6"),
        (INTEL, "Intel(R) Xeon(R) Gold 6342 CPU @ 2.80GHz"),
        ("CPU implementer\t: 0x41\nCPU part\t: 0xd40\n", "ARM 0x41 part 0xd40"),
        ("flags\t\t:\nmodel name\t: EPYC 9R14\n", "EPYC 9R14"),
    ],
)
def test_cpu_name_identifies_the_model(cpuinfo: str, name: str) -> None:
    assert name_in(cpuinfo) == name


def test_cpu_of_this_machine_has_a_name() -> None:
    assert runtime.get_cpu_name() or not Path("/proc/cpuinfo").exists()
