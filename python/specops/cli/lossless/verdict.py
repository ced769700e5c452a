# SPDX-License-Identifier: Apache-2.0
"""Comparisons with plain decoding, and a verdict of one sentence."""

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
class TextDifference:
    """A text, and the difference between the two answers to it."""

    text: Text
    difference: Difference


@dataclass
class Comparison:
    """Comparison of a mode's answers with the reference: plain decoding, one request at a time.

    Attributes:
        mode: "plain", or the name of the kind of speculation.
        is_drafted: whether the mode speculates.
        setting: "alone" or "beside others".
        sampling: "greedy" or "seeded".
        num_compared: pairs of answers.
        num_tokens: tokens of the compared answers; 0 if tokens are not reported.
        num_characters: characters of the compared answers.
        failures: number of requests without two answers, by error message.
        drafts: counts in the answers; None if not reported.
        differences: texts with differing answers.
        missing: number of pairs in which an answer lacks "tokens", "ids" or "logprobs", by name.
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
    differences: list[TextDifference] = field(default_factory=list)
    missing: Counter[str] = field(default_factory=Counter)

    @property
    def counts(self) -> dict[str, int]:
        """Number of texts that differ, by kind."""
        return {
            kind: sum(kind in item.difference.kinds for item in self.differences) for kind in KINDS
        }

    @property
    def logprob_gap(self) -> float | None:
        """Largest logprob gap of all differences; None if no logprobs were compared there."""
        gaps = [item.difference.logprob_gap for item in self.differences]
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
            self.missing.update({"tokens", "ids", "logprobs"} - (_reports(plain) & _reports(other)))
        found = difference(plain, other)
        if found is not None:
            self.differences.append(TextDifference(text, found))


def _reports(answer: Answer) -> set[str]:
    has = {
        "tokens": bool(answer.tokens),
        "ids": all(token.id is not None for token in answer.tokens) and bool(answer.tokens),
        "logprobs": any(token.logprob is not None for token in answer.tokens),
    }
    return {name for name, is_there in has.items() if is_there}


def total(counts: Iterable[DraftCounts | None]) -> DraftCounts | None:
    """Return the sum of the reported counts; None if none are reported."""
    reported = [entry for entry in counts if entry is not None]
    if not reported:
        return None
    return DraftCounts(
        None,
        sum(entry.num_draft_tokens for entry in reported),
        sum(entry.num_accepted_tokens for entry in reported),
    )


def verdict(
    comparisons: Sequence[Comparison], drafts: dict[str, DraftCounts | None], *, is_trusted: bool
) -> tuple[str, str]:
    """Return the status, one of STATUSES, and a sentence that explains it.

    Args:
        comparisons: comparisons of all modes.
        drafts: mode -> counts of all drafts that it verified; None if not reported.
        is_trusted: whether to assume that a server without draft counts speculates.
    """
    drafted = [comparison for comparison in comparisons if comparison.is_drafted]
    plain = [comparison for comparison in comparisons if not comparison.is_drafted]
    if any(comparison.differences for comparison in drafted):
        return DIFFERS, _differs(drafted, plain)
    if any(comparison.differences for comparison in plain):
        return DIFFERS, f"Differs without speculation: of the outputs, {_not_repeated(plain)}."
    failures = sum((comparison.failures for comparison in comparisons), Counter[str]())
    if failures:
        message, _ = failures.most_common(1)[0]
        return (
            UNKNOWN,
            f"Cannot say: {failures.total()} requests failed, for example with: {message}",
        )
    if not drafted:
        return UNKNOWN, (
            "Cannot say: the server repeats its outputs, but no known request field turns its "
            "speculation off. Set --plain-body to such fields, or --baseline-url to a server "
            "without speculation."
        )
    of_plain = total(drafts[comparison.mode] for comparison in plain)
    if of_plain is not None and of_plain.num_draft_tokens:
        return UNKNOWN, (
            "Cannot say: nothing differs, but requests without speculation had drafts: the fields "
            "of --plain-body do not turn it off, or the server of --baseline-url speculates."
        )
    drafts = {comparison.mode: drafts[comparison.mode] for comparison in drafted}
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
    return LOSSLESS, _lossless(
        [comparison for comparison in drafted if comparison.mode in proven], proven, drafts
    )


def _lossless(drafted: Sequence[Comparison], proven: Sequence[str], drafts: Collection[str]) -> str:
    num_missing = sum((comparison.missing for comparison in drafted), Counter[str]())
    tokens = sum(comparison.num_tokens for comparison in drafted)
    compared = "text, token or logprob bit"
    amount = f"{tokens:,} tokens"
    if num_missing["logprobs"]:
        compared = "text or token"
    if num_missing["tokens"]:
        compared, amount = (
            "text",
            f"{sum(comparison.num_characters for comparison in drafted):,} characters",
        )
    others = [mode for mode in drafts if mode not in proven]
    return (
        f"Lossless with {', '.join(proven)}: no {compared} differs from plain decoding's in "
        f"{amount}, alone or beside others, greedy or seeded."
    ) + (
        f" No verdict on {', '.join(others)}: none of their drafts was accepted." if others else ""
    )


def _differs(drafted: Sequence[Comparison], plain: Sequence[Comparison]) -> str:
    kinds = {kind for comparison in drafted for kind, count in comparison.counts.items() if count}
    fractions = [
        _fraction(drafted, name, lambda comparison: comparison.sampling)
        for name in ("greedy", "seeded")
    ]
    if kinds == {"logprob"}:
        sentence = (
            f"Differs in logprobs only: with speculation, logprobs of {' and '.join(fractions)} "
            "outputs differ from plain decoding; all texts and tokens are equal."
        )
    else:
        sentence = (
            f"Differs: with speculation, {' and '.join(fractions)} outputs differ from plain "
            "decoding."
        )
    if not any(comparison.differences for comparison in plain):
        return f"{sentence} Without speculation, all outputs repeat."
    if not any(comparison.differences for comparison in drafted if comparison.setting == "alone"):
        sentence += " Alone, none differs: the batch changes them."
    return f"{sentence} Without speculation, {_not_repeated(plain)} as well."


def _not_repeated(plain: Sequence[Comparison]) -> str:
    fractions = [
        _fraction(plain, name, lambda comparison: comparison.setting)
        for name in ("alone", "beside others")
        if any(comparison.differences for comparison in plain if comparison.setting == name)
    ]
    return f"{' and '.join(fractions)} differ from the first run alone"


def _fraction(
    comparisons: Sequence[Comparison], name: str, attribute: Callable[[Comparison], str]
) -> str:
    chosen = [comparison for comparison in comparisons if attribute(comparison) == name]
    different = sum(len(comparison.differences) for comparison in chosen)
    return f"{different} of {sum(comparison.num_compared for comparison in chosen)} {name}"
