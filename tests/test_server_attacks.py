# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402  (where the server's packages are missing, nothing else is imported)
"""Small runs of `make -C tools attacks`: every attack runs and breaks nothing."""

import pytest

for name in ("fastapi", "uvicorn", "pydantic", "prometheus_client", "jinja2"):
    pytest.importorskip(name)

import server_attacks
from attackers import ATTACKS, Sizes
from specops.api.config import BUNDLED_MODEL

pytestmark = pytest.mark.ci

SMALL = Sizes(
    words=3000,
    ids=6000,
    choices=16,
    sockets=20,
    half_open=100,
    streams=12,
    clients=2,
    body=5 << 20,
    tokens=16,
    prompt=100,
    one_prompt=90,
)
# Expected outcomes of each attack
EXPECTED = {
    "bad_words": {"400"},
    "long_ids": {"400"},
    "many_choices": {"200"},
    "trickling": {"open"},
    "half_open": {"closed", "open"},
    # lost if the system resets the connection because of unread data
    "big_heads": {"400", "closed"},
    "broken_uploads": {"left"},
    "huge_bodies": {"413", "closed"},  # as with big_heads
    "announced_bodies": {"413"},
    "connect_send_close": {"left"},
    "fresh_prompts": {"200"},
    "prompt_logprobs": {"200"},
    "one_prompt_after_another": {"200"},
    "one_scored_prompt_after_another": {"200"},
    "forwarded_for": {"200"},
    "leaving_streams": {"200", "left", "read"},
    "ambiguous_grammars": {"200"},
}


@pytest.mark.parametrize(
    "names",
    [list(ATTACKS), ["bad_words", "half_open", "huge_bodies", "leaving_streams"]],
    ids=["all", "some"],
)
@pytest.mark.fast("some")
@pytest.mark.skipif(
    not (BUNDLED_MODEL / "model.safetensors").is_file(), reason="the bundled model is not there"
)
def test_attacks_break_nothing(names: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    wrong = server_attacks.run(
        seconds=0.5,
        stream_seconds=1.0,
        rounds=1,
        names=names,
        sizes=SMALL,
        options=["--num-threads", "1", "--max-connections", "80"],
    )
    out = capsys.readouterr().out
    assert wrong == [], out
    assert set(EXPECTED) == set(ATTACKS)
    for name in names:
        (row,) = [line for line in out.splitlines() if line.startswith(f"| {name} |")][:1]
        got = {pair.split()[1] for pair in row.split("|")[-2].split(", ")}
        assert got <= EXPECTED[name] and got, row
    assert "resident MB" in out
