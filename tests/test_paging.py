"""The page allocator: whatever is done, every sequence reads its own tokens, and no page is lost."""

import copy

import numpy as np
import pytest

from helpers.paging import OutOfPagesError, PagePool


class Cache:
    """A pool and the tokens in its pages, beside the tokens that each sequence should have."""

    def __init__(self, pages, page):
        self.pool, self.stored, self.right, self.count = PagePool(pages, page), np.full((pages, page), -1), {}, 0

    def append(self, name, tokens):
        before = len(self.right.get(name, []))
        shared = before % self.pool.page and self.pool.counts[self.pool.tables[name][-1]] > 1
        copies = self.pool.append(name, tokens)
        assert len(copies) == bool(shared), "only a page that is shared and not full is copied"
        for source, target in copies:
            self.stored[target] = self.stored[source]
        new = np.arange(self.count, self.count + tokens)
        self.stored[self.pool.place(name, np.arange(before, before + tokens))] = new
        self.right[name] = [*self.right.get(name, []), *new.tolist()]
        self.count += tokens

    def fork(self, name, new, tokens):
        self.pool.fork(name, new, tokens)
        self.right[new] = self.right[name][:tokens]

    def release(self, name):
        self.pool.release(name)
        del self.right[name]

    def check(self):
        pool = self.pool
        for name, right in self.right.items():
            (table,), (length,) = pool.table([name], width=len(self.stored))
            assert self.stored[table].reshape(-1)[:length].tolist() == right
            assert len(pool.tables[name]) == -(-length // pool.page)
        held = [number for table in pool.tables.values() for number in table]
        assert pool.counts == [held.count(number) for number in range(len(self.stored))]
        assert sorted(pool.free + list(set(held))) == list(range(len(self.stored)))
        assert pool.tables.keys() == pool.lengths.keys() == self.right.keys()


@pytest.mark.parametrize("page", [1, 3, 4])
def test_whatever_is_done_every_sequence_reads_its_own_tokens(page):
    random, cache, refused, copied = np.random.default_rng(page), Cache(12, page), 0, 0
    for step in range(400):
        names = list(cache.right)
        action = random.choice(["append", "append", "fork", "release"]) if names else "append"
        name = str(random.choice(names)) if names else "0"
        before = copy.deepcopy(vars(cache.pool))
        try:
            if action == "append":
                cache.append(name if random.random() < 0.8 else f"new {step}", int(random.integers(1, 6)))
                copied += any(before["counts"][number] > 1 for number in before["tables"].get(name, [])[-1:])
            elif action == "fork":
                cache.fork(name, f"fork {step}", int(random.integers(1, len(cache.right[name]) + 1)))
            else:
                cache.release(name)
        except OutOfPagesError:
            refused += 1
            assert vars(cache.pool) == before
        cache.check()
    assert refused > 10 and (copied > 10 or page == 1), "the test was to try these"


def test_wrong_arguments_are_refused():
    pool = PagePool(4, 4)
    pool.append("a", 3)
    for refused in (lambda: pool.append("a", 0), lambda: pool.fork("a", "a"), lambda: pool.fork("a", "b", 4)):
        with pytest.raises(ValueError, match=r"must|already"):
            refused()
    with pytest.raises(IndexError, match="'a' has 3 tokens"):
        pool.place("a", np.array([0, 3]))
    assert pool.tables == {"a": [0]} and pool.counts == [1, 0, 0, 0]
