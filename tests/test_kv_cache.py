# SPDX-License-Identifier: Apache-2.0
"""The page pool: sharing, eviction, and that no page is ever lost."""

import random

from specops.engine.kv_cache import PagePool


def make(num_pages: int = 8, *, caching: bool = True) -> PagePool:
    return PagePool(num_pages, 4, enable_prefix_caching=caching)


def fill(pool: PagePool, tokens: list[int]) -> list[int]:
    pages = pool.match_prefix(tokens, len(tokens))
    rest = pool.allocate(len(tokens) // 4 - len(pages))
    assert rest is not None
    pages += rest
    for index in range(len(pages)):
        parent = pages[index - 1] if index else None
        pages[index] = pool.register(pages[index], parent, tokens[index * 4 : index * 4 + 4])
    return pages


def test_pages_come_in_ascending_order_and_all_or_nothing() -> None:
    pool = make()
    assert pool.allocate(3) == [0, 1, 2]
    assert pool.allocate(6) is None
    assert pool.num_available == 5
    assert pool.allocate(5) == [3, 4, 5, 6, 7]
    pool.check_integrity()


def test_a_released_prefix_is_found_again_and_shared() -> None:
    pool = make()
    tokens = list(range(12))
    first = fill(pool, tokens)
    pool.release(first)
    assert pool.num_available == 8
    assert pool.match_prefix(tokens, 11) == first[:2]  # the page with the last token is not taken
    assert pool.match_prefix([*tokens[:4], 99, 98, 97, 96], 8) == first[:1]
    assert pool.match_prefix([5, *tokens], 12) == []
    pool.check_integrity()


def test_equal_pages_computed_twice_become_one() -> None:
    pool = make()
    tokens = list(range(8))
    first = pool.allocate(2)
    second = pool.allocate(2)
    assert first is not None and second is not None
    for pages in (first, second):
        for index in range(2):
            parent = pages[index - 1] if index else None
            pages[index] = pool.register(pages[index], parent, tokens[index * 4 : index * 4 + 4])
    assert second == first
    assert pool.num_available == 6
    pool.release(first)
    pool.release(second)
    assert pool.num_available == 8
    pool.check_integrity()


def test_the_same_tokens_after_another_prefix_are_another_page() -> None:
    pool = make()
    first = fill(pool, [1, 2, 3, 4, 9, 9, 9, 9])
    second = fill(pool, [5, 6, 7, 8, 9, 9, 9, 9])
    assert not set(first) & set(second)


def test_eviction_takes_the_least_recently_used_tail_first() -> None:
    pool = make(4)
    old, new = list(range(8)), list(range(100, 108))
    pool.release(fill(pool, old))
    pool.release(fill(pool, new))
    taken = pool.allocate(1)
    assert taken is not None
    kept = pool.match_prefix(old, 8)
    assert len(kept) == 1  # the tail went, the head stayed
    pool.release(kept)
    assert len(pool.match_prefix(new, 8)) == 2
    pool.check_integrity()


def test_without_caching_everything_is_free_at_once() -> None:
    pool = make(caching=False)
    tokens = list(range(8))
    pool.release(fill(pool, tokens))
    assert pool.match_prefix(tokens, 8) == []
    assert pool.num_available == 8
    pool.check_integrity()


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
                parent = pages[index - 1] if index else None
                page_tokens = tokens[index * 4 : index * 4 + 4]
                pages[index] = pool.register(pages[index], parent, page_tokens)
            held.append(pages)
        pool.check_integrity()
    for pages in held:
        pool.release(pages)
    assert pool.num_available == 16
    pool.check_integrity()
