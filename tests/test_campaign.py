# SPDX-License-Identifier: Apache-2.0
"""The campaign of random engines still runs: a round of it, of the half hour that `make campaign` has."""

import engine_campaign
import pytest


def test_a_round_finds_no_difference(capsys: pytest.CaptureFixture[str]) -> None:
    assert engine_campaign.main(["--rounds", "1"]) == 0
    assert "48 outputs" in capsys.readouterr().out
