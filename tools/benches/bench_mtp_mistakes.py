# SPDX-License-Identifier: Apache-2.0
"""The cost of each known mistake for the bundled model's drafts, on unseen library modules.

The texts and the two views are those of `tools.train.evaluate`, in fp32: chains after prefixes of
human text, judged by the target's own greedy continuation; and the steps of greedy continuations. A
mistake that matters at the edges of chunks or of shared prefixes is also judged by the chains right
after them. There is one module, so mistakes that need several are skipped.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from specops.engine import Engine, EngineConfig, SamplingParams, SpeculativeConfig
from specops.engine.models import MtpModules, Transformer, load_model, load_mtp

from bench.common import Bench, Figure
from tools.benches.mtp_decoding import PAGE_SIZE, Drafting, Mistake, Text, decode, drafts_along
from tools.train import corpus, export
from tools.train.chains import draft_chains
from tools.train.model import Model, rope_cos_sin
from tools.train.train import encode

DEPTH = 5
WIDTHS = (1, 3, 5)
CHUNKS = (64, 512)
BEHIND = 4  # rows after an edge that are judged separately


@dataclass(frozen=True)
class Sizes:
    """Amounts to measure."""

    window: int = 1024
    stride: int = 17
    prompt_tokens: int = 192
    new_tokens: int = 64


@dataclass(frozen=True)
class Case:
    """A mistake, and the rows in which it is made."""

    mistake: Mistake | None
    chunk: int | None = None  # distance between edges in rows
    shared: bool = False  # whether another prompt wrote the pages

    @property
    def name(self) -> str:
        """Name in figures."""
        name = "right" if self.mistake is None else self.mistake.name.lower()
        return name if self.chunk is None else f"{name}_{self.chunk}"

    @property
    def what(self) -> str:
        """Description for readers."""
        what = "no mistake" if self.mistake is None else self.mistake.value
        if self.chunk is None:
            return what
        every = "of" if self.mistake is Mistake.PREFIX_EMPTY else "every"
        return f"{what}, {every} {self.chunk} tokens"

    def edges(self, rows: int) -> list[int]:
        """Return where chunks, or shared pages, end in a text of `rows` rows."""
        if self.chunk is None:
            return []
        if self.mistake is Mistake.PREFIX_EMPTY:
            return [self.chunk]
        return list(range(self.chunk, rows, self.chunk))

    def judges(self, row: int) -> bool:
        """Return whether the mistake may change the chain from a row."""
        return self.mistake is not Mistake.PREFIX_EMPTY or row >= (self.chunk or 0)

    def is_near(self, row: int) -> bool:
        """Return whether a row comes right after the mistake, if it occurs in a few places only."""
        if self.mistake is Mistake.POSITION_0_MASKED:
            return 0 < row < BEHIND  # the first row is the same in all texts
        if self.chunk is None or row < self.chunk:
            return False
        if self.mistake is Mistake.PREFIX_EMPTY:
            return row < self.chunk + BEHIND
        return row % self.chunk < BEHIND


_AT_EDGES = (Mistake.CHUNK_TAIL_SAMPLED, Mistake.PLAIN_BLOCK_KEY, Mistake.PREFIX_EMPTY)
_IN_STEPS = (Mistake.ACCEPTED_NOT_RUN_AGAIN, Mistake.REJECTED_STAY)


def cases() -> Iterator[Case]:
    """Yield the cases, the correct one first."""
    yield Case(None)
    for mistake in Mistake:
        if mistake is Mistake.UNCHAINED:
            continue
        for chunk in CHUNKS if mistake in _AT_EDGES else (None,):
            shared = chunk is not None and mistake is not Mistake.CHUNK_TAIL_SAMPLED
            yield Case(mistake, chunk, shared)


class Chain(NamedTuple):
    """Drafts, and how many of them equal the target's own continuation."""

    drafts: list[int]
    kept: int


@dataclass(frozen=True)
class Chains:
    """A text, the rows that chains start from, and the target's continuation of each."""

    text: Text
    rows: list[int]
    judged: list[list[int]]

    def run(self, modules: MtpModules, case: Case) -> dict[int, Chain]:
        """Return the chains that a case judges, by their rows."""
        rows = [row for row in self.rows if case.judges(row)]
        drafts = drafts_along(
            Drafting(modules, self.text, case.mistake),
            rows,
            DEPTH,
            edges=case.edges(len(self.text.token_ids)),
            shared=case.shared,
        )
        judged = dict(zip(self.rows, self.judged, strict=True))
        return {
            row: Chain(some, _num_equal(some, judged[row]))
            for row, some in zip(rows, drafts, strict=True)
        }


def _num_equal(drafts: Sequence[int], judged: Sequence[int]) -> int:
    pairs = zip(drafts, judged, strict=True)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(drafts))


class Counts(list[int]):
    """Numbers of accepted drafts, one per chain or step."""

    def first(self) -> float:
        """Return how often the first draft was kept."""
        return sum(count > 0 for count in self) / len(self)

    def length(self, width: int) -> float:
        """Return the tokens per step with `width` drafts: kept drafts plus one."""
        return 1 + sum(min(count, width) for count in self) / len(self)


class Value(NamedTuple):
    """One figure of a case, and the figure without a mistake at the same positions."""

    name: str
    what: str
    value: float
    right: float
    unit: str = "tokens"


def run_mtp_mistakes(bench: Bench) -> None:
    """Measure every mistake in both views."""
    _, tokenizer, _ = export.load_model(EngineConfig().model_dir)
    documents = [one for one in corpus.load(None) if one.held_out and not one.is_test]
    measure(bench, [ids.tolist() for ids in encode(tokenizer, documents)], Sizes())


