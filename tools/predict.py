# SPDX-License-Identifier: Apache-2.0
"""`python -m tools.predict`: update docs/predictions.md from the meter's results in build/gates.

    time = launch_us + code_us + item_us x (1 + other waves x exposed)
           + bytes / min(read, cap x slots used) + folds

Caps are the meter's (docs/meter.md), in bytes that an SM streams per cycle; a card is its read
bandwidth, its SMs and their clock. All other assumptions are in the document, with their sources.
After changing a kernel, update them there, and run `make gates` and this.
"""

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.cuda_toolkit import ROOT
from tools.predictions import (
    ASSUMED,
    BYTES,
    CAPS,
    DOCUMENT,
    PREDICTIONS,
    Card,
    Prediction,
    read_cards,
    read_numbers,
    rows_for,
    rows_for_numbers,
    with_rows,
)

ARCH = "90a"
KV_HEADS, TOKEN_BYTES, CHUNK_TOKENS, CHUNK_LEAVES = 8, 4096, 2048, 8
HEAD_DIM, TILE_ROWS = 128, 64
LOW_ROWS = 32  # tiles up to this many rows let an SM hold more blocks
LEAST_SHARE = 2 / 3  # minimum time of a partial wave of these tiles, relative to a whole wave
START_SHARE = 3 / 128  # fixed cost of each unit, relative to the time of a whole chunk
LOADS = {
    "b1.4k": (1, 4096),
    "b1.32k": (1, 32768),
    "b8.4k": (8, 4096),
    "b32.4k": (32, 4096),
    "b8.32k": (8, 32768),
}
VERIFY_ROWS, VOCAB = 1280, 128256

# Caches by the loop that reads them, and the bytes per token and KV head.
CACHES = {
    "bf16": ("attention {}", 2 * 2 * HEAD_DIM),
    "fp8": ("fp8 {} rows", 2 * (HEAD_DIM + 4)),
    "int8": ("int8 {} rows", 2 * (HEAD_DIM + 4)),
}
CACHE_CARDS = ("H200", "H100")

# Loops that the predictions use, by their name in the table of caps: kernel and unit of work, whose
# number goes into the name.
LOOPS = {
    "attention {}": (
        r"append_attention_kernel<bfloat16, 128\b.*>",
        r"tile of 64 tokens, (\d+) rows",
    ),
    "latents {}": (
        r"append_attention_kernel<bfloat16, 576\b.*>",
        r"tile of 32 tokens, (\d+) rows",
    ),
    "int8 {} rows": (
        r"append_8bit_attention_kernel<bfloat16, KvInt8, 128\b.*>",
        r"tile of 64 tokens, (\d+) rows",
    ),
    "fp8 {} rows": (
        r"append_8bit_attention_kernel<bfloat16, KvE4M3, 128\b.*>",
        r"tile of 64 tokens, (\d+) rows",
    ),
    "verify {} sums": (
        r"verify_kernel<bfloat16, false, false\b.*>",
        r"leaf of 2,048 bytes, (\d) sums",
    ),
}


def caps_of(meters: Sequence[Path], before: Mapping[str, float]) -> dict[str, float]:
    """Return the replayed bytes per SM cycle of each loop; of several copies, the slowest.

    Args:
        meters: files of the meter.
        before: caps of kernels that are not in these files.

    Raises:
        ValueError: a kernel was metered in units unknown to the predictions.
    """
    loops = [loop for path in meters for loop in json.loads(path.read_text())["measured"]]
    caps = dict(before)
    for name, (kernel, unit) in LOOPS.items():
        of_kernel = [
            loop for loop in loops if re.fullmatch(kernel, loop["kernel"]) and loop["arch"] == ARCH
        ]
        found: dict[str, float] = {}
        for loop in of_kernel:
            if match := re.fullmatch(unit, loop["unit"]):
                key = name.format(match[1])
                found[key] = min(_cap(loop), found.get(key, math.inf))
        if of_kernel and not found:
            raise ValueError(f"predict: no loop of {kernel} is metered by the {unit}")
        if found:
            kind = name.split()[0]
            caps = {key: cap for key, cap in caps.items() if key.split()[0] != kind} | found
    return dict(sorted(caps.items()))


def _cap(loop: Mapping[str, Any]) -> float:
    return float(loop["amount"] / loop["replayed"])


