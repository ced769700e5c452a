# SPDX-License-Identifier: Apache-2.0
"""Audit random answers, and answers with planted changes, for ten minutes: no verdict is wrong.

    PYTHONPATH=. python tests/audit_campaign.py [--minutes 10] [--rounds N] [--seed 0]
        [--family NAME] [--requests 16] [--plant-every 1]

Models, requests and methods are those of engine_campaign.py. An engine answers the requests in
random order, among others that are aborted. Another engine, with other limits, audits the answers
as JSON and must confirm each one. Then changes are planted: in the answer, in what the record says
about its request, and in the engine. Whether the last two kinds change the answer is decided by
plain decoding with the change; the audit must say the same. For a wrong verdict, the campaign
prints all that is needed to reproduce it and exits with status 1. The table at the end shows how
many changes of each kind a single answer showed. Planting costs most of the time: with
--plant-every N, only every Nth round does it.
"""

import argparse
import contextlib
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from engine_campaign import (
    FAMILIES,
    HEAD_FAMILIES,
    NO_8_BIT_CACHES,
    REQUESTS,
    Model,
    bits,
    random_params,
    random_prompts,
    run_at_random,
)
from specops import dense
from specops.audit import AuditRecord, AuditVerdict, audit
from specops.engine import Completion, Engine
from specops.quantization import QuantizedWeight
from torch import Tensor

_LEAST_SIZE = 32  # of a projection; a loader first tries a model of 16 inputs
_FIRST = 5  # the projections of which one is changed: each family has as many

Change = Callable[[random.Random, AuditRecord], AuditRecord]


def with_token(draw: random.Random, record: AuditRecord) -> AuditRecord:
    token_ids = list(record.token_ids)
    token_ids[draw.randrange(len(token_ids))] ^= 1
    return replace(record, token_ids=tuple(token_ids))


def with_logprob_bit(draw: random.Random, record: AuditRecord) -> AuditRecord:
    logprobs = list(record.logprobs)
    place = draw.randrange(len(logprobs))
    value = torch.tensor(logprobs[place].logprob).nextafter(torch.tensor(-torch.inf))
    logprobs[place] = replace(logprobs[place], logprob=float(value))
    return replace(record, logprobs=tuple(logprobs))


def with_end(draw: random.Random, record: AuditRecord) -> AuditRecord:
    reason = "stop" if record.finish_reason == "length" else "length"
    return replace(record, finish_reason=reason, stop_reason=None)


def with_prompt(draw: random.Random, record: AuditRecord) -> AuditRecord:
    """Change a token of the prompt, as another chat template does."""
    token_ids = list(record.prompt_token_ids)
    token_ids[draw.randrange(len(token_ids))] ^= 1
    return replace(record, prompt_token_ids=tuple(token_ids))


def with_choice(draw: random.Random, record: AuditRecord) -> AuditRecord:
    return replace(record, choice_index=1)


def with_parameter(name: str, *values: Any) -> Change:
    def change(draw: random.Random, record: AuditRecord) -> AuditRecord:
        others = [value for value in values if value != getattr(record.params, name)]
        return replace(record, params=replace(record.params, **{name: draw.choice(others)}))

    return change


# Changes of the answer, each of which every audit finds.
OF_ANSWERS: dict[str, Change] = {
    "output token": with_token,
    "logprob bit": with_logprob_bit,
    "end of the answer": with_end,
}
# Changes of what the record says about its request.
OF_REQUESTS: dict[str, Change] = {
    "prompt token (chat template)": with_prompt,
    "choice index": with_choice,
    "seed": with_parameter("seed", 1, 2),
    "temperature": with_parameter("temperature", 0.0, 0.7, 1.3),
    "temperature by 1 %": with_parameter("temperature", 0.693, 0.707),
    "top-p": with_parameter("top_p", 0.8, 0.95),
    "top-k": with_parameter("top_k", 5, 30),
    "min-p": with_parameter("min_p", 0.05, 0.1),
    "typical-p": with_parameter("typical_p", 0.7, 0.9),
    "repetition penalty": with_parameter("repetition_penalty", 1.05, 1.3),
}


def values_of(weight: Any) -> Tensor:
    values: Tensor = weight.values if isinstance(weight, QuantizedWeight) else weight
    return values


@contextlib.contextmanager
def packing(change: Callable[[Any], Any]) -> Iterator[None]:
    """Apply `change` to each projection's weight before it is packed."""
    original = dense.pack_weight

    def pack(weight: Any, **options: Any) -> Any:
        if min(values_of(weight).shape) >= _LEAST_SIZE:
            weight = change(weight)
        return original(weight, **options)

    with mock.patch.object(dense, "pack_weight", pack):
        yield


