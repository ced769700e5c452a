# SPDX-License-Identifier: Apache-2.0
"""A few rounds of `make -C tools campaign`, which compares random engines, for each family."""

from collections.abc import Iterator

import engine_campaign
import pytest
import specops

KINDS = ("none", "wint8", "wint4")


@pytest.fixture(autouse=True)
def machine() -> Iterator[None]:
    """As it was before: a round chooses an instruction set and threads."""
    isa, threads = specops.get_isa(), specops.runtime.get_num_threads()
    yield
    specops.set_isa(isa)
    specops.set_num_threads(threads)


def test_a_round_finds_no_difference(capsys: pytest.CaptureFixture[str]) -> None:
    assert engine_campaign.main(["--rounds", "1"]) == 0
    assert "48 outputs" in capsys.readouterr().out


@pytest.mark.parametrize(
    "family,kind", [("glm4_moe", "wint4"), ("ernie4_5_moe", "wint8"), ("deepseek_v3", "none")]
)
def test_rounds_of_mixtures(family: str, kind: str) -> None:
    options = ["--rounds", "1", "--family", family, "--quantization", kind]
    assert engine_campaign.main(options) == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", [*engine_campaign.FAMILIES, *engine_campaign.HEAD_FAMILIES])
def test_three_hundred_requests(family: str, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--rounds", "7", "--seed", "1", "--family", family, "--quantization", kind]
    assert engine_campaign.main(options) == 0
    told = capsys.readouterr().out
    assert "336 outputs" in told
    with capsys.disabled():
        print(f"\n{family} {kind}: {told.splitlines()[-1]}")
