"""The exercises of notebook 13: a cache, one step with it, parts of it, pages, room for a token, and a kernel."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from helpers import paging
from helpers.attention import online_softmax
from helpers.attention.portable.tiles import dot, real
from helpers.attention.reference import oracle
from helpers.environment import backend
from helpers.exercises import whole
from helpers.exercises.again import OF_ROWS, by_hand
from helpers.exercises.exercise import Case, Complaint, Exercise
from helpers.exercises.watched import without


def keys_computed(prompt, new):
    """Keys that a block computes: {"without a cache": …, "with a cache": …}."""
    without = sum(prompt + turn for turn in range(new))
    return {"without a cache": without, "with a cache": prompt + new - 1}


AGAIN = Exercise(keys_computed, "What is computed again", outputs=("keys",), tolerance=1e-9).with_cases(
    "prompt new", ("the case worked by hand", 3, 2), (1, 1), (1, 5), (7, 1), (12, 60), (1000, 300),
).with_mistakes(
    ("each turn counts the token that it is about to choose", ("(new)", "new - 1"), ("(1, new + 1)", "new"),
     "A token is read in the turn after the one that chooses it: see the case worked by hand."),
    ("the last new token is run through the model as well", ("(new)", " - 1}"), ("(new + 1)", "}"),
     "The last token is written and not read: see the case worked by hand."),
    ("the prompt is run token by token without a cache", "sum(prompt + turn for turn in range(new))",
     "sum(range(prompt + new))",
     "The first run goes over the whole prompt at once, and there is no shorter one: see section 1."),
    ("only the last run is counted", "sum(prompt + turn for turn in range(new))", "prompt + new - 1",
     "Without a cache every run computes all keys again, so add up the runs: see section 1."),
)  # fmt: skip


def one_step(query, key, value, key_cache, value_cache, length):
    """Attention of a new token. Returns out (N, H) and both caches with it stored."""
    key_cache, value_cache = key_cache.copy(), value_cache.copy()
    key_cache[length], value_cache[length] = key, value
    keys, values = key_cache[: length + 1], value_cache[: length + 1]
    s = np.einsum("nh,snh->ns", query, keys) / np.sqrt(query.shape[-1])
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    out = np.einsum("ns,snh->nh", p / p.sum(axis=-1, keepdims=True), values)
    return out, key_cache, value_cache


def _step_cases():
    random = np.random.default_rng(132)
    one = lambda *values: np.array(values)[:, None, None]
    by_hand = (np.array([[1.0]]), np.array([[math.log(3)]]), np.array([[8.0]]), one(0.0, 9, 7), one(4.0, 9, 7), 1)
    yield Case("the case worked by hand", by_hand)
    for N, H, S, length, size, label in [
        (2, 4, 6, 3, 1, "the cache half full"), (3, 2, 5, 0, 1, "the first token of all"),
        (2, 8, 7, 6, 1, "the last free place"), (4, 16, 12, 9, 1500, "large logits"),
    ]:  # fmt: skip
        query, key, value = random.standard_normal((3, N, H))
        key_cache, value_cache = random.standard_normal((2, S, N, H))
        left_over = np.arange(S - length)[:, None, None]
        key_cache[length:] = (3 + left_over) * query / np.abs(query).max()  # leftovers that a query would like
        value_cache[length:] = 50 + left_over
        label = f"N={N}, H={H}, S={S}, length={length}: {label}"
        yield Case(label, (size * query, key, value, key_cache, value_cache, length))
    query, value = random.standard_normal((2, 2, 4))
    key_cache, value_cache = random.uniform(1, 2, (6, 1, 1)) * query, random.standard_normal((6, 2, 4))
    key_cache[:4] *= -1  # the last of these becomes the new key
    label = "N=2, H=4, S=6, length=3: large logits, all of them negative"
    yield Case(label, (1e12 * query, key_cache[3].copy(), value, key_cache, value_cache, 3))


STEP = Exercise(
    one_step, "One step with a cache", outputs=("out", "key_cache", "value_cache"), cases=_step_cases,
).with_mistakes(
    ("the new token does not see itself", ": length + 1", ":length",
     "Query `length` sees keys 0 to `length`, which are length + 1 of them: see section 2."),
    ("the new token is stored one place too late", "[length]", "[length + 1]",
     "Places are counted from 0, so the first free one is number `length`: see section 2."),
    ("the whole cache is attended to, with what is left over in it", "[: length + 1]", "",
     "Only keys 0 to `length` are valid: cut the rest off, or mask it, see section 2."),
    ("attention reads the cache as it was before the new token was stored",
     ("    key_cache[length], value_cache[length] = key, value\n", "    return"),
     ("", "    key_cache[length], value_cache[length] = key, value\n    return"),
     "Store first, then attend: the query sees its own key, see section 2."),
    ("what is left over is masked with a number that logits can fall below", ("[: length + 1]", "    p ="),
     ("", "    s[:, length + 1 :] = -1e9\n    p ="),
     "All logits may lie far below 0: cut the rest off, or mask it with -inf, see section 2."),
    ("the largest logit is not subtracted, or that of a key that is not seen", " - s.max(axis=-1, keepdims=True)", "",
     "The exponential of a large logit is infinite: subtract the largest of the keys that are seen, see hint 2."),
)  # fmt: skip


def merge_splits(outs, lses):
    """(out, lse) of all keys. outs: (parts, R, H), lses: (parts, R)."""
    m = lses.max(axis=0)
    m = np.where(np.isneginf(m), 0, m)
    weights = np.exp(lses - m)
    total = weights.sum(axis=0)
    out = (weights[..., None] * outs).sum(axis=0)
    out = out / np.where(total == 0, 1, total)[:, None]
    with np.errstate(divide="ignore"):
        return out, m + np.log(total)


def _merge_cases():
    random = np.random.default_rng(133)
    yield Case("the case worked by hand", (np.array([[[1.0]], [[3.0]]]), np.array([[0.0], [math.log(3)]])))
    for parts, R, H, level, empty, label in [
        (2, 2, 3, 0, [], "every part sees keys"),
        (3, 3, 2, 0, [(0, 0), (1, 1)], "some parts are empty for some rows"),
        (4, 3, 5, np.array([-1000, 0, 1000]), [(2, 0), (0, 2), (1, 2)], "a level of its own in each row"),
        (1, 2, 4, 3, [], "a single part"),
        (5, 4, 2, np.array([0, 5, -800, 0]), [(1, 0)] + [(part, 3) for part in range(5)], "a row that sees no key"),
    ]:
        out, lse = random.standard_normal((parts, R, H)), 3 * random.standard_normal((parts, R)) + level
        lse = np.round(64 * lse) / 64  # exact in float32
        for place in empty:
            out[place], lse[place] = 0, -np.inf
        yield Case(f"parts={parts}, R={R}, H={H}: {label}", (out, lse))


MERGE = Exercise(
    merge_splits, "Merge by lse", outputs=("out", "lse"), cases=_merge_cases,
    run=functools.partial(without, online_softmax),
    tolerance=2e-4,  # in float32 a lse of 1000 is known to four digits behind the point
).with_mistakes(
    ("the parts are averaged, whatever their lse is", "return out", "return outs.mean(axis=0)",
     "A part counts by the sum of its exponentials, which is exp(lse): see section 6."),
    ("the out of a row without any key becomes NaN", "np.where(total == 0, 1, total)[:, None]", "total[:, None]",
     "0 / 0 is NaN, and so is -inf minus -inf: guard what you have of these, see hint 2."),
    ("a row without any key becomes NaN", "    m = np.where(np.isneginf(m), 0, m)\n", "",
     "-inf minus -inf is NaN, and so is 0 / 0: guard both, see hint 2."),
)  # fmt: skip


def places(table, positions, page):
    """The place of each sequence's new token. table: (B, width), positions: (B,)."""
    numbers = table[np.arange(len(table)), positions // page]
    return numbers * page + positions % page


def _place_cases():
    random = np.random.default_rng(134)
    yield Case("the case worked by hand", (np.array([[7, 2], [5, -1]]), np.array([6, 1]), 4))
    for B, width, page in ((1, 3, 5), (3, 4, 2), (3, 4, 6), (4, 6, 16), (5, 2, 1)):
        positions = random.integers(0, width * page, B)
        positions[0] = page - 1  # the last slot of a page
        positions[-1] = page if B > 1 else positions[0]  # the first of the next
        table = random.permutation(B * width + 3)[: B * width].reshape(B, width)
        for row, position in enumerate(positions):
            behind = table[row, position // page + 1 :]
            behind[:] = random.integers(B * width + 3, size=len(behind))
        yield Case(f"B={B}, pages of {page}", (table, positions, page))


PLACES = Exercise(
    places, "Where a token lies", outputs=("places",), cases=_place_cases, run=functools.partial(without, paging),
).with_mistakes(
    ("the page table is not used, as if the pages lay in order", "table[np.arange(len(table)), positions // page]",
     "positions // page", "table[b, j] says where page j of sequence b is: see section 7."),
    ("// and % are exchanged", ("// page]", "% page\n"), ("% page]", "// page\n"),
     "t // page counts whole pages, t % page is the place in the last one: see section 7."),
    ("every sequence is looked up in every row of the table", "np.arange(len(table))", ":",
     "table[:, j] is a whole table: with table[np.arange(B), j] each sequence has its own row, see hint 1."),
)  # fmt: skip


def fit(layers, K, H, itemsize, memory, tokens, longest, page):
    """Returns {"bytes a token": …, "reserved": …, "paged": …}, integers."""
    token = 2 * layers * K * H * itemsize
    pages = memory // (page * token)
    pages_of_a_sequence = -(-tokens // page)
    return {
        "bytes a token": token,
        "reserved": memory // (longest * token),
        "paged": pages // pages_of_a_sequence,
    }


FIT = Exercise(fit, "How many sequences fit", outputs=("result",), tolerance=1e-9).with_cases(
    "layers K H itemsize memory tokens longest page", ("the case worked by hand", 1, 1, 2, 2, 200, 5, 10, 4),
    (2, 3, 4, 4, 20_000, 17, 24, 16), (3, 2, 8, 2, 10_000, 33, 64, 32),
    (32, 8, 128, 2, 64 * 2**30, 1000, 8192, 16), (32, 32, 128, 2, 64 * 2**30, 4096, 4096, 256),
    (36, 8, 128, 1, 10**10, 333, 32768, 1), (80, 8, 128, 2, 50 * 10**9, 100, 131072, 64),
).with_mistakes(
    ("each page counts as a sequence", "pages // pages_of_a_sequence", "pages",
     "A sequence has as many pages as its tokens need: divide by that, see section 7."),
    ("the number of sequences is not rounded", ("y // (l", "s // pages"), ("y / (l", "s / pages"),
     "A part of a sequence is no sequence: divide with //."),
    ("the last page of a sequence counts by its tokens, as if others could use its rest",
     "pages // pages_of_a_sequence", "memory // (tokens * token)",
     "A sequence holds whole pages: round tokens / page up, see section 7."),
)  # fmt: skip


def make_room(table, length, counts, free, page):
    """Room for token number length. Returns {"table": …, "counts": …, "copied": …}."""
    table, counts, copied = list(table), list(counts), -1
    if length % page == 0:
        table.append(free[-1])
        counts[free[-1]] = 1
    elif counts[table[-1]] > 1:
        copied = table[-1]
        counts[copied] -= 1
        counts[free[-1]] = 1
        table[-1] = free[-1]
    return {"table": table, "counts": counts, "copied": copied}


def _run_room(answer, table, length, counts, free, page):
    result = without(paging, answer, table, length, counts, free, page)
    if isinstance(result, dict) and (result.get("table") is table or result.get("counts") is counts):
        raise Complaint("a list of the result is the caller's own, which the caller may change: return new ones")
    return result


ROOM = Exercise(make_room, "Room for one more token", ("result",), run=_run_room, tolerance=1e-9).with_cases(
    "table length counts free page",
    ("the case worked by hand", [3, 5], 6, [0, 0, 0, 2, 0, 2, 1], [0, 4, 2, 1], 4),
    ("a page that is not shared has room", [1], 2, [0, 1, 0, 2], [0, 2], 4),
    ("the last page is full", [2, 0], 8, [1, 0, 1, 0], [1, 3], 4),
    ("the last page is full, and shared", [2, 0], 6, [2, 0, 3, 0, 0], [4, 1, 3], 3),
    ("the first token of all", [], 0, [0, 2, 0], [2, 0], 4),
    ("shared by three", [4, 1, 0], 9, [3, 3, 0, 0, 3], [3, 2], 4),
    ("an earlier page is shared, the last is not", [4, 1, 0], 11, [1, 2, 0, 0, 3], [2, 3], 4),
    ("one slot is left, and shared", [0], 3, [2, 1, 0, 0], [2, 3], 4),
    ("pages of one token, shared", [1, 2], 2, [0, 2, 2, 0], [3, 0], 1),
).with_mistakes(
    ("the last page counts as shared because an earlier one is",
     "counts[table[-1]] > 1", "any(counts[number] > 1 for number in table)",
     "Only the last page is written into: look at its count, see section 8."),
    ("a new page is taken one token too early", "length % page == 0", "(length + 1) % page == 0",
     "Token number `length` opens a page where length is a multiple of page: see section 8."),
    ("the number of the copy is returned instead of that of its source",
     ("copied = table[-1]", "counts[copied] -"), ("copied = free[-1]", "counts[table[-1]] -"),
     'The caller needs to know what to copy: "copied" is the source, see the text of the exercise.'),
)  # fmt: skip


def decode_attention(query, key, value, lengths, parts=4, block_k=64):
    """out, as query (B, N, H), over the first lengths[b] of key, value (B, S, K, H)."""
    (B, N, H), (_, S, K, _) = query.shape, key.shape
    group, head_padded = N // K, max(16, pl.next_power_of_2(H))
    rows = max(16, pl.next_power_of_2(group))
    part = pl.cdiv(pl.cdiv(S, block_k), parts)  # in tiles

    def kernel(q_ref, k_ref, v_ref, length_ref, out_ref, lse_ref):
        length = length_ref[...]
        q = real(q_ref[...], jnp.arange(rows) < group, H)
        first = pl.program_id(1) * part
        stop = jnp.minimum(first + part, pl.cdiv(length, block_k))

        def one_key_tile(j, state):
            m, l, acc = state
            tile = pl.ds(j * block_k, block_k)
            seen = j * block_k + jnp.arange(block_k) < length
            k, v = (real(ref[tile, :], seen, H) for ref in (k_ref, v_ref))
            s = jnp.where(seen, dot(q, k.T) / math.sqrt(H), -jnp.inf)
            m, l, alpha, p = online_softmax.step(m, l, s, exp=jnp.exp)
            return m, l, alpha[:, None] * acc + dot(p.astype(v.dtype), v)

        state = jnp.full(rows, -jnp.inf), jnp.zeros(rows), jnp.zeros(q.shape)
        state = lax.fori_loop(first, stop, one_key_tile, state)
        out_ref[...], lse_ref[...] = online_softmax.finish(*state, log=jnp.log, log_e=1)

    block = lambda sides, place: pl.BlockSpec((None, *sides, head_padded), place)
    heads = block((None, rows), lambda h, j, b: (b, h, 0, 0))
    keys = block((parts * part * block_k, None), lambda h, j, b: (b, 0, h, 0))
    length = pl.BlockSpec((None,), lambda h, j, b: (b,))
    out_tile = block((None, None, rows), lambda h, j, b: (b, h, j, 0, 0))
    lse_tile = pl.BlockSpec((None, None, None, rows), lambda h, j, b: (b, h, j, 0))
    specs = dict(in_specs=[heads, keys, keys, length], out_specs=[out_tile, lse_tile])
    outs = jax.ShapeDtypeStruct((B, K, parts, group, H), jnp.float32)
    lses = jax.ShapeDtypeStruct((B, K, parts, group), jnp.float32)
    run = pl.pallas_call(kernel, [outs, lses], grid=(K, parts, B), **specs, **backend())
    outs, lses = run(query.reshape(B, K, group, H), key, value, lengths)
    weights = jax.nn.softmax(lses, axis=2)
    return (weights[..., None] * outs).sum(axis=2).reshape(B, N, H).astype(query.dtype)


def _decode_cases():
    keys, values = np.log([1.0, 3, 2, 8]), np.array([1.0, 2, 3, 4])
    by_hand = (np.ones((1, 1, 1)), keys[None, :, None, None], values[None, :, None, None])
    yield Case(
        "the case worked by hand", (*(array.astype(np.float32) for array in by_hand), np.array([4], np.int32), 2, 2)
    )
    random = np.random.default_rng(137)
    for (B, S, N, K, H), lengths, tiles, dtype, push, label in [
        ((2, 32, 4, 2, 4), (32, 9), (2, 8), np.float32, 0, "a part without a key"),
        ((1, 37, 6, 2, 5), (37,), (3, 8), np.float32, 0, "a last part that is shorter"),
        ((2, 16, 2, 2, 8), (1, 14), (2, 4), np.float32, 200, "large logits, the largest first"),
        ((2, 44, 20, 1, 3), (13, 44), (2, 8), np.float32, -300, "20 heads for one key head, all logits far below 0"),
        ((1, 40, 4, 2, 8), (33,), (2, 8), jnp.bfloat16, 0, "bfloat16"),
        ((2, 70, 4, 2, 8), (70, 33), (), np.float32, 0, "your default parts and tiles, not replayed but run"),
    ]:
        query = random.standard_normal((B, N, H))
        key, value = random.standard_normal((2, B, S, K, H))
        query[..., 0] = math.sqrt(H)  # so that the first component of a key moves its logits
        key[..., 0] += push * np.where(np.arange(S) < 4, 1, 0.9)[:, None]
        for b, length in enumerate(lengths):
            key[b, length:], value[b, length:] = 3, np.inf  # what another sequence left behind
        about = f"B={B}, S={S}, N={N}, K={K}, H={H}, lengths={list(lengths)}"
        about += ", parts={}, block_k={}: ".format(*tiles) + label if tiles else f": {label}"
        arrays = (array.astype(dtype) for array in (query, key, value))
        yield Case(about, (*arrays, np.array(lengths, np.int32), *tiles))


def _run_decode(answer, *arguments):
    """out, and how it was made."""
    query, key, _, _, *tiles = arguments
    rows = max(16, pl.next_power_of_2(query.shape[1] // key.shape[2]))
    blocks, right = [rows, *tiles[1:]] if tiles else (), _expected_decode(*arguments)[:1]
    out, way = whole.results(answer, decode_attention, arguments, {"out": query.dtype}, right, blocks)
    if not tiles:
        return out, way
    (busiest, outputs, runs), (share, *_) = (whole.first_kernel(each, arguments) for each in (answer, decode_attention))
    if way == whole.AS_ASKED and busiest > share:
        way = "with more keys for a program than its part has"
    if way == whole.AS_ASKED and not runs:
        way = "with a part that is no run of tiles"
    if way == whole.AS_ASKED and len(outputs) > 2:
        way = "with more of a part than its out and its lse"
    if way == whole.AS_ASKED and min(outputs) < 4:
        way = "with parts in 16 bits"
    return out, way


def _expected_decode(query, key, value, lengths, *_):
    value = np.where(np.isfinite(np.float32(value)), value, 0)
    out, _ = oracle(query[:, None], key, value, key_value_seq_lengths=lengths)
    return out[:, 0], whole.AS_ASKED


DECODE = Exercise(
    decode_attention, "A kernel that decodes", outputs=("out", "how it was made"), building_block="decode", slow=True,
    cases=_decode_cases, run=_run_decode, expected=_expected_decode, tolerance=1e-4,
).with_mistakes(
    ("keys behind the length of a sequence count as well", "< length\n", "< S\n",
     "Sequence b sees its first lengths[b] keys: mask the others, see section 2."),
    ("values behind the length are multiplied by a weight of zero, and zero times infinity is NaN",
     "seen, H", "seen | (ref is v_ref), H",
     "Whatever lies behind the length must not meet a weight: put zeros there, see section 6 of notebook 05."),
    ("a masked key has the logit 0 instead of minus infinity", "math.sqrt(H), -jnp.inf)", "math.sqrt(H), 0)",
     "exp(0) is 1: mask a logit with minus infinity, see section 6 of notebook 05."),
    ("one part has all keys", "pl.cdiv(pl.cdiv(S, block_k), parts)", "pl.cdiv(S, block_k)",
     "A part has as many tiles as any other, so that all programs read: see section 6."),
    ("the results of the parts are averaged", "jax.nn.softmax(lses, axis=2)", "jnp.ones_like(lses) / parts",
     "A part counts by its share of the sum of exponentials: see the equation of section 6."),
    *by_hand(),
    (OF_ROWS[-1][0], "pl.cdiv(length, block_k)", "length // block_k", OF_ROWS[-1][-1]),
    ("tiles behind the length are read, though they count for nothing",
     "jnp.minimum(first + part, pl.cdiv(length, block_k))", "first + part",
     "Bytes are what a step waits for: end the loop where the sequence ends, see section 4."),
)  # fmt: skip

EXERCISES = (AGAIN, STEP, MERGE, PLACES, FIT, ROOM, DECODE)
ORDER = (1, 2, 3, 7, 4, 5, 6)  # in which the notebook shows them
