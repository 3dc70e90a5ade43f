"""Who owns which page of a paged cache: a free list, a table for each sequence, and counts of who shares a page.

After PagedAttention (arXiv 2309.06180), whose blocks are called pages here, as in an operating system. Only numbers
are managed; the keys and values lie in arrays of the caller, who asks for a place before writing there:

    pool = PagePool(pages=8, page=4)
    pool.append("a", 6)                    room for 6 tokens: two pages
    pool.fork("a", "b")                    "b" begins as a copy of "a", and shares its pages
    for source, target in pool.append("b"):
        copy page source to page target    since another sequence reads what lies there
    page, slot = pool.place("b", 6)        where token 6 of "b" is to be written
"""

import numpy as np


class OutOfPagesError(Exception):
    """There are fewer free pages than an operation needs. Nothing has changed: every sequence is as it was."""


class PagePool:
    """Pages 0 to pages - 1, with room for `page` tokens each.

    free: numbers of the pages that nobody holds; the last is taken first.
    counts: for each page, how many sequences hold it.
    tables: {name: the pages of a sequence, in the order of its tokens}.
    lengths: {name: the tokens of a sequence}.
    """

    def __init__(self, pages, page):
        if pages < 1 or page < 1:
            raise ValueError(f"pages and page must be at least 1, got {pages} and {page}")
        self.page = page
        self.free = list(range(pages))[::-1]
        self.counts = [0] * pages
        self.tables, self.lengths = {}, {}

    def append(self, name, tokens=1):
        """Make room for more tokens at the end of a sequence, begun if it is new.

        Returns [(source, target)], the pages that the caller must copy before writing:
        the last page of the sequence, if it has room and others hold it too (copy on
        write). Raises OutOfPagesError.
        """
        if tokens < 1:
            raise ValueError(f"tokens must be at least 1, got {tokens}")
        table, length = self.tables.get(name, []), self.lengths.get(name, 0)
        is_shared = length % self.page > 0 and self.counts[table[-1]] > 1
        needed = is_shared + self.pages_for(length + tokens) - len(table)
        free = len(self.free)
        if needed > free:
            raise OutOfPagesError(f"{name!r} needs {needed} more pages, {free} are free")
        copies = []
        if is_shared:
            copies = [(table[-1], self._take())]
            self._give(table[-1])
            table = [*table[:-1], copies[0][1]]
        self.tables[name] = table + [self._take() for _ in range(needed - is_shared)]
        self.lengths[name] = length + tokens
        return copies

    def fork(self, name, new, tokens=None):
        """Begin the sequence `new` with the first tokens of another, by default all of them, in the same pages."""
        if new in self.tables:
            raise ValueError(f"there is a sequence {new!r} already")
        length = self.lengths[name] if tokens is None else tokens
        if not 0 < length <= self.lengths[name]:
            raise ValueError(f"tokens must lie between 1 and {self.lengths[name]}, got {tokens}")
        self.tables[new] = self.tables[name][: self.pages_for(length)]
        self.lengths[new] = length
        for number in self.tables[new]:
            self.counts[number] += 1

    def release(self, name):
        """Forget a sequence. Pages that nobody else holds are free again."""
        for number in self.tables.pop(name):
            self._give(number)
        del self.lengths[name]

    def place(self, name, position):
        """(page, slot) of the token at a position; of an array of positions, two arrays."""
        if np.any(np.asarray(position) < 0) or np.any(np.asarray(position) >= self.lengths[name]):
            raise IndexError(f"{name!r} has {self.lengths[name]} tokens, there is no position {position}")
        return np.asarray(self.tables[name])[position // self.page], position % self.page

    def table(self, names, width):
        """(page_table, lengths) of sequences as `paged_attention` takes them, int32 (B, width) and (B,).

        Rows are filled up with page 0, whose contents do not matter there.
        """
        rows = [self.tables[name] + [0] * (width - len(self.tables[name])) for name in names]
        return np.array(rows, np.int32), np.array([self.lengths[name] for name in names], np.int32)

    def pages_for(self, tokens):
        """How many pages hold so many tokens."""
        return -(-tokens // self.page)

    def _take(self):
        number = self.free.pop()
        self.counts[number] = 1
        return number

    def _give(self, number):
        self.counts[number] -= 1
        if self.counts[number] == 0:
            self.free.append(number)