def one_value(kind: type, draw: random.Random) -> contextlib.AbstractContextManager[None]:
    """Change a value of a projection of some kind: by one step, or a float in its last bit."""
    chosen, place = draw.randrange(_FIRST), draw.random()
    numbers = iter(range(1 << 30))

    def change(weight: Any) -> Any:
        if isinstance(weight, kind) and next(numbers) == chosen:
            values = values_of(weight).clone()
            size = values.element_size()
            integers = values.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[size]).view(-1)
            integers[int(place * len(integers))] ^= 1
            return weight._replace(values=values) if kind is QuantizedWeight else values
        return weight

    return packing(change)


def all_weights(draw: random.Random) -> contextlib.AbstractContextManager[None]:
    """Change every projection by 1 %, as another version of the model does."""

    def change(weight: Any) -> Any:
        if isinstance(weight, Tensor):
            return weight * 1.01
        return weight._replace(scales=weight.scales * 1.01)

    return packing(change)


def other_kv(draw: random.Random, model: Model) -> dict[str, Any]:
    own = model.settings["kv_cache_dtype"]
    kinds = [one for one in ("auto", "int8", "fp8_e4m3") if one != own]
    return {"kv_cache_dtype": draw.choice(kinds)}


def other_weights(draw: random.Random, model: Model) -> dict[str, Any]:
    own = model.settings["quantization"]
    return {"quantization": draw.choice([one for one in ("none", "wint8", "wint4") if one != own])}


# Changes of the engine: its settings, and what happens while its weights are loaded.
OF_ENGINES: dict[str, tuple[Callable[..., Any] | None, Callable[..., Any] | None]] = {
    "KV dtype": (other_kv, None),
    "weight kind": (other_weights, None),
    "one quantized value": (None, partial(one_value, QuantizedWeight)),
    "last bit of one weight": (None, partial(one_value, Tensor)),
    "version of the model": (None, all_weights),
}


class Campaign:
    """Counts of a campaign, by kind of change.

    Args:
        seed: seed of all choices.
        requests: number of requests per round.

    Attributes:
        answers, tokens: number of audited answers without a change, and their tokens.
        planted: number of changes.
        shown: number of changes that change the answer.
        wrong: number of wrong verdicts; "none" counts false alarms.
    """

    def __init__(self, seed: int, requests: int = REQUESTS) -> None:
        self._seed, self._requests = seed, requests
        self.answers = self.tokens = 0
        self.planted: Counter[str] = Counter()
        self.shown: Counter[str] = Counter()
        self.wrong: Counter[str] = Counter()

    def run_round(self, number: int, name: str, folder: Path, *, plants: bool = True) -> None:
        """Answer requests by a model of a family and audit the answers.

        Args:
            number: number of the round; with the seed, it determines all choices.
            name: name of the family.
            folder: folder for checkpoints.
            plants: whether to plant changes as well.
        """
        draw = random.Random(f"audit {self._seed}-{number}")
        model = Model.drawn(draw, name, folder)
        plain = model.plain_engine()
        vocab = model.vocab_of(plain)
        prompts = random_prompts(draw, vocab, model.longest, self._requests)
        params = [random_params(draw, vocab, draw.randint(1, model.max_tokens)) for _ in prompts]
        engine, _, speculations = model.random_engine(draw, len(prompts))
        for one in speculations:
            one["verify_strategy"] = draw.choice(["target_match"] * 5 + ["greedy"])
        done = run_at_random(engine, draw, prompts, params, speculations)
        records = [
            AuditRecord.of(answer, given, verify_strategy=one["verify_strategy"])
            for answer, given, one in zip(done, params, speculations, strict=True)
        ]
        auditor = model.random_engine(draw, 0)[0]
        self.answers += len(records)
        self.tokens += sum(len(record.token_ids) for record in records)
        for record, verdict in zip(records, audit(auditor, as_json(records)), strict=True):
            self._judge(f"{model}", "none", record, verdict, is_changed=False)
        if plants:
            self._plant(draw, model, plain, auditor, records)

    def _plant(
        self,
        draw: random.Random,
        model: Model,
        plain: Engine,
        auditor: Engine,
        records: list[AuditRecord],
    ) -> None:
        """Plant changes in the answers, in the records of their requests, and in the engine."""
        for kinds, always in ((OF_ANSWERS, True), (OF_REQUESTS, False)):
            plants = [
                (draw.choice(list(kinds)) if record.token_ids else list(kinds)[-1], record)
                for record in records
            ]
            changed = [kinds[kind](draw, record) for kind, record in plants]
            expected = [True] * len(plants)
            if not always:
                expected = [
                    not gives(answer, record)
                    for answer, record in zip(decoded(plain, changed), records, strict=True)
                ]
            verdicts = audit(auditor, as_json(changed))
            for (kind, _), record, verdict, is_changed in zip(
                plants, changed, verdicts, expected, strict=True
            ):
                self._judge(f"{model}", kind, record, verdict, is_changed=is_changed)
        kind = draw.choice(list(OF_ENGINES))
        if kind == "KV dtype" and model.name in NO_8_BIT_CACHES:
            kind = "weight kind"
        if kind in ("one quantized value", "last bit of one weight"):
            is_float = model.settings["quantization"] == "none"
            kind = "last bit of one weight" if is_float else "one quantized value"
        settings, loading = OF_ENGINES[kind]
        changes = settings(draw, model) if settings else {}
        with loading(draw) if loading else contextlib.nullcontext():
            other = model.plain_engine(methods=(), weight_cache="none", **changes)
        verdicts = audit(other, as_json(records))
        for record, answer, verdict in zip(records, decoded(other, records), verdicts, strict=True):
            is_changed = not gives(answer, record)
            self._judge(f"{model} {changes}", kind, record, verdict, is_changed=is_changed)

    def _judge(
        self, where: str, kind: str, record: AuditRecord, verdict: AuditVerdict, *, is_changed: bool
    ) -> None:
        """Count a verdict; it is right if it says whether the change changes the answer."""
        self.planted[kind] += 1
        self.shown[kind] += is_changed
        if verdict.is_confirmed == is_changed:
            self.wrong[kind] += 1
            print(f"\nwrong after the change {kind!r} of {where}:\n  {verdict.sentence()}")
            print(f"  {json.dumps(record.as_dict())}", flush=True)

    def table(self) -> str:
        """Return the counts of all kinds of changes as a table."""
        lines = ["| change | planted | shown by one answer | wrong verdicts |", "| --- " * 4 + "|"]
        for kind in (*OF_ANSWERS, *OF_REQUESTS, *OF_ENGINES):
            counts = self.planted[kind], self.shown[kind], self.wrong[kind]
            lines.append(f"| {kind} | {' | '.join(map(str, counts))} |")
        return "\n".join(lines)


