# SPDX-License-Identifier: Apache-2.0
"""Single rounds of the campaigns of random engines and of audits (`make -C tools campaign`)."""

import audit_campaign
import engine_campaign
import pytest

KINDS = ("none", "wint8", "wint4")


def test_round_finds_no_difference(capsys: pytest.CaptureFixture[str]) -> None:
    assert engine_campaign.main(["--rounds", "1"]) == 0
    assert "48 outputs" in capsys.readouterr().out


@pytest.mark.parametrize(
    "family,kind", [("glm4_moe", "wint4"), ("ernie4_5_moe", "wint8"), ("deepseek_v3", "none")]
)
def test_quantized_mixtures_have_no_difference(family: str, kind: str) -> None:
    options = ["--rounds", "1", "--family", family, "--quantization", kind]
    assert engine_campaign.main(options) == 0


@pytest.mark.parametrize("family", ["qwen3_5", "gpt_oss", "gemma3 with heads", "glm4_moe"])
@pytest.mark.fast(ci=("qwen3_5",))
def test_audits_of_random_answers_are_right(
    family: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert audit_campaign.main(["--rounds", "2", "--family", family]) == 0
    assert "0 false alarms; 72 changes, 0 wrong verdicts" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", [*engine_campaign.FAMILIES, *engine_campaign.HEAD_FAMILIES])
def test_long_campaign_finds_no_difference(
    family: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--rounds", "3", "--seed", "1", "--family", family, "--quantization", kind]
    assert engine_campaign.main(options) == 0
    output = capsys.readouterr().out
    assert "144 outputs" in output
    with capsys.disabled():
        print(f"\n{family} {kind}: {output.splitlines()[-1]}")
