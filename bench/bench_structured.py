# SPDX-License-Identifier: Apache-2.0
"""Constrained output: the cost of a mask and of a step, and the gain of forced tokens.

Masks are timed in the middle of a text, and at every token of texts by the bundled model, over the
model's vocabulary and over a synthetic one of the size of today's models. A step with a grammar
that allows every text is compared with the same step without a grammar. Tokens per step are
counted, not timed.
"""

import json
import random
import time
from collections.abc import Callable
from typing import Any, cast
from unittest import mock

import numpy as np
from specops.api.tokenizer import Tokenizer
from specops.engine import Engine, EngineConfig, SamplingParams, SpeculativeConfig, StructuredOutput
from specops.engine.drafters.forced import ForcedDrafter
from specops.engine.structured import GrammarCompiler, GrammarState, MaskFiller, MaskRows

from bench.common import Bench, Figure

LARGE_VOCAB = 151_936
BATCH, DRAFTS = 8, 4  # requests of a step, and drafts of each
NEW_TOKENS = 96
METHODS: tuple[tuple[str, int], ...] = (("ngram", 4), ("suffix", 8), ("mtp", 4), ("mtp", 8))


def _record(**properties: Any) -> dict[str, Any]:
    required = list(properties)
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


_TEXT = {"type": "string", "maxLength": 16}
# Typical schemas of tools and data extraction, with the beginning of a text for each.
SCHEMAS: dict[str, dict[str, Any]] = {
    "tool": _record(
        name={"enum": ["get_current_weather", "get_forecast"]},
        arguments=_record(location=_TEXT, unit={"enum": ["celsius", "fahrenheit"]}),
    ),
    "person": _record(
        first_name=_TEXT, last_name=_TEXT, date_of_birth={"type": "string", "format": "date"},
        is_customer={"type": "boolean"},
    ),
    "invoice": _record(
        invoice_number={"type": "string", "pattern": "^[A-Z]{2}[0-9]{6}$"},
        lines={
            "type": "array", "minItems": 2, "maxItems": 3,
            "items": _record(description=_TEXT, quantity={"type": "integer", "maximum": 99},
                             unit_price={"type": "integer", "maximum": 9999}),
        },
    ),
    "any": {"type": "object"},
}  # fmt: skip
BEGUN = '{"name": "get_'


class _MadeUp:
    """Synthetic tokenizer with the vocabulary size of today's models: bytes, and made-up words."""

    def __init__(self, size: int) -> None:
        draw = random.Random(0)
        letters = "etaoinshrdlucmfwypvbgkjqxz"
        weights = range(len(letters), 0, -1)
        self._tokens = [bytes([byte]) for byte in range(256)]
        seen = set(self._tokens)
        while len(self._tokens) < size:
            length = draw.randrange(2, 10)
            word = "".join(draw.choices(letters, weights, k=length)).encode()
            word = draw.choice([b"", b" ", b'"', b"_"]) + word
            if word not in seen:
                seen.add(word)
                self._tokens.append(word)

    def is_special(self, token_id: int) -> bool:
        return False

    def token_bytes(self, token_id: int) -> bytes:
        return self._tokens[token_id]

    def encode_as_text(self, text: str) -> list[int]:
        return list(text.encode())


def run_structured(bench: Bench) -> None:
    """Measure the time of masks and steps, and the gain of drafting forced tokens."""
    bundled = Tokenizer.from_dir(EngineConfig().model_dir)
    vocabularies: dict[str, tuple[Tokenizer, int]] = {
        "bundled": (bundled, bundled.vocab_size),
        "large": (cast(Tokenizer, _MadeUp(LARGE_VOCAB)), LARGE_VOCAB),
    }
    texts = _texts(bench)
    for name, (tokenizer, size) in vocabularies.items():
        compiler = GrammarCompiler(tokenizer, size)
        _add_masks(bench, name, compiler, tokenizer, size)
        _add_masks_of_texts(bench, name, compiler, tokenizer, size, texts)
    _add_step(bench)
    for method, k in METHODS:
        _add_tokens(bench, method, k)