def as_json(records: Sequence[AuditRecord]) -> list[AuditRecord]:
    return [AuditRecord.from_dict(json.loads(json.dumps(one.as_dict()))) for one in records]


def decoded(engine: Engine, records: Sequence[AuditRecord]) -> list[Completion]:
    """Return the plain answers to the requests of records."""
    names = [
        engine.add_request(
            record.prompt_token_ids,
            record.params,
            choice_index=record.choice_index,
            speculative_config={"method": "naive", "verify_strategy": record.verify_strategy},
        )
        for record in records
    ]
    while engine.has_unfinished():
        engine.step()
    return [engine.completion(name) for name in names]


def gives(answer: Completion, record: AuditRecord) -> bool:
    """Return whether an answer has all bits of a record."""
    recorded: Any = replace(
        answer,
        token_ids=list(record.token_ids),
        logprobs=list(record.logprobs),
        finish_reason=str(record.finish_reason),
    )
    return bits(answer) == bits(recorded) and answer.stop_reason == record.stop_reason


def main(arguments: list[str] | None = None) -> int:
    """Run the campaign; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--rounds", type=int, help="number of rounds, instead of minutes")
    parser.add_argument("--seed", type=int, default=0)
    names = [*FAMILIES, *HEAD_FAMILIES, "bundled"]
    parser.add_argument(
        "--family", choices=names, help="family of all rounds (default: each in turn)"
    )
    parser.add_argument("--requests", type=int, default=REQUESTS, help="requests per round")
    parser.add_argument(
        "--plant-every", type=int, default=1, metavar="N", help="plant changes in every Nth round"
    )
    options = parser.parse_args(arguments)
    campaign, number = Campaign(options.seed, options.requests), 0
    end = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as folder:
        while number < options.rounds if options.rounds else time.monotonic() < end:
            name = options.family or names[number % len(names)]
            plants = number % options.plant_every == 0
            campaign.run_round(number, name, Path(folder), plants=plants)
            number += 1
    print(campaign.table())
    wrong = campaign.wrong.total() - campaign.wrong["none"]
    print(
        f"{number} rounds: {campaign.answers:,} answers of {campaign.tokens:,} tokens, "
        f"{campaign.wrong['none']} false alarms; {campaign.planted.total() - campaign.answers:,} "
        f"changes, {wrong} wrong verdicts"
    )
    return int(campaign.wrong.total() > 0)


if __name__ == "__main__":
    sys.exit(main())
