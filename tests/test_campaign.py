# SPDX-License-Identifier: Apache-2.0
"""The campaign of random engines still runs: one round of the many that `make campaign` has."""

import engine_campaign
import pytest
import specops


def test_a_round_finds_no_difference(capsys: pytest.CaptureFixture[str]) -> None:
    isa, threads = specops.get_isa(), specops.runtime.get_num_threads()
    try:
        assert engine_campaign.main(["--rounds", "1"]) == 0
    finally:
        specops.set_isa(isa)
        specops.set_num_threads(threads)
    assert "48 outputs" in capsys.readouterr().out
