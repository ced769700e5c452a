# SPDX-License-Identifier: Apache-2.0
"""Comparisons with plain decoding, and the verdict in one sentence."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from specops.cli.load.drafts import DraftCounts
from specops.cli.lossless.answers import Answer
from specops.cli.lossless.differences import KINDS, Difference, difference
from specops.cli.lossless.texts import Text

LOSSLESS, DIFFERS, UNKNOWN = "lossless", "differs", "cannot say"
STATUSES = (LOSSLESS, DIFFERS, UNKNOWN)  # the index is the exit code


@dataclass(frozen=True)
class Found:
    """A text with two answers that differ."""

    text: Text
    difference: Difference


@dataclass
class Comparison:
    """Answers compared with those of plain decoding, alone, to the same requests.

    Attributes:
        mode: "plain", or the name of the kind of speculation.
        is_drafted: whether the mode speculates.
        setting: "alone" or "beside others".
        sampling: "greedy" or "seeded".
        num_compared: pairs of answers.
        num_tokens: tokens of the compared answers; 0 if tokens are not reported.
        num_characters: characters of the compared answers.
        failures: count per message of requests without a pair of answers.
        drafts: counts in the answers; None if not reported.
        found: texts with differing answers.
        lacks: number of pairs that do not both report "tokens", "ids" and "logprobs".
    """

    mode: str
    is_drafted: bool
    setting: str
    sampling: str
    num_compared: int = 0
    num_tokens: int = 0
    num_characters: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    drafts: DraftCounts | None = None
    found: list[Found] = field(default_factory=list)
    lacks: Counter[str] = field(default_factory=Counter)

    @property
    def counts(self) -> dict[str, int]:
        """Number of texts that differ, by kind."""
        return {kind: sum(kind in one.difference.kinds for one in self.found) for kind in KINDS}

    @property
    def logprob_gap(self) -> float | None:
        """Largest logprob gap of all differences; None if no logprobs were compared there."""
        gaps = [one.difference.logprob_gap for one in self.found]
        return max((gap for gap in gaps if gap is not None), default=None)

    def add(self, text: Text, plain: Answer, other: Answer) -> None:
        """Compare the answers to another text."""
        for answer in (plain, other):
            if answer.error is not None:
                self.failures[answer.error] += 1
                return
        self.num_compared += 1
        self.num_tokens += len(other.tokens)
        self.num_characters += len(other.text)
        self.drafts = total([self.drafts, other.drafts])
        if plain.text and other.text:  # an empty text has no tokens to report
            self.lacks.update({"tokens", "ids", "logprobs"} - (_reports(plain) & _reports(other)))
        found = difference(plain, other)
        if found is not None:
            self.found.append(Found(text, found))


def _reports(answer: Answer) -> set[str]:
    has = {
        "tokens": bool(answer.tokens),
        "ids": all(token.id is not None for token in answer.tokens) and bool(answer.tokens),
        "logprobs": any(token.logprob is not None for token in answer.tokens),
    }
    return {name for name, is_there in has.items() if is_there}


def total(counts: Iterable[DraftCounts | None]) -> DraftCounts | None:
    """Return the sum of the reported counts; None if none are reported."""
    told = [one for one in counts if one is not None]
    if not told:
        return None
    return DraftCounts(
        None,
        sum(one.num_draft_tokens for one in told),
        sum(one.num_accepted_tokens for one in told),
    )


def verdict(
    comparisons: Sequence[Comparison], drafts: dict[str, DraftCounts | None], *, is_trusted: bool
) -> tuple[str, str]:
    """Return the status, one of STATUSES, and a sentence that explains it.

    Args:
        comparisons: comparisons of all modes.
        drafts: by mode, counts of all drafts it verified; None if not reported.
        is_trusted: whether a server that reports no drafts is assumed to speculate.
    """
    drafted = [one for one in comparisons if one.is_drafted]
    plain = [one for one in comparisons if not one.is_drafted]
    if any(one.found for one in drafted):
        return DIFFERS, _differs(drafted, plain)
    if any(one.found for one in plain):
        return DIFFERS, f"Differs without speculation: of the outputs, {_not_repeated(plain)}."
    failures = sum((one.failures for one in comparisons), Counter[str]())
    if failures:
        message, _ = failures.most_common(1)[0]
        return UNKNOWN, f"Cannot say: {failures.total()} requests failed, such as by: {message}"
    if not drafted:
        return UNKNOWN, (
            "Cannot say: the server repeats itself, alone and beside others, but no request of its "
            "turns speculation off. Name a server without it by --baseline-url, or such fields "
            "by --plain-body."
        )
    of_plain = total(drafts[one.mode] for one in plain)
    if of_plain is not None and of_plain.num_draft_tokens:
        return UNKNOWN, (
            "Cannot say: nothing differs, but requests without speculation had drafts, too: the "
            "fields of --plain-body do not turn it off, or the server of --baseline-url has it on."
        )
    drafts = {one.mode: drafts[one.mode] for one in drafted}
    proven = [
        mode
        for mode, counts in drafts.items()
        if (is_trusted if counts is None else counts.num_accepted_tokens)
    ]
    if not proven and None in drafts.values():
        return UNKNOWN, (
            "Cannot say: nothing differs, but the server reports no drafts. If you know that it "
            "speculates, add --trust-speculation."
        )
    if not proven:
        return UNKNOWN, "Cannot say: nothing differs, but no draft was accepted."
    return LOSSLESS, _lossless([one for one in drafted if one.mode in proven], proven, drafts)


def _lossless(drafted: Sequence[Comparison], proven: Sequence[str], drafts: Collection[str]) -> str:
    lacks = sum((one.lacks for one in drafted), Counter[str]())
    tokens = sum(one.num_tokens for one in drafted)
    what, amount = "text, token or logprob bit", f"{tokens:,} tokens"
    if lacks["logprobs"]:
        what = "text or token"
    if lacks["tokens"]:
        what, amount = "text", f"{sum(one.num_characters for one in drafted):,} characters"
    others = [mode for mode in drafts if mode not in proven]
    return (
        f"Lossless with {', '.join(proven)}: no {what} differs from plain decoding's in {amount}, "
        "alone or beside others, greedy or seeded."
    ) + (f" No draft of {', '.join(others)} was accepted, which says nothing." if others else "")


def _differs(drafted: Sequence[Comparison], plain: Sequence[Comparison]) -> str:
    kinds = {kind for one in drafted for kind, count in one.counts.items() if count}
    shares = [_share(drafted, name, lambda one: one.sampling) for name in ("greedy", "seeded")]
    if kinds == {"logprob"}:
        said = f"Differs in logprobs only: with speculation, those of {' and '.join(shares)} "
        said += "outputs are not plain decoding's; texts and tokens are."
    else:
        said = f"Differs: with speculation, {' and '.join(shares)} outputs are not plain decoding's"
        said += "."
    if not any(one.found for one in plain):
        return f"{said} Without speculation, all repeat."
    if not any(one.found for one in drafted if one.setting == "alone"):
        said += " Alone, all are; it is the batch that changes them."
    return f"{said} Without speculation, {_not_repeated(plain)}, too."


def _not_repeated(plain: Sequence[Comparison]) -> str:
    shares = [
        _share(plain, name, lambda one: one.setting)
        for name in ("alone", "beside others")
        if any(one.found for one in plain if one.setting == name)
    ]
    return f"{' and '.join(shares)} are not what they are alone the first time"


def _share(comparisons: Sequence[Comparison], name: str, of: Callable[[Comparison], str]) -> str:
    chosen = [one for one in comparisons if of(one) == name]
    different = sum(len(one.found) for one in chosen)
    return f"{different} of {sum(one.num_compared for one in chosen)} {name}"
