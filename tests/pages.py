# SPDX-License-Identifier: Apache-2.0
"""Invariants of an engine's pages."""

from specops.engine.memory.kv_cache import PagePool


def check_pages(pool: PagePool) -> None:
    """Fail if a page is lost, counted twice, or findable by a wrong key."""
    free, cached = set(pool._free), set(pool._cached)
    held = {page for page, refs in enumerate(pool._refs) if refs > 0}
    assert len(free) == len(pool._free), "a page is free twice"
    assert not (free & cached or free & held or cached & held), "a page is in two states"
    assert len(free) + len(cached) + len(held) == pool.num_pages, "a page is lost"
    shared = sum(refs > 1 for refs in pool._refs)
    assert shared == pool.num_shared_pages, "shared pages are counted wrongly"
    assert not (free & set(pool._place_of)), "a free page is findable"
    assert cached <= set(pool._place_of), "a cached page is not findable"
    assert all(root.children for root in pool._roots.values()), "a salt without a page"
    found, prefixes = {}, [*pool._roots.values()]
    while prefixes:
        prefix = prefixes.pop()
        assert prefix.pages or prefix.parent is None, "a prefix without a page"
        found.update({page: (prefix, key) for key, page in prefix.pages.items()})
        for tokens, child in prefix.children.items():
            assert child.parent is prefix and child.tokens == tokens, "a prefix is misplaced"
            prefixes.append(child)
    assert found == pool._place_of, "a page is lost to the tree, or findable by a wrong key"