@dataclass(frozen=True)
class Model:
    """Times in microseconds on a card, from the assumptions and the meter's caps."""

    card: Card
    assumed: Mapping[str, float]
    caps: Mapping[str, float]

    def slots(self, rows: int = TILE_ROWS) -> int:
        """Return the number of resident blocks, for kernels with tiles of `rows` rows."""
        low = " low" if rows <= LOW_ROWS else ""
        return int(self.assumed[f"blocks_per_sm{low}"]) * self.card.sms

    def attention(self, load: str, group: int, q_len: int) -> float:
        """Return the time of `append_attention` in bf16, head_dim 128."""
        batch, kv_len = LOADS[load]
        rows = group * q_len
        chunks = math.ceil(kv_len / CHUNK_TOKENS)
        parts, waves, used = self.cut(batch * KV_HEADS * chunks, rows)
        # Chunks are folded side by side, the first part of each as one state; then the sequence.
        leaves = CHUNK_LEAVES - CHUNK_LEAVES // parts + 1 if parts > 1 else 0
        cap = self.cap_of_rows(rows)
        # Two chunks that are both split meet once, and are folded by one block.
        meets_once = parts > 1 and waves == 1 and chunks == 2
        return (
            self.assumed["launch_us"]
            + self.assumed["code_us"]
            + self.assumed["item_us"] * (1 + (waves - 1) * self.exposed(cap, rows))
            + self.streaming(batch * kv_len * TOKEN_BYTES, cap * used)
            + self.fold(leaves, rows)
            + self.fold(chunks if chunks > 1 else 0, rows)
            - (self.assumed["arrival_us"] if meets_once else 0.0)
        )

    def exposed(self, cap: float, rows: int = TILE_ROWS) -> float:
        """Return the fraction of a slot's idle time that the SM's other blocks do not hide.

        The other blocks go on streaming while a slot does not.
        """
        blocks = self.slots(rows) // self.card.sms
        cap_tb_s = cap * self.card.sms * self.card.ghz / 1000
        wanted = min(cap_tb_s, self.card.read_tb_s)
        return max(0.0, 1.0 - (blocks - 1) / blocks * cap_tb_s / wanted)

    def fold(self, states: int, rows: int) -> float:
        """Return one block's time to fold states: eight at a time, 256 quads of each at once."""
        quads = min(rows, TILE_ROWS) * HEAD_DIM // 4
        steps = math.ceil(states / CHUNK_LEAVES)
        arrival = self.assumed["arrival_us"] if states > 0 else 0.0
        return arrival + steps * (
            self.assumed["factors_us"] + math.ceil(quads / 256) * self.assumed["load_us"]
        )

    def cut(self, units: int, rows: int) -> tuple[int, int, float]:
        """Return the parts per chunk, the waves they run in, and the fraction of slots used."""
        slots = self.slots(rows)

        def waves(parts: int) -> int:
            return math.ceil(units * parts / slots)

        def time(parts: int) -> float:
            whole, rest = divmod(units * parts, slots)
            least = LEAST_SHARE if rows <= LOW_ROWS else 1.0
            waves = whole + (max(rest / slots, least) if rest else 0.0)
            return waves * (1 / parts + START_SHARE)

        choices = [parts for parts in (1, 2, 4, CHUNK_LEAVES)]
        # The least time in waves of whole chunks; on ties, the fewest parts.
        parts = min(choices, key=lambda parts: (time(parts), parts))
        return parts, waves(parts), units * parts / (waves(parts) * slots)

    def cap_of_rows(self, rows: int) -> float:
        """Return the cap of the smallest form of the kernel that fits `rows` rows."""
        forms = {
            int(name.split()[1]): cap for name, cap in self.caps.items() if "attention" in name
        }
        fitting = [form for form in forms if form >= rows]
        return forms[min(fitting)] if fitting else forms[max(forms)] * max(forms) / rows

    def streaming(self, num_bytes: float, cap: float) -> float:
        """Return the time at the loop's cap or the memory bandwidth, whichever is lower."""
        cap_tb_s = cap * self.card.sms * self.card.ghz / 1000
        return num_bytes * 1e-6 / min(self.card.read_tb_s, cap_tb_s)

    def verify(self, sums: int) -> float:
        """Return the time for 1,280 rows of 128,256 logits in bf16."""
        waves = math.ceil(VERIFY_ROWS / self.slots())
        cap = self.caps[f"verify {sums} sums"]
        return (
            self.assumed["launch_us"]
            + self.assumed["row_us"] * (1 + (waves - 1) * self.exposed(cap))
            + self.streaming(2 * VERIFY_ROWS * VOCAB, cap)
        )


# The cards whose machine code the meter reads.
MODELLED = ("H200", "H100")


