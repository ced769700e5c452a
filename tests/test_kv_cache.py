# SPDX-License-Identifier: Apache-2.0
"""Page pool: sharing and eviction; no page is lost or mistaken for another."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from pages import check_pages
from specops.engine.memory.kv_cache import DraftKv, PagePool


def make(num_pages: int = 8, *, caching: bool = True) -> PagePool:
    return PagePool(num_pages, 4, enable_prefix_caching=caching)


def kv(lookahead: int, owner: str = "a drafter") -> DraftKv | None:
    """Return the draft KV of a request whose drafter has this lookahead; 0 is no drafter."""
    return DraftKv(owner, lookahead, 1) if lookahead else None


def key(tokens: Sequence[int], end: int, lookahead: int) -> bytes | None:
    draft_kv = kv(lookahead)
    return None if draft_kv is None else draft_kv.key(tokens, end)


def fill(pool: PagePool, tokens: list[int], lookahead: int = 0) -> list[int]:
    """Hold pages, cached or new, for all tokens except the last `lookahead`."""
    pages = pool.match_prefix(tokens, len(tokens), kv(lookahead))
    rest = pool.allocate((len(tokens) - lookahead) // 4 - len(pages))
    assert rest is not None
    for index in range(len(pages), len(pages) + len(rest)):
        pages.append(rest.pop(0))
        register(pool, pages, index, tokens, lookahead)
    return pages


def register(
    pool: PagePool, pages: list[int], index: int, tokens: list[int], lookahead: int
) -> None:
    begin, end = index * 4, index * 4 + 4
    pages[index] = pool.register(
        pages[index],
        pages[index - 1] if index else None,
        tokens[begin:end],
        key(tokens, end, lookahead),
    )


def test_allocation_is_ascending_and_all_or_nothing() -> None:
    pool = make()
    assert pool.allocate(3) == [0, 1, 2]
    assert pool.allocate(6) is None
    assert pool.num_available == 5
    assert pool.allocate(5) == [3, 4, 5, 6, 7]
    check_pages(pool)


def test_released_prefix_is_found_and_shared() -> None:
    pool = make()
    tokens = list(range(12))
    first = fill(pool, tokens)
    pool.release(first)
    assert pool.num_available == 8
    assert pool.match_prefix(tokens, 11) == first[:2]  # without the page of the last token
    assert pool.match_prefix([*tokens[:4], 99, 98, 97, 96], 8) == first[:1]
    assert pool.match_prefix([5, *tokens], 12) == []
    check_pages(pool)


def test_equal_pages_are_merged() -> None:
    pool = make()
    tokens = list(range(8))
    first = pool.allocate(2)
    second = pool.allocate(2)
    assert first is not None and second is not None
    for pages in (first, second):
        for index in range(2):
            register(pool, pages, index, tokens, 0)
    assert second == first
    assert pool.num_available == 6
    pool.release(first)
    pool.release(second)
    assert pool.num_available == 8
    check_pages(pool)


def test_equal_tokens_after_different_prefixes_have_different_pages() -> None:
    pool = make()
    first = fill(pool, [1, 2, 3, 4, 9, 9, 9, 9])
    second = fill(pool, [5, 6, 7, 8, 9, 9, 9, 9])
    assert not set(first) & set(second)


def test_least_recently_used_tail_is_evicted_first() -> None:
    pool = make(4)
    old, new = list(range(8)), list(range(100, 108))
    pool.release(fill(pool, old))
    pool.release(fill(pool, new))
    taken = pool.allocate(1)
    assert taken is not None
    remaining = pool.match_prefix(old, 8)
    assert len(remaining) == 1  # the tail was evicted first
    pool.release(remaining)
    assert len(pool.match_prefix(new, 8)) == 2
    check_pages(pool)


def test_without_caching_released_pages_are_free_at_once() -> None:
    pool = make(caching=False)
    tokens = list(range(8))
    pool.release(fill(pool, tokens))
    assert pool.match_prefix(tokens, 8) == []
    assert pool.num_available == 8
    check_pages(pool)


def test_random_traffic_loses_no_page() -> None:
    rng = random.Random(0)
    pool = make(16)
    held: list[list[int]] = []
    for _ in range(3000):
        if held and rng.random() < 0.5:
            pool.release(held.pop(rng.randrange(len(held))))
        else:
            tokens = [rng.randrange(2) for _ in range(4 * rng.randrange(1, 5))]
            hits = pool.match_prefix(tokens, len(tokens))
            rest = pool.allocate(len(tokens) // 4 - len(hits))
            if rest is None:
                pool.release(hits)
                continue
            pages = hits + rest
            for index in range(len(hits), len(pages)):
                register(pool, pages, index, tokens, 0)
            held.append(pages)
        check_pages(pool)
    for pages in held:
        pool.release(pages)
    assert pool.num_available == 16
    check_pages(pool)


# ---- pages with draft KV ----


@pytest.mark.parametrize("lookahead", [1, 2, 3])
def test_draft_page_is_matched_with_the_tokens_behind_it(lookahead: int) -> None:
    shared = list(range(8))
    ends = [[*shared, *range(50, 50 + lookahead)], [*shared, *range(60, 60 + lookahead)]]
    for one, other in (ends, ends[::-1]):
        pool = make()
        first = fill(pool, one, lookahead)
        assert len(first) == 2
        # Both texts share the first page and the token after it, but different tokens follow the
        # second.
        second = fill(pool, other, lookahead)
        assert second[0] == first[0] and second[1] != first[1]
        assert fill(pool, one, lookahead) == first and fill(pool, other, lookahead) == second
        # One token behind the page differs or is unknown so far.
        almost = [*one[:-1], 99]
        assert pool.match_prefix(almost, 8, kv(lookahead)) == first[:1]
        assert pool.match_prefix(one[:-1], 8, kv(lookahead)) == first[:1]
        check_pages(pool)


def test_requests_without_draft_kv_match_any_page_and_others_only_their_own() -> None:
    tokens = [*range(8), 50]
    pool = make()
    plain = fill(pool, tokens)
    assert pool.match_prefix(tokens, 8, kv(1)) == []
    drafted = fill(pool, tokens, 1)
    assert not set(plain) & set(drafted)
    # The page with draft KV replaces the other one for both kinds of requests.
    assert pool.match_prefix(tokens, 8) == drafted
    assert pool.match_prefix([*tokens[:8], 60], 8) == drafted
    assert pool.match_prefix(tokens, 8, kv(1)) == drafted
    check_pages(pool)


def test_duplicate_is_swapped_for_a_page_with_the_required_kv() -> None:
    pool = make()
    tokens = [*range(4), 50]
    pages = pool.allocate(5)
    assert pages is not None
    plain, drafted, other, second_plain, again = ([page] for page in pages)
    register(pool, plain, 0, tokens, 0)
    register(pool, drafted, 0, tokens, 1)
    register(pool, other, 0, [*range(4), 60], 1)
    assert [plain, drafted, other] == [[0], [1], [2]]  # no page equals an earlier one
    register(pool, second_plain, 0, tokens, 0)
    assert second_plain == other  # any page with these tokens
    register(pool, again, 0, tokens, 1)
    assert again == drafted
    assert pool.num_available == 5
    check_pages(pool)


def test_prefix_is_matched_while_it_has_a_page() -> None:
    pool = make(4)
    tokens = [*range(4), 50, 51, 52, 53]
    pool.release(fill(pool, tokens[:4]))
    drafted = fill(pool, tokens[:5], 1)
    pool.release(drafted)
    taken = pool.allocate(3)  # two free pages and the oldest cached one
    assert taken is not None and not set(taken) & set(drafted)
    check_pages(pool)
    assert pool.match_prefix(tokens, 4) == drafted
    # A page registered behind another one is found behind any page of the same prefix.
    pool.release(taken)
    behind = fill(pool, tokens)
    other = fill(pool, [*range(4), 60], 1)
    assert other != drafted
    assert pool.match_prefix(tokens, 8) == [*other, behind[1]]
    check_pages(pool)


def test_draft_kv_is_matched_only_by_its_own_drafter() -> None:
    pool = make()
    tokens = [*range(8), 50]
    pages = fill(pool, tokens, 1)
    assert pool.match_prefix(tokens, 8, kv(1, "another")) == []
    # The same holds for a drafter whose draft KV depends on no token behind a page.
    own = DraftKv("another", 0, 1)
    theirs = pool.allocate(1)
    assert theirs is not None
    assert pool.register(theirs[0], None, tokens[:4], own.key(tokens, 4)) == theirs[0]
    assert pool.match_prefix(tokens, 8, own) == theirs
    assert pool.match_prefix(tokens, 8, kv(1)) == pages
    check_pages(pool)


@dataclass
class SlowPool:
    """A page pool that searches all its pages, to compare with."""

    num_pages: int
    page_size: int
    refs: dict[int, int] = field(default_factory=dict)  # reference counts of held pages
    cached: list[int] = field(default_factory=list)
    # By page, oldest first: all tokens up to its end, and the tokens behind it if it has draft KV.
    known: dict[int, tuple[tuple[int, ...], tuple[int, ...] | None]] = field(default_factory=dict)

    def find(self, tokens: tuple[int, ...], following: tuple[int, ...] | None) -> int | None:
        fitting = [
            page
            for page, content in self.known.items()
            if content[0] == tokens and (following is None or content[1] == following)
        ]
        return fitting[-1] if fitting else None

    def hold(self, page: int) -> None:
        if page in self.cached:
            self.cached.remove(page)
        self.refs[page] = self.refs.get(page, 0) + 1

    def match(self, tokens: tuple[int, ...], max_tokens: int, lookahead: int) -> list[int]:
        pages: list[int] = []
        for end in range(self.page_size, max_tokens + 1, self.page_size):
            page = self.find(tokens[:end], tokens[end : end + lookahead] if lookahead else None)
            if page is None:
                break
            self.hold(page)
            pages.append(page)
        return pages

    def allocate(self, count: int) -> list[int] | None:
        if count > self.num_pages - len(self.refs):
            return None
        pages = []
        for _ in range(count):
            free = sorted(set(range(self.num_pages)) - set(self.refs) - set(self.cached))
            page = free[0] if free else self.cached.pop(0)
            self.known.pop(page, None)
            self.refs[page] = 1
            pages.append(page)
        return pages

    def register(
        self, page: int, tokens: tuple[int, ...], following: tuple[int, ...] | None
    ) -> int:
        known = self.find(tokens, following)
        if known is None:
            self.known[page] = tokens, following
            return page
        self.hold(known)
        self.release([page])
        return known

    def release(self, pages: list[int]) -> None:
        for page in reversed(pages):
            self.refs[page] -= 1
            if self.refs[page] == 0:
                del self.refs[page]
                if page in self.known:
                    self.cached.append(page)


@dataclass
class Holder:
    """A request: its tokens, the lookahead of its drafter, and its pages, all registered."""

    tokens: tuple[int, ...]
    lookahead: int
    pages: list[int]


class Sharing(RuleBasedStateMachine):
    """Requests with and without draft KV that arrive, grow and end, and the contents of pages."""

    @initialize(
        lookahead=st.integers(1, 3), page_size=st.integers(1, 3), num_pages=st.integers(1, 14)
    )
    def create(self, lookahead: int, page_size: int, num_pages: int) -> None:
        self.lookahead, self.page_size = lookahead, page_size
        self.pool = PagePool(num_pages, page_size, enable_prefix_caching=True)
        self.slow = SlowPool(num_pages, page_size)
        self.holders: list[Holder] = []
        # The true contents of pages, noted when they are computed.
        self.content: dict[int, tuple[tuple[int, ...], tuple[int, ...] | None]] = {}

    @rule(data=st.data(), drafts=st.booleans())
    def arrive(self, data: st.DataObject, drafts: bool) -> None:
        tokens = self.some_tokens(data)
        lookahead = self.lookahead if drafts else 0
        pages = self.pool.match_prefix(tokens, len(tokens), kv(lookahead))
        assert pages == self.slow.match(tokens, len(tokens), lookahead)
        self.holders.append(Holder(tokens, lookahead, pages))
        self.compute(self.holders[-1])

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        holder.tokens += tuple(data.draw(st.lists(st.integers(0, 1), max_size=4)))
        self.compute(holder)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        holder = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.pool.release(holder.pages)
        self.slow.release(holder.pages)

    def some_tokens(self, data: st.DataObject) -> tuple[int, ...]:
        """Draw new tokens, or tokens that begin like those of another request."""
        new = tuple(data.draw(st.lists(st.integers(0, 1), max_size=8)))
        if not self.holders or data.draw(st.booleans()):
            return new
        other = data.draw(st.sampled_from(self.holders)).tokens
        return other[: data.draw(st.integers(0, len(other)))] + new[:2]

    def compute(self, holder: Holder) -> None:
        """Give a holder all the pages that its tokens complete, or none."""
        complete = max(len(holder.tokens) - holder.lookahead, 0) // self.page_size
        count = complete - len(holder.pages)
        new = self.pool.allocate(count)
        assert new == self.slow.allocate(count)
        for page in new or ():
            assert page not in self.slow.known and self.slow.refs[page] == 1
            end = (len(holder.pages) + 1) * self.page_size
            content = self.expected(holder, end)
            self.content[page] = content
            swapped = self.pool.register(
                page,
                holder.pages[-1] if holder.pages else None,
                holder.tokens[end - self.page_size : end],
                key(holder.tokens, end, holder.lookahead),
            )
            assert swapped == self.slow.register(page, *content)
            holder.pages.append(swapped)

    def expected(self, holder: Holder, end: int) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        following = holder.tokens[end : end + holder.lookahead] if holder.lookahead else None
        return holder.tokens[:end], following

    @invariant()
    def pages_hold_what_their_holders_expect(self) -> None:
        for holder in self.holders:
            for index, page in enumerate(holder.pages):
                tokens, following = self.expected(holder, (index + 1) * self.page_size)
                assert self.content[page][0] == tokens
                assert following is None or self.content[page][1] == following

    @invariant()
    def the_pool_agrees_with_the_slow_one(self) -> None:
        check_pages(self.pool)
        assert self.pool.num_available == self.slow.num_pages - len(self.slow.refs)
        for page, content in self.slow.known.items():
            assert self.content[page] == content


def test_pages_are_matched_only_with_their_salt() -> None:
    pool = PagePool(4, 2, enable_prefix_caching=True)
    for salt in ("a", None):
        pages = pool.allocate(1)
        assert pages is not None
        assert pool.register(pages[0], None, [1, 2], None, salt) == pages[0], "another salt"
        pool.release(pages)
    assert pool.match_prefix([1, 2], 2, None, "b") == []
    found = [pool.match_prefix([1, 2], 2, None, salt) for salt in ("a", None)]
    assert [len(one) for one in found] == [1, 1] and found[0] != found[1]
    for one in found:
        pool.release(one)
    check_pages(pool)
    # A salt is removed with its last page.
    for number in range(50):
        pages = pool.allocate(2)
        assert pages is not None
        pool.register(pages[0], None, [number, 2], None, f"salt {number}")
        pool.release(pages)
    assert len(pool._roots) <= pool.num_pages
    check_pages(pool)


def test_random_histories_agree_with_the_slow_pool() -> None:
    run_state_machine_as_test(
        Sharing,
        settings=settings(
            max_examples=150,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
