# SPDX-License-Identifier: Apache-2.0
"""docs/flags.md lists the options of `specops serve`."""

import pytest

pytest.importorskip("fastapi")

from tools.flag_reference import PAGE, document


def test_page_is_current() -> None:
    assert PAGE.read_text() == document(), "python -m tools.flag_reference writes it anew"