def predictions_of(
    cards: Sequence[Card], assumed: Mapping[str, float], caps: Mapping[str, float]
) -> list[Prediction]:
    """Return all predictions, goal by goal."""
    models = {card.name: Model(card, assumed, caps) for card in cards if card.name in MODELLED}

    def said(goal: str, figure: str, unit: str, of: Callable[[Model], float]) -> Prediction:
        return Prediction(goal, figure, unit, {name: of(model) for name, model in models.items()})

    def both(goal: str, figure: str, name: str) -> Prediction:
        return said(goal, figure, "ratio", lambda model: model.assumed[name])

    rows = [said(*row) for row in _attention_rows()]
    for load in LOADS:
        # The peers' times were measured on one card.
        ours, theirs = models["H200"].attention(load, 4, 1), assumed[f"peer_us {load}"]
        figure = f"attention_peers.{load}.g4.q1"
        rows.append(Prediction("G4", figure, "ratio", {"H200": theirs / ours}))
    rows += [
        both("G5", "cascade.b32.8k.q1.peers", "over_multi_level"),
        said("G6", "sampling.verify.bf16.b256.greedy", "us", lambda model: model.verify(0)),
        both("G7", "recorded.verify.bf16.rejection", "recorded_over_greedy"),
        both("G8", "exactness.b32.4k.q1", "leaves_over_none"),
        both("G9", "linear.layer.m1.vs_torch", "over_mm m1"),
        both("G9", "linear.layer.m16.vs_torch", "over_mm m16"),
    ]
    others = {card.name: assumed["share_elsewhere"] for card in cards if card.name not in MODELLED}
    return [*rows, Prediction("G10", "attention.b32.4k.g4.q1", "ratio", others)]


def _attention_rows() -> list[tuple[str, str, str, Callable[[Model], float]]]:
    def us(
        goal: str, load: str, group: int, q_len: int
    ) -> tuple[str, str, str, Callable[[Model], float]]:
        figure = f"attention.{load}.g{group}.q{q_len}"
        return goal, figure, "us", lambda model: model.attention(load, group, q_len)

    def over(load: str, group: int) -> tuple[str, str, str, Callable[[Model], float]]:
        figure = f"attention.{load}.g{group}.q8_over_q1"
        return (
            *("G2", figure, "ratio"),
            lambda model: model.attention(load, group, 8) / model.attention(load, group, 1),
        )

    big = [load for load in LOADS if load != "b1.4k"]
    return [
        *(us("G1", load, group, q_len) for load in big for group in (4, 8) for q_len in (1, 8)),
        *(over(load, group) for load in big for group in (4, 8)),
        *(us("G3", "b1.4k", 4, q_len) for q_len in (1, 8)),
    ]


def tokens_per_ns(card: Card, caps: Mapping[str, float], cache: str, rows: int) -> float:
    """Return the tokens of a KV head that `append_attention`'s loop processes per nanosecond."""
    loop, token_bytes = CACHES[cache]
    cap_tb_s = caps[loop.format(rows)] * card.sms * card.ghz / 1000
    return 1000 * min(card.read_tb_s, cap_tb_s) / token_bytes


def _cache_rows(cards: Sequence[Card], caps: Mapping[str, float]) -> list[list[str]]:
    """Return the table of caches: tokens on each card, and the ratio to bf16."""
    rows = []
    for cache in CACHES:
        for height in (16, 32, 64):
            if {CACHES[one][0].format(height) for one in (cache, "bf16")} - set(caps):
                continue  # no kernel has tiles of this many rows
            cells = [cache, str(height)]
            for card in cards:
                tokens, of_bf16 = (tokens_per_ns(card, caps, c, height) for c in (cache, "bf16"))
                cells += [f"{tokens:.3g}", f"{tokens / of_bf16:.2f}"]
            rows.append(cells)
    return rows


def renewed(text: str, meters: Sequence[Path]) -> str:
    """Return the document with new caps, if any, and updated predictions."""
    caps = caps_of(meters, read_numbers(text, CAPS))
    text = with_rows(text, CAPS, rows_for_numbers(caps))
    # Use the rounded numbers of the document, so that a reader can check the results.
    cards = read_cards(text)
    caps = read_numbers(text, CAPS)
    of_caches = [card for card in cards if card.name in CACHE_CARDS]
    text = with_rows(text, BYTES, _cache_rows(of_caches, caps))
    said = predictions_of(cards, read_numbers(text, ASSUMED), caps)
    return with_rows(text, PREDICTIONS, rows_for(said, cards))


def main(arguments: Sequence[str] | None = None) -> int:
    """Rewrite the document."""
    parser = argparse.ArgumentParser(prog="python -m tools.predict", description=__doc__)
    parser.add_argument("--meter", type=Path, default=ROOT / "build" / "gates")
    asked = parser.parse_args(arguments)
    meters = sorted(asked.meter.glob(f"sm_{ARCH}/*/meter.json"))
    text = renewed(DOCUMENT.read_text(), meters)
    DOCUMENT.write_text(text)
    print(f"{DOCUMENT.relative_to(ROOT)} renewed from {len(meters)} files of the meter")
    return 0


if __name__ == "__main__":
    sys.exit(main())