def _add_masks(
    bench: Bench, name: str, compiler: GrammarCompiler, tokenizer: Tokenizer, size: int
) -> None:
    filler = MaskFiller(bench.num_threads)
    drafts = tokenizer.encode_as_text('current_weather", "arguments"')[:DRAFTS]

    def filling(schema: str, requests: int, width: int) -> Callable[[], object]:
        grammar = compiler.compile(StructuredOutput(json_schema=SCHEMAS[schema]))
        rows = []
        for index in range(requests):
            state = GrammarState(grammar, [0])
            assert all(map(state.take, tokenizer.encode_as_text(BEGUN)))
            rows.append(MaskRows(state, index * (1 + width), drafts[:width]))
        out = np.empty((requests * (1 + width), -(-size // 32)), dtype=np.int32)
        return lambda: filler.fill(rows, out)

    for schema in ("tool", "any"):
        cases = {"one": filling(schema, 1, 0), "step": filling(schema, BATCH, DRAFTS)}
        timing = bench.alternate(cases)
        rows = BATCH * (1 + DRAFTS)
        for case, count in (("one", 1), ("step", rows)):
            what = "one request" if case == "one" else f"{BATCH} requests with {DRAFTS} drafts"
            bench.add(
                Figure(
                    f"structured.mask.{name}.{schema}.{case}",
                    f"a mask over {size:,} tokens, schema '{schema}', {what}: time of each",
                    timing.median(case) / count * 1e6,
                    "us",
                    threads=bench.num_threads,
                )
            )


def _add_masks_of_texts(
    bench: Bench,
    name: str,
    compiler: GrammarCompiler,
    tokenizer: Tokenizer,
    size: int,
    texts: list[tuple[dict[str, Any], str]],
) -> None:
    """Add the median and the 99th percentile of the time of a mask, over all tokens of texts."""
    filler = MaskFiller(bench.num_threads)
    out = np.empty((1, -(-size // 32)), dtype=np.int32)
    passes = []
    for _ in range(bench.pick(7, 1)):
        times = []
        for schema, text in texts:
            state = GrammarState(compiler.compile(StructuredOutput(json_schema=schema)), [0])
            for token in tokenizer.encode_as_text(text):
                rows = [MaskRows(state, 0, [])]
                begin = time.perf_counter_ns()
                filler.fill(rows, out)
                times.append(time.perf_counter_ns() - begin)
                assert state.take(token), "the text left its grammar"
        passes.append(times)
    of_each = np.median(np.array(passes), axis=0) * 1e-3
    for percent, what in ((50, "median"), (99, "99th percentile")):
        bench.add(
            Figure(
                f"structured.masks.{name}.p{percent}",
                f"a mask over {size:,} tokens, at each of {of_each.size} tokens of JSON of three "
                f"schemas, one request: {what}",
                float(np.percentile(of_each, percent)),
                "us",
                threads=bench.num_threads,
            )
        )


def _engine(bench: Bench, method: str, k: int) -> Engine:
    drafts = {"num_speculative_tokens": k} if k else {}
    return Engine(
        EngineConfig(
            device="cpu",
            max_num_seqs=BATCH,
            num_threads=bench.num_threads,
            speculative_config=SpeculativeConfig.from_dict({"method": method, **cast(Any, drafts)}),
        )
    )


def _add_step(bench: Bench) -> None:
    """Time plain decoding with a mask for every row, and without masks."""
    engine = _engine(bench, "naive", 0)
    prompts = [[4 + index, 5, 6, 7] for index in range(BATCH)]

    def decode(constraint: StructuredOutput | None) -> Callable[[], object]:
        params = SamplingParams(
            max_tokens=NEW_TOKENS,
            temperature=0.8,
            seed=1,
            ignore_eos=True,
            structured_output=constraint,
        )
        return lambda: engine.generate(prompts, params)

    everything = StructuredOutput(regex="(?s:.*)")
    timing = bench.alternate({"plain": decode(None), "constrained": decode(everything)})
    bench.add(
        Figure(
            "structured.step",
            f"a step of the bundled model, {BATCH} requests, each with a mask: times as long as "
            "without",
            timing.median("constrained") / NEW_TOKENS * 1e3,
            "ms",
            "unconstrained",
            timing.median("plain") / NEW_TOKENS * 1e3,
            timing.ratio("constrained", "plain"),
            threads=bench.num_threads,
        )
    )


def _requests() -> tuple[list[dict[str, Any]], list[str], list[SamplingParams]]:
    """Return schemas, prompts and parameters of sixteen requests for JSON."""
    schemas, prompts, params = [], [], []
    for index in range(16):
        schema = list(SCHEMAS.values())[index % 3]
        schemas.append(schema)
        prompts.append(f"# {json.dumps(schema)}\nvalue = ")
        constraint = StructuredOutput(
            json_schema=schema, disable_any_whitespace=(None, True)[index % 2]
        )
        params.append(
            SamplingParams(
                max_tokens=NEW_TOKENS, temperature=0.8 * (index % 4 > 1), seed=index,
                structured_output=constraint,
            )
        )  # fmt: skip
    return schemas, prompts, params


def _texts(bench: Bench) -> list[tuple[dict[str, Any], str]]:
    """Return the bundled model's texts for these requests, with their schemas."""
    schemas, prompts, params = _requests()
    done = _engine(bench, "naive", 0).generate(prompts, params)
    return [(schema, one.text) for schema, one in zip(schemas, done, strict=True)]


def _add_tokens(bench: Bench, method: str, k: int) -> None:
    """Add tokens per step with and without drafting of tokens that the grammar forces."""
    tokens, texts = {}, []
    for forced in (False, True):
        engine = _engine(bench, method, k)
        _, prompts, params = _requests()
        if forced:
            done = engine.generate(prompts, params)
        else:
            with mock.patch.object(ForcedDrafter, "finish"):
                done = engine.generate(prompts, params)
        texts.append([one.token_ids for one in done])
        tokens[forced] = sum(len(one.token_ids) for one in done) / sum(
            one.stats.num_steps for one in done
        )
    bench.add(
        Figure(
            f"structured.tokens.{method}{k}",
            f"tokens per step, {method} with {k} drafts, JSON of three schemas: forced tokens "
            "drafted over not",
            tokens[True],
            "tokens",
            "without",
            tokens[False],
            tokens[True] / tokens[False],
            threads=bench.num_threads,
        )
    )
    assert texts[0] == texts[1], "drafts changed a text"
