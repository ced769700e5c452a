# SPDX-License-Identifier: Apache-2.0
"""Configuration of prompt lookup; the drafter is in drafters/ngram.py."""

from dataclasses import dataclass

from specops.api.methods import checks
from specops.api.methods.method import Method, Options

NGRAM_MATCHES = ("most_recent", "leftmost")


@dataclass(frozen=True, kw_only=True)
class NgramOptions(Options):
    """The options of n-gram drafting.

    Attributes:
        min_ngram_size: shortest match that is used.
        max_ngram_size: longest match that is looked for.
        ngram_match: which of the longest matches is used: "most_recent" or "leftmost".
    """

    min_ngram_size: int = 2
    max_ngram_size: int = 5
    ngram_match: str = "most_recent"

    def __post_init__(self) -> None:
        checks.integer("min_ngram_size", self.min_ngram_size, 1)
        checks.integer("max_ngram_size", self.max_ngram_size, 1)
        if self.max_ngram_size < self.min_ngram_size:
            raise ValueError(
                f"max_ngram_size must be at least min_ngram_size = {self.min_ngram_size}, "
                f"got {self.max_ngram_size}"
            )
        checks.spelling(self, "ngram_match", NGRAM_MATCHES)


METHOD = Method(
    name="ngram",
    title="n-gram look-up",
    short="n-gram",
    drafter="specops.engine.drafters.ngram",
    options=NgramOptions,
    of_requests=("min_ngram_size", "max_ngram_size", "ngram_match"),
    aliases=("ngram_match",),
    names_of_vllm=(
        ("prompt_lookup_min", "min_ngram_size"),
        ("prompt_lookup_max", "max_ngram_size"),
    ),
    can_draft_trees=True,
    may_follow=True,
)
