# SPDX-License-Identifier: Apache-2.0
"""Configuration of suffix decoding; the drafter is in drafters/suffix.py."""

from dataclasses import dataclass
from typing import Any

from specops.api.methods import checks
from specops.api.methods.method import Method, Options

_MAX_TREE_DEPTH = 2**15 - 1
_BUDGETS = ("requests", "tokens", "bytes")


@dataclass(frozen=True, kw_only=True)
class SuffixOptions(Options):
    """The options of suffix decoding.

    Attributes:
        suffix_decoding_max_tree_depth: maximum depth of the suffix tree, and so the longest context
            that it can match.
        suffix_decoding_max_cached_requests: finished requests kept in the shared tree; 0 keeps
            none, -1 all.
        suffix_decoding_max_spec_factor: maximum drafts per token of the matched context.
        suffix_decoding_min_token_prob: minimum estimated probability of a drafted path.
        suffix_decoding_max_cached_tokens: tokens kept in the shared tree; 0 keeps none, -1 all. As
            with the other two budgets, the oldest responses are evicted.
        suffix_decoding_max_cached_bytes: memory of the shared tree; 0 for no tree, -1 for no limit.
        suffix_decoding_read_on: whether drafts continue along the most recent matching text beyond
            the depth of the tree, or where only one text matches.
        suffix_decoding_earlier_answers: number of latest answers to the same prompt that are added
            to a request's own tree at its start; 0: none. They count towards the budgets above.
    """

    suffix_decoding_max_tree_depth: int = 64
    suffix_decoding_max_cached_requests: int = -1
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1
    suffix_decoding_max_cached_tokens: int = -1
    suffix_decoding_max_cached_bytes: int = 2**30
    suffix_decoding_read_on: bool = True
    suffix_decoding_earlier_answers: int = 0

    def __post_init__(self) -> None:
        depth = self.suffix_decoding_max_tree_depth
        checks.integer("suffix_decoding_max_tree_depth", depth, 1)
        if depth > _MAX_TREE_DEPTH:
            raise ValueError(
                f"suffix_decoding_max_tree_depth must be at most {_MAX_TREE_DEPTH}, got {depth}"
            )
        for budget in _BUDGETS:
            name = f"suffix_decoding_max_cached_{budget}"
            checks.integer(name, getattr(self, name), -1, bits=32 if budget == "requests" else 64)
        name = "suffix_decoding_max_spec_factor"
        checks.number(name, self.suffix_decoding_max_spec_factor, 0.0, 1e6)
        name = "suffix_decoding_min_token_prob"
        checks.number(name, self.suffix_decoding_min_token_prob, 0.0, 1.0)
        checks.flag("suffix_decoding_read_on", self.suffix_decoding_read_on)
        answers = self.suffix_decoding_earlier_answers
        checks.integer("suffix_decoding_earlier_answers", answers, 0)
        for budget in _BUDGETS:
            name = f"suffix_decoding_max_cached_{budget}"
            if answers and getattr(self, name) == 0:
                raise ValueError(
                    f"suffix_decoding_earlier_answers must be 0 if {name} is 0, which stores "
                    f"nothing, got {answers}"
                )

    def check_engine(self, config: Any) -> None:
        """Reject a corpus or a file if a budget of 0 disables the shared tree that it needs."""
        for budget in _BUDGETS:
            field_name = f"suffix_decoding_max_cached_{budget}"
            for name in ("suffix_corpus", "suffix_cache"):
                if getattr(self, field_name) == 0 and getattr(config, name) is not None:
                    raise ValueError(
                        f"{name} must be absent if {field_name} is 0, which stores nothing, "
                        f"got {getattr(config, name)!r}"
                    )


METHOD = Method(
    name="suffix",
    title="suffix tree",
    short="suffix",
    drafter="specops.engine.drafters.suffix",
    options=SuffixOptions,
    may_follow=True,
    is_on_host=True,
    learns=True,
    gauges=(
        ("suffix_cache_requests", "Responses that suffix decoding drafts from"),
        ("suffix_cache_tokens", "Tokens of these responses"),
        ("suffix_cache_bytes", "Memory that they take"),
    ),
)