@torch.inference_mode()
def measure(bench: Bench, encoded: Sequence[list[int]], sizes: Sizes) -> None:
    """Add the figures of every mistake on these texts."""
    directory = EngineConfig().model_dir
    target = load_model(directory, dtype="float32")
    modules = load_mtp(target, directory)
    model, _, _ = export.load_model(directory)
    chains = [_chains(target, model, ids[: sizes.window], sizes) for ids in encoded]
    right = [one.run(modules, Case(None)) for one in chains]
    own = _own_texts(target, [ids for ids in encoded if len(ids) >= sizes.prompt_tokens], sizes)
    right_steps: dict[int, Counts] = {}
    for case in cases():
        values: list[Value] = []
        if case.mistake not in _IN_STEPS:
            values += _of_chains(right, [one.run(modules, case) for one in chains], case, sizes)
        if case.chunk is None or case.chunk < sizes.prompt_tokens:
            steps = {width: _steps(modules, own, case, width, sizes) for width in WIDTHS}
            right_steps = right_steps or steps
            values += _of_steps(right_steps, steps, case, sizes)
        for one in values:
            bench.add(
                Figure(
                    f"mtp_mistakes.{case.name}.{one.name}",
                    f"{case.what}: {one.what}",
                    one.value,
                    one.unit,
                    "right",
                    one.right,
                    one.value / one.right if one.right else None,
                    threads=bench.num_threads,
                )
            )


def _of_chains(
    right: Sequence[dict[int, Chain]], found: Sequence[dict[int, Chain]], case: Case, sizes: Sizes
) -> Iterator[Value]:
    pairs = [
        (row, before[row], now)
        for before, after in zip(right, found, strict=True)
        for row, now in after.items()
    ]
    everywhere = [pair for pair in pairs if pair[0] % sizes.stride == sizes.stride // 2]
    near = [pair for pair in pairs if case.is_near(pair[0])]
    for suffix, place, some in (("", "", everywhere), ("_near", "right behind, ", near)):
        if not some:
            continue
        before, now = Counts(a.kept for _, a, _ in some), Counts(b.kept for _, _, b in some)
        chains = f"{place}{len(some)} chains"
        yield Value(
            f"first{suffix}", f"first drafts kept, {chains}", now.first(), before.first(), "share"
        )
        for width in WIDTHS[1:]:
            what = f"tokens of a step with {width} drafts, {chains}"
            yield Value(f"length_{width}{suffix}", what, now.length(width), before.length(width))
        changed = sum(a.drafts != b.drafts for _, a, b in some) / len(some)
        what = f"chains with other drafts, {chains}"
        yield Value(f"changed{suffix}", what, changed, 0.0, "share")


def _of_steps(
    right: dict[int, Counts], found: dict[int, Counts], case: Case, sizes: Sizes
) -> Iterator[Value]:
    where = f"own texts, {_shared(sizes)} tokens shared" if case.shared else "own texts"
    for width, counts in found.items():
        what = f"tokens of a step with {width} drafts, {where}, {len(counts)} steps"
        yield Value(f"own_{width}", what, counts.length(width), right[width].length(width))


def _shared(sizes: Sizes) -> int:
    """Return how many tokens of a prompt full pages hold, except its last token, which must run."""
    return (sizes.prompt_tokens - 1) // PAGE_SIZE * PAGE_SIZE


def _steps(
    modules: MtpModules, own: Sequence[Text], case: Case, width: int, sizes: Sizes
) -> Counts:
    """Return the drafts kept in every step along the model's own texts."""
    return Counts(
        step.kept
        for text in own
        for step in decode(
            Drafting(modules, text, case.mistake),
            text,
            sizes.prompt_tokens,
            width,
            chunk=sizes.window if case.shared else case.chunk or sizes.window,
            shared=_shared(sizes) if case.shared else 0,
        )
    )


def _chains(target: Transformer, model: Model, ids: Sequence[int], sizes: Sizes) -> Chains:
    """Return chains at every few rows of a text, and right after every edge."""
    rows = min(len(ids) - 1, sizes.window - DEPTH)
    chosen = set(range(sizes.stride // 2, rows, sizes.stride))
    chosen |= {row for row in range(rows) if row % CHUNKS[0] < BEHIND}
    cos, sin = rope_cos_sin(sizes.window, model.config, torch.device("cpu"))
    starts = torch.tensor(sorted(chosen))
    judged = []
    for draft, (_, logits) in enumerate(
        draft_chains(model, torch.tensor([ids]), starts, DEPTH, cos, sin)
    ):
        judged.append((logits[0, starts] if draft == 0 else logits[0]).argmax(-1))
    text = Text.read(target, ids)
    return Chains(text, starts.tolist(), torch.stack(judged, dim=1).tolist())


def _own_texts(target: Transformer, encoded: Sequence[Sequence[int]], sizes: Sizes) -> list[Text]:
    """Return greedy continuations of the texts' beginnings, with extra tokens for judging."""
    engine = Engine(
        EngineConfig(dtype="float32", speculative_config=SpeculativeConfig(method="naive"))
    )
    prompts = [list(ids[: sizes.prompt_tokens]) for ids in encoded]
    new = sizes.new_tokens + DEPTH
    params = SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True)
    done = engine.generate(prompts, params)
    return [Text.read(target, [*p, *one.token_ids]) for p, one in zip(prompts, done, strict=True)]
