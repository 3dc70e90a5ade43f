"""The exercises of notebook 13."""

import functools
import math

import numpy as np

from helpers.exercises.checking import Case, Exercise, Mistake

# 13.1 What is computed again

WITHOUT, WITH = "without a cache", "with a cache"


def _keys(without=lambda prompt, new: sum(prompt + i for i in range(new)), cached=lambda prompt, new: prompt + new - 1):
    """The answer to 13.1, or a wrong one that differs from it in the parts that are passed."""
    return lambda prompt, new: {WITHOUT: without(prompt, new), WITH: cached(prompt, new)}


_AGAIN = Exercise(
    number="13.1",
    title="What is computed again",
    outputs=("keys",),
    cases=lambda: [
        Case(f"{'the case worked by hand, ' if number == 0 else ''}prompt={prompt}, new={new}", (prompt, new))
        for number, (prompt, new) in enumerate([(3, 2), (1, 1), (1, 5), (7, 1), (12, 60), (1000, 300)])
    ],
    expected=_keys(),
    tolerance=1e-9,
    tried="prompts of 1 to 1000 tokens, 1 to 300 new ones",
    mistakes=(
        Mistake(
            "the last new token counts as well, though nothing follows it that would need its key",
            _keys(lambda p, n: sum(p + i for i in range(1, n + 1)), lambda p, n: p + n),
            "The last token is written and not read: see the case worked by hand.",
        ),
        Mistake(
            "the last new token is run without a cache, though nothing follows it",
            _keys(lambda p, n: sum(p + i for i in range(1, n + 1))),
            "The first new token is chosen after a run over the prompt alone: see section 1.",
        ),
        Mistake(
            "one run too many is counted without a cache",
            _keys(lambda p, n: sum(p + i for i in range(n + 1))),
            "There is one run for each new token, and the first is over the prompt alone: see section 1.",
        ),
        Mistake(
            "the key of the last new token is put into the cache, though nothing follows it",
            _keys(cached=lambda p, n: p + n),
            "The last token is written and not read: see the case worked by hand.",
        ),
        Mistake(
            "the prompt is forgotten in the cache",
            _keys(cached=lambda p, n: n),
            "The keys of the prompt are computed once, too: see section 1.",
        ),
        Mistake(
            "the prompt is forgotten in the cache, where only later tokens are counted",
            _keys(cached=lambda p, n: n - 1),
            "The keys of the prompt are computed once, too: see section 1.",
        ),
        Mistake(
            "the prompt is forgotten without a cache",
            _keys(without=lambda p, n: n * (n + 1) // 2),
            "Every run goes over the prompt as well: see the case worked by hand.",
        ),
        Mistake(
            "the prompt is run token by token without a cache",
            _keys(without=lambda p, n: (p + n - 1) * (p + n) // 2),
            "The first run goes over the whole prompt at once, and there is no shorter one: see section 1.",
        ),
        Mistake(
            "every run is as long as the finished text",
            _keys(without=lambda p, n: n * (p + n)),
            "Run i goes over the prompt and i new tokens: see the case worked by hand.",
        ),
        Mistake(
            "every run is as long as the last one",
            _keys(without=lambda p, n: n * (p + n - 1)),
            "Run i goes over the prompt and i new tokens: see the case worked by hand.",
        ),
        Mistake(
            "every run is as long as the prompt",
            _keys(without=lambda p, n: n * p),
            "The text grows by a token from run to run: see the case worked by hand.",
        ),
        Mistake(
            "one run too few is counted without a cache",
            _keys(without=lambda p, n: sum(p + i for i in range(n - 1))),
            "There is one run for each new token, and the first is over the prompt: see section 1.",
        ),
        Mistake(
            "the finished text is run token by token without a cache",
            _keys(without=lambda p, n: (p + n) * (p + n + 1) // 2),
            "The first run goes over the whole prompt at once, the last lacks the last new token: see section 1.",
        ),
        Mistake(
            "one turn of the cache is counted instead of all",
            _keys(cached=lambda p, n: 1),
            "The first turn computes the keys of the prompt, and each later turn one more: see section 1.",
        ),
        Mistake(
            "only the last run is counted",
            _keys(without=lambda p, n: p + n - 1),
            "Without a cache every run computes all keys again, so add up the runs: see section 1.",
        ),
        Mistake(
            "products of queries and keys are counted instead of keys",
            _keys(lambda p, n: sum((p + i) ** 2 for i in range(n)), lambda p, n: p * p + sum(range(p + 1, p + n))),
            "A run over so many tokens computes as many keys: see the case worked by hand.",
        ),
        Mistake(
            "the two are exchanged",
            _keys(lambda p, n: p + n - 1, lambda p, n: sum(p + i for i in range(n))),
            "Without a cache is the larger one, where they differ: see section 1.",
        ),
    ),
)

# 13.2 One step with a cache


def _step_cases():
    random = np.random.default_rng(132)
    one = lambda *values: np.array(values)[:, None, None]
    by_hand = (np.array([[1.0]]), np.array([[math.log(3)]]), np.array([[8.0]]), one(0.0, 9, 7), one(4.0, 9, 7), 1)
    cases = [Case("the case worked by hand", by_hand)]
    for N, H, S, length, size, label in [
        (2, 4, 6, 3, 1, "the cache half full"),
        (3, 2, 5, 0, 1, "the first token of all"),
        (2, 8, 7, 6, 1, "the last free place"),
        (4, 16, 12, 9, 1500, "large logits"),
    ]:
        query, key, value = random.standard_normal((3, N, H))
        key_cache, value_cache = random.standard_normal((2, S, N, H))
        left_over = np.arange(S - length)[:, None, None]
        key_cache[length:] = (3 + left_over) * query / np.abs(query).max()  # leftovers that a query would like
        value_cache[length:] = 50 + left_over
        label = f"N={N}, H={H}, S={S}, length={length}: {label}"
        cases.append(Case(label, (size * query, key, value, key_cache, value_cache, length)))
    query, value = random.standard_normal((2, 2, 4))
    key_cache, value_cache = random.uniform(1, 2, (6, 1, 1)) * query, random.standard_normal((6, 2, 4))
    key_cache[:4] *= -1  # the last of these becomes the new key
    label = "N=2, H=4, S=6, length=3: large logits, all of them negative"
    cases.append(Case(label, (1e12 * query, key_cache[3].copy(), value, key_cache, value_cache, 3)))
    return cases


def _step(
    at=lambda length: length,
    seen=lambda length: length + 1,
    scale=lambda H: H**-0.5,
    attend=None,
    stored=lambda query, key, value: (key, value),
    attend_to_old=False,
    returned=lambda keys, values, length: (keys, values),
):
    """The answer to 13.2, or a wrong one that differs from it in the parts that are passed."""

    def answer(query, key, value, key_cache, value_cache, length):
        keys, values = key_cache.copy(), value_cache.copy()
        keys[at(length)], values[at(length)] = stored(query, key, value)
        k, v = (key_cache, value_cache) if attend_to_old else (keys, values)
        k, v = k[: seen(length)], v[: seen(length)]
        s = scale(query.shape[1]) * np.einsum("nh,snh->ns", query, k)
        out = np.einsum("ns,snh->nh", (attend or _softmax)(s), v)
        return out, *returned(keys, values, length)

    return answer


def _softmax(s, axis=-1):
    p = np.exp(s - s.max(axis=axis, keepdims=True))
    return p / p.sum(axis=axis, keepdims=True)


def _not_normalised(s):
    return np.exp(s - s.max(axis=-1, keepdims=True))


def _left_over_at(masked, query, key, value, key_cache, value_cache, length):
    _, keys, values = _step()(query, key, value, key_cache, value_cache, length)
    s = np.einsum("nh,snh->ns", query, keys) * query.shape[1] ** -0.5
    s[:, length + 1 :] = masked
    return np.einsum("ns,snh->nh", _softmax(s), values), keys, values


def _appended(query, key, value, key_cache, value_cache, length):
    out, _, _ = _step()(query, key, value, key_cache, value_cache, length)
    return out, np.concatenate([key_cache, key[None]]), np.concatenate([value_cache, value[None]])


_STEP = Exercise(
    number="13.2",
    title="One step with a cache",
    outputs=("out", "key_cache", "value_cache"),
    cases=_step_cases,
    expected=_step(),
    tried="an empty cache, a half full one and the last free place, leftovers behind the valid keys, large logits",
    mistakes=(
        Mistake(
            "the new token does not see itself",
            _step(seen=lambda length: length),
            "Query `length` sees keys 0 to `length`, which are length + 1 of them: see section 2.",
        ),
        Mistake(
            "the new token is stored one place too late",
            _step(at=lambda length: length + 1, seen=lambda length: length + 1),
            "Places are counted from 0, so the first free one is number `length`: see section 2.",
        ),
        Mistake(
            "the new token is stored one place too late, and one more key is seen",
            _step(at=lambda length: length + 1, seen=lambda length: length + 2),
            "Places are counted from 0, so the first free one is number `length`: see section 2.",
        ),
        Mistake(
            "the new token takes the place of the last one",
            _step(at=lambda length: length - 1),
            "Places are counted from 0, so the first free one is number `length`: see section 2.",
        ),
        Mistake(
            "the new token takes the place of the last one, and one key fewer is seen",
            _step(at=lambda length: length - 1, seen=lambda length: length),
            "Places are counted from 0, so the first free one is number `length`: see section 2.",
        ),
        Mistake(
            "the new token always goes to the end of the cache",
            _step(at=lambda length: -1),
            "It goes to the first free place, number `length`: see section 2.",
        ),
        Mistake(
            "the whole cache is attended to, with what is left over in it",
            _step(seen=lambda length: None),
            "Only keys 0 to `length` are valid: cut the rest off, or mask it, see section 2.",
        ),
        Mistake(
            "one key too many is seen",
            _step(seen=lambda length: length + 2),
            "Only keys 0 to `length` are valid: cut the rest off, or mask it, see section 2.",
        ),
        Mistake(
            "attention reads the cache as it was before the new token was stored",
            _step(attend_to_old=True),
            "Store first, then attend: the query sees its own key, see section 2.",
        ),
        Mistake(
            "only the new token is attended to",
            lambda query, key, value, *rest: (value, *_step()(query, key, value, *rest)[1:]),
            "The query sees all keys that are in the cache: see section 2.",
        ),
        Mistake(
            "the scale is forgotten",
            _step(scale=lambda H: 1.0),
            "The logits are multiplied by 1 / sqrt(H): see the text of the exercise.",
        ),
        Mistake(
            "the scale is 1 / H",
            _step(scale=lambda H: 1 / H),
            "The logits are multiplied by 1 / sqrt(H): see the text of the exercise.",
        ),
        Mistake(
            "the weights do not sum to one",
            _step(attend=_not_normalised),
            "Divide by the sum of the exponentials, head by head.",
        ),
        Mistake(
            "one maximum serves all heads",
            _step(attend=lambda s: np.exp(s - s.max()) / np.exp(s - s.max()).sum(axis=-1, keepdims=True)),
            "A head whose logits lie far below the largest of all loses its exponentials: take a maximum for each.",
        ),
        Mistake(
            "the softmax runs over the heads instead of the keys",
            _step(attend=lambda s: _softmax(s, axis=0)),
            "Each head has a softmax over its keys: with s of shape (N, keys), along the last axis.",
        ),
        Mistake(
            "one softmax serves all heads together",
            _step(attend=lambda s: _softmax(s.reshape(1, -1)).reshape(s.shape)),
            "Each head has a softmax over its keys: with s of shape (N, keys), along the last axis.",
        ),
        Mistake(
            "the exponentials of large logits overflow, or all vanish",
            _step(attend=lambda s: np.exp(s) / np.exp(s).sum(axis=-1, keepdims=True)),
            "Take off the largest valid logit of each head before the exponential: those of leftovers do not count.",
        ),
        Mistake(
            "the logits themselves are the weights",
            _step(attend=lambda s: s),
            "Attention needs the softmax of the logits, head by head.",
        ),
        Mistake(
            "the logits of what is left over are set to 0 instead of being left out",
            functools.partial(_left_over_at, 0),
            "exp(0) is 1: cut the rest off, or mask it with -inf, see section 2.",
        ),
        Mistake(
            "what is left over is masked with a number that logits can fall below",
            functools.partial(_left_over_at, -1e4),
            "All logits may lie far below 0: cut the rest off, or mask it with -inf, see section 2.",
            variants=(functools.partial(_left_over_at, -1e9), functools.partial(_left_over_at, -1e10)),
        ),
        Mistake(
            "query and key are exchanged",
            lambda query, key, value, *rest: _step()(key, query, value, *rest),
            "The key is stored, and the query multiplies all keys: see section 2.",
        ),
        Mistake(
            "the query is stored in place of the key",
            _step(stored=lambda query, key, value: (query, value)),
            "Queries are used once and not kept: see section 2.",
        ),
        Mistake(
            "key and value are stored in each other's cache",
            _step(stored=lambda query, key, value: (value, key)),
            "Keys go to key_cache, values to value_cache.",
        ),
        Mistake(
            "the value is not stored",
            lambda query, key, value, key_cache, value_cache, length: _step(
                stored=lambda query, key, value: (key, value_cache[length])
            )(query, key, value, key_cache, value_cache, length),
            "Both are stored, the key and the value: see section 2.",
        ),
        Mistake(
            "the caches are returned as they came",
            lambda query, key, value, key_cache, value_cache, length: (
                _step()(query, key, value, key_cache, value_cache, length)[0],
                key_cache,
                value_cache,
            ),
            "The next step needs the new key and value: return the caches with them.",
        ),
        Mistake(
            "the caches are cut to their valid part",
            _step(returned=lambda keys, values, length: (keys[: length + 1], values[: length + 1])),
            "A cache keeps its shape, so that one compiled step serves all lengths: see section 2.",
        ),
        Mistake(
            "the caches grow at their end",
            _appended,
            "A cache keeps its shape: the new token goes to the first free place, number `length`.",
        ),
        Mistake(
            "what is left over in the caches is cleared",
            _step(
                returned=lambda keys, values, length: (
                    np.where(np.arange(len(keys))[:, None, None] <= length, keys, 0),
                    np.where(np.arange(len(values))[:, None, None] <= length, values, 0),
                )
            ),
            "Change one place of each cache and leave the rest as it is: see the text of the exercise.",
        ),
        Mistake(
            "what is left over in the caches is moved up by a place",
            lambda query, key, value, key_cache, value_cache, length: (
                _step()(query, key, value, key_cache, value_cache, length)[0],
                np.insert(key_cache, length, key, axis=0)[:-1],
                np.insert(value_cache, length, value, axis=0)[:-1],
            ),
            "Change one place of each cache and leave the rest as it is: see the text of the exercise.",
        ),
    ),
)

# 13.3 Merge by lse


def _merge_cases():
    random = np.random.default_rng(133)
    by_hand = np.array([[[1.0]], [[3.0]]]), np.array([[0.0], [math.log(3)]])
    cases = [Case("the case worked by hand", by_hand)]
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
        cases.append(Case(f"parts={parts}, R={R}, H={H}: {label}", (out, lse)))
    return cases


def _merge(
    weight=lambda lse, m: np.exp(lse - m),
    reference=lambda lse: np.where(np.isneginf(lse.max(axis=0)), 0, lse.max(axis=0)),
    divide=True,
    lse_of=lambda m, total: m + np.log(total),
    guarded=True,
):
    """The answer to 13.3, or a wrong one that differs from it in the parts that are passed."""

    def answer(outs, lses):
        m = reference(lses)
        w = weight(lses, m)
        total = w.sum(axis=0)
        divisor = (np.where(total == 0, 1, total) if guarded else total) if divide else np.ones_like(total)
        return (w[..., None] * outs).sum(axis=0) / divisor[:, None], lse_of(m, total)

    return answer


def _one_after_another(outs, lses):
    """Two by two, with the second part always given half."""
    out, lse = outs[0], lses[0]
    for out_b, lse_b in zip(outs[1:], lses[1:], strict=True):
        out, lse = (out + out_b) / 2, np.logaddexp(lse, lse_b)
    return out, lse


def _with_lse(out):
    """A wrong out, beside the right lse."""
    return lambda outs, lses: (out(outs, lses), _merge()(outs, lses)[1])


def _with_out(lse):
    """A wrong lse, beside the right out."""
    return lambda outs, lses: (_merge()(outs, lses)[0], lse(outs, lses))


_MERGE = Exercise(
    number="13.3",
    title="Merge by lse",
    outputs=("out", "lse"),
    cases=_merge_cases,
    expected=_merge(),
    tolerance=2e-4,  # in float32 a lse of 1000 is known to four digits behind the point
    tried="1 to 5 parts, lse of about -1000 to 1000, parts without keys, and a row without any",
    mistakes=(
        Mistake(
            "the parts are averaged, whatever their lse is",
            _with_lse(lambda outs, lses: outs.mean(axis=0)),
            "A part counts by the sum of its exponentials, which is exp(lse): see section 6.",
        ),
        Mistake(
            "the outs of the parts are added up",
            _with_lse(lambda outs, lses: outs.sum(axis=0)),
            "Each out is divided by its own sum already; weight it by exp(its lse - lse of all): see section 6.",
        ),
        Mistake(
            "the parts are weighted by lse itself",
            _with_lse(lambda outs, lses: (lses[..., None] * outs).sum(axis=0) / lses.sum(axis=0)[:, None]),
            "lse is the logarithm of a part's sum: its weight is exp(lse), see section 6.",
        ),
        Mistake(
            "two parts after the other are averaged",
            _with_lse(lambda outs, lses: _one_after_another(outs, lses)[0]),
            "A part counts by the sum of its exponentials, which is exp(lse): see section 6.",
        ),
        Mistake(
            "exp(lse) overflows or vanishes, because no maximum is taken off",
            _merge(reference=lambda lse: np.zeros(lse.shape[1])),
            "Take the largest lse of each row off first, and add it back to the logarithm: see section 6.",
        ),
        Mistake(
            "exp(lse) overflows or vanishes, and a row without keys becomes NaN",
            _merge(reference=lambda lse: np.zeros(lse.shape[1]), guarded=False),
            "Take the largest lse of each row off first, and add it back to the logarithm: see section 6.",
        ),
        Mistake(
            "one maximum serves all rows",
            _merge(reference=lambda lse: np.full(lse.shape[1], lse.max())),
            "Every row has its own largest lse: take the maximum along the parts, see hint 1.",
            variants=(_merge(reference=lambda lse: np.full(lse.shape[1], lse.max()), guarded=False),),
        ),
        Mistake(
            "a row without any key becomes NaN",
            _merge(reference=lambda lse: lse.max(axis=0), guarded=False),
            "-inf minus -inf is NaN, and so is 0 / 0: guard both, see hint 2.",
        ),
        Mistake(
            "a row without any key becomes NaN, by 0 / 0",
            _merge(guarded=False),
            "Its weights sum to 0: divide by something else there, see hint 2.",
        ),
        Mistake(
            "the sum of the weights is not divided by",
            _merge(divide=False),
            "The weights must sum to one: see section 6.",
        ),
        Mistake(
            "the lse of the whole is the largest lse",
            _with_out(lambda outs, lses: lses.max(axis=0)),
            "lse is the logarithm of a sum over all parts: see section 6.",
        ),
        Mistake(
            "the lse of the whole is the sum of the lse",
            _with_out(lambda outs, lses: lses.sum(axis=0)),
            "Add the exponentials, not their logarithms: see section 6.",
        ),
        Mistake(
            "the lse of the whole is the mean of the lse",
            _with_out(lambda outs, lses: lses.mean(axis=0)),
            "Add the exponentials, then take the logarithm: see section 6.",
        ),
        Mistake(
            "the maximum is not added back to lse",
            _merge(lse_of=lambda m, total: np.log(total)),
            "What was taken off inside is added outside: m + log of the sum, see section 6.",
        ),
        Mistake(
            "the maximum is taken off lse once more",
            _merge(lse_of=lambda m, total: np.log(total) - m),
            "What was taken off inside is added outside: m + log of the sum, see section 6.",
        ),
        Mistake(
            "the logarithm is forgotten in lse",
            _merge(lse_of=lambda m, total: m + total),
            "lse = m + log of the sum: see section 6.",
        ),
        Mistake(
            "the logarithm in lse is one to the base 2",
            _merge(lse_of=lambda m, total: m + np.log2(total)),
            "lse is a natural logarithm: use np.log.",
        ),
        Mistake(
            "the exponentials are averaged in lse",
            lambda outs, lses: (
                _merge()(outs, lses)[0],
                _merge()(outs, lses)[1] - np.log(len(lses)),
            ),
            "lse is the logarithm of a sum: see section 6.",
        ),
        Mistake(
            "the weights are powers of 2",
            _merge(weight=lambda lse, m: np.exp2(lse - m)),
            "lse is a natural logarithm: the weights are np.exp of it.",
        ),
        Mistake(
            "the weights are powers of 2, and lse is right",
            _with_lse(lambda outs, lses: _merge(weight=lambda lse, m: np.exp2(lse - m))(outs, lses)[0]),
            "lse is a natural logarithm: the weights are np.exp of it.",
        ),
        Mistake(
            "the sign of lse in the weights is turned round",
            _merge(weight=lambda lse, m: np.where(np.isneginf(lse), 0, np.exp(m - lse))),
            "A part with a larger lse counts more: exp(lse - m), see section 6.",
        ),
        Mistake(
            "the weights are normalised over the rows instead of the parts",
            _with_lse(lambda outs, lses: (_softmax(lses, axis=1)[..., None] * outs).sum(axis=0)),
            "The parts of one row compete: the sum runs along the first axis, see hint 1.",
        ),
        Mistake(
            "the weights are normalised over all rows and parts together",
            _with_lse(lambda outs, lses: (_softmax(lses.reshape(1, -1)).reshape(*lses.shape, 1) * outs).sum(axis=0)),
            "Each row has weights of its own, over its parts: see hint 1.",
        ),
        Mistake(
            "out and lse are both averaged over the parts",
            lambda outs, lses: (outs.mean(axis=0), lses.mean(axis=0)),
            "A part counts by the sum of its exponentials, which is exp(lse): see section 6.",
        ),
        Mistake(
            "out and lse are both added up over the parts",
            lambda outs, lses: (outs.sum(axis=0), lses.sum(axis=0)),
            "Add the exponentials, not their logarithms, and weight each out: see section 6.",
        ),
        Mistake(
            "out and lse are the largest of the parts",
            lambda outs, lses: (outs.max(axis=0), lses.max(axis=0)),
            "All parts count, each by exp(lse): see section 6.",
        ),
        Mistake(
            "out is divided by the number of parts as well",
            _with_lse(lambda outs, lses: _merge()(outs, lses)[0] / len(outs)),
            "The weights sum to one already: see section 6.",
        ),
        Mistake(
            "the sum of exponentials is returned instead of its logarithm",
            _with_out(lambda outs, lses: np.exp(_merge()(outs, lses)[1])),
            "lse is a logarithm, which also keeps it in range: see section 6.",
        ),
        Mistake(
            "only the part with the largest lse is taken",
            _with_lse(lambda outs, lses: np.take_along_axis(outs, lses.argmax(axis=0)[None, :, None], axis=0)[0]),
            "All parts count, each by exp(lse): see section 6.",
        ),
        Mistake(
            "only the last part is taken",
            lambda outs, lses: (outs[-1], lses[-1]),
            "All parts count, each by exp(lse): see section 6.",
        ),
    ),
)

# 13.4 Where a token lies


def _place_cases():
    random = np.random.default_rng(134)
    cases = [Case("the case worked by hand", (np.array([[7, 2], [5, -1]]), np.array([6, 1]), 4))]
    for B, width, page, label in [
        (1, 3, 5, "one sequence"),
        (3, 4, 2, "three sequences"),
        (3, 4, 6, "three sequences"),
        (4, 6, 16, "four sequences"),
        (5, 2, 1, "a page for each token"),
    ]:
        positions = random.integers(0, width * page, B)
        positions[0] = page - 1  # the last slot of a page
        positions[-1] = page if B > 1 else positions[0]  # the first of the next
        table = random.permutation(B * width + 3)[: B * width].reshape(B, width)
        for row, position in enumerate(positions):
            behind = table[row, position // page + 1 :]
            behind[:] = random.integers(B * width + 3, size=len(behind))
        cases.append(Case(f"B={B}, pages of {page}: {label}", (table, positions, page)))
    return cases


def _places(number=lambda table, b, j: table[b, j], entry=None, slot=None, join=None):
    """The answer to 13.4, or a wrong one that differs from it in the parts that are passed."""
    entry, slot = entry or (lambda t, page: t // page), slot or (lambda t, page: t % page)
    join = join or (lambda number, slot, page, table: number * page + slot)

    def answer(table, positions, page):
        b = np.arange(len(table))
        return join(number(table, b, entry(positions, page)), slot(positions, page), page, table)

    return answer


_PLACES = Exercise(
    number="13.4",
    title="Where a token lies",
    outputs=("places",),
    cases=_place_cases,
    expected=_places(),
    tried="1 to 5 sequences, pages of 1 to 16 tokens, a page's last slot and the next one's first, anything behind",
    mistakes=(
        Mistake(
            "the page table is not used, as if the pages lay in order",
            _places(number=lambda table, b, j: j),
            "table[b, j] says where page j of sequence b is: see section 7.",
        ),
        Mistake(
            "each sequence lies in pages of its own, one after the other",
            lambda table, positions, page: np.arange(len(table)) * table.shape[1] * page + positions,
            "Pages lie anywhere: table[b, j] says where page j of sequence b is, see section 7.",
        ),
        Mistake(
            "// and % are exchanged",
            _places(entry=lambda t, page: t % page, slot=lambda t, page: t // page),
            "t // page counts whole pages, t % page is the place in the last one: see section 7.",
        ),
        Mistake(
            "all sequences are looked up in the first row of the table",
            _places(number=lambda table, b, j: table[0, j]),
            "Sequence b has row b of the table: see section 7.",
        ),
        Mistake(
            "every sequence is looked up in every row of the table",
            _places(number=lambda table, b, j: table[:, j]),
            "table[:, j] is a whole table: with table[np.arange(B), j] each sequence has its own row, see hint 1.",
        ),
        Mistake(
            "only the first page of each sequence is looked up",
            _places(number=lambda table, b, j: table[b, 0]),
            "Position t is in page t // page of its sequence: see section 7.",
        ),
        Mistake(
            "the number of a page is taken for a place, and not multiplied by page",
            _places(join=lambda number, slot, page, table: number + slot),
            "Each page before it takes `page` places: number * page, see section 7.",
        ),
        Mistake(
            "the slot is forgotten",
            _places(join=lambda number, slot, page, table: number * page),
            "Within its page the token is in slot t % page: see section 7.",
        ),
        Mistake(
            "the number of the page is returned",
            _places(join=lambda number, slot, page, table: number),
            "A page has `page` places: number * page + slot, see section 7.",
        ),
        Mistake(
            "the slot is returned",
            _places(join=lambda number, slot, page, table: slot),
            "The page comes first: number * page + slot, see section 7.",
        ),
        Mistake(
            "the whole position is added instead of the slot",
            lambda table, positions, page: table[np.arange(len(table)), positions // page] * page + positions,
            "Whole pages are counted by the table already: add t % page only, see section 7.",
        ),
        Mistake(
            "slots come first, as in an array (page, pages)",
            _places(join=lambda number, slot, page, table: slot * (table.max() + 1) + number),
            "The pages have shape (pages, page, …), so the tokens of a page lie side by side: see section 7.",
        ),
        Mistake(
            "positions are counted from 1",
            lambda table, positions, page: _places()(table, np.maximum(positions - 1, 0), page),
            "The first token has position 0: see the case worked by hand.",
        ),
        Mistake(
            "the table is looked up by row, as if its rows were the pages of a sequence",
            lambda table, positions, page: (
                table[np.minimum(positions // page, len(table) - 1)] * page + (positions % page)[:, None]
            ),
            "Row b belongs to sequence b, and j counts along it: table[np.arange(B), j], see hint 1.",
        ),
        Mistake(
            "the entry of the table is added instead of the slot",
            _places(slot=lambda t, page: t // page),
            "Within its page the token is in slot t % page: see section 7.",
        ),
        Mistake(
            "the remainder is taken of the product",
            lambda table, positions, page: table[np.arange(len(table)), positions // page] * positions % page,
            "number * page + t % page: see section 7.",
        ),
        Mistake(
            "sequence b is taken to begin at place b * page",
            lambda table, positions, page: np.arange(len(table)) * page + positions,
            "Pages lie anywhere: table[b, j] says where page j of sequence b is, see section 7.",
        ),
        Mistake(
            "the places are sorted",
            lambda table, positions, page: np.sort(_places()(table, positions, page)),
            "Place b belongs to sequence b: see the text of the exercise.",
        ),
        Mistake(
            "the slot is counted from 1",
            _places(slot=lambda t, page: t % page + 1),
            "The first slot of a page has number 0: see the case worked by hand.",
        ),
        Mistake(
            "the number of pages is rounded up",
            _places(entry=lambda t, page: -(-t // page)),
            "Position t is in page t // page, rounded down: see section 7.",
        ),
        Mistake(
            "the table is multiplied by its width",
            _places(join=lambda number, slot, page, table: number * table.shape[1] + slot),
            "A page has `page` places, whatever the width of the table is: see section 7.",
        ),
    ),
)

# 13.5 How many sequences fit

TOKEN, RESERVED, PAGED = "bytes a token", "reserved", "paged"


def _fit_cases():
    cases = []
    for number, (layers, K, H, itemsize, memory, tokens, longest, page) in enumerate(
        [
            (1, 1, 2, 2, 200, 5, 10, 4),
            (2, 3, 4, 4, 20_000, 17, 24, 16),
            (32, 8, 128, 2, 64 * 2**30, 1000, 8192, 16),
            (32, 32, 128, 2, 64 * 2**30, 4096, 4096, 256),
            (36, 8, 128, 1, 10**10, 333, 32768, 1),
            (3, 2, 8, 2, 10_000, 33, 64, 32),
            (80, 8, 128, 2, 50 * 10**9, 100, 131072, 64),
        ]
    ):
        label = f"layers={layers}, K={K}, H={H}, itemsize={itemsize}, memory={memory}, tokens={tokens}, page={page}"
        label = ("the case worked by hand, " if number == 0 else "") + label
        cases.append(Case(label, (layers, K, H, itemsize, memory, tokens, longest, page)))
    return cases


def _fit(
    token=lambda layers, K, H, e: 2 * layers * K * H * e,
    reserved=lambda memory, token, tokens, longest: memory // (token * longest),
    paged=lambda memory, token, tokens, page: memory // (token * page) // -(-tokens // page),
    told=None,
):
    """The answer to 13.5, or a wrong one that differs from it in the parts that are passed."""

    def answer(layers, K, H, itemsize, memory, tokens, longest, page):
        size = token(layers, K, H, itemsize)
        return {
            TOKEN: (told or token)(layers, K, H, itemsize),
            RESERVED: reserved(memory, size, tokens, longest),
            PAGED: paged(memory, size, tokens, page),
        }

    return answer


_FIT = Exercise(
    number="13.5",
    title="How many sequences fit",
    outputs=("result",),
    cases=_fit_cases,
    expected=_fit(),
    tolerance=1e-9,
    tried="1 to 80 layers, pages of 1 to 256 tokens, sequences that fill their last page and such that do not",
    mistakes=(
        Mistake(
            "keys are counted and values forgotten",
            _fit(token=lambda layers, K, H, e: layers * K * H * e),
            "A token has a key and a value in each layer: a factor 2, see section 3.",
        ),
        Mistake(
            "one layer is counted instead of all",
            _fit(token=lambda layers, K, H, e: 2 * K * H * e),
            "Each layer has a cache of its own: see section 3.",
        ),
        Mistake(
            "one head is counted instead of all",
            _fit(token=lambda layers, K, H, e: 2 * layers * H * e),
            "Each of the K heads has a key and a value: see section 3.",
        ),
        Mistake(
            "numbers are counted instead of bytes",
            _fit(token=lambda layers, K, H, e: 2 * layers * K * H),
            "Multiply by itemsize: see section 3.",
        ),
        Mistake(
            "elements have 2 bytes whatever the itemsize is",
            _fit(token=lambda layers, K, H, e: 4 * layers * K * H),
            "Multiply by itemsize: see the text of the exercise.",
        ),
        Mistake(
            "reserved room is as long as the sequence, not as the longest there may be",
            _fit(reserved=lambda memory, token, tokens, longest: memory // (token * tokens)),
            "How long a sequence will get is not known beforehand: reserve `longest`, see section 7.",
        ),
        Mistake(
            "tokens are counted instead of sequences with reserved room",
            _fit(reserved=lambda memory, token, tokens, longest: memory // token),
            "A sequence has room for `longest` tokens: divide by them too, see section 7.",
        ),
        Mistake(
            "the number of sequences with reserved room is rounded up",
            _fit(reserved=lambda memory, token, tokens, longest: -(-memory // (token * longest))),
            "A part of a sequence is no sequence: round down.",
        ),
        Mistake(
            "the number of sequences with reserved room is not rounded",
            _fit(reserved=lambda memory, token, tokens, longest: memory / (token * longest)),
            "A part of a sequence is no sequence: divide with //.",
        ),
        Mistake(
            "the last page of a sequence counts by its tokens, as if others could use its rest",
            _fit(paged=lambda memory, token, tokens, page: memory // (token * tokens)),
            "A sequence holds whole pages: round tokens / page up, see section 7.",
        ),
        Mistake(
            "the last page of a sequence is forgotten where it is not full",
            _fit(paged=lambda memory, token, tokens, page: memory // (token * page) // max(1, tokens // page)),
            "A sequence holds whole pages: round tokens / page up, see section 7.",
        ),
        Mistake(
            "a sequence gets one page more than it needs where its last page is full",
            _fit(paged=lambda memory, token, tokens, page: memory // (token * page) // (tokens // page + 1)),
            "Full pages need no further one: round tokens / page up, see section 7.",
        ),
        Mistake(
            "pages are counted instead of sequences",
            _fit(paged=lambda memory, token, tokens, page: memory // (token * page)),
            "A sequence needs several pages: divide by their number, see section 7.",
        ),
        Mistake(
            "paged sequences take as many pages as the longest there may be",
            lambda layers, K, H, itemsize, memory, tokens, longest, page: _fit(
                paged=lambda memory, token, tokens, page: memory // (token * page) // -(-longest // page)
            )(layers, K, H, itemsize, memory, tokens, longest, page),
            "Pages are taken as the sequence grows: it holds those of its `tokens`, see section 7.",
        ),
        Mistake(
            "the number of paged sequences is not rounded",
            _fit(paged=lambda memory, token, tokens, page: memory / (token * page) / -(-tokens // page)),
            "A part of a sequence is no sequence: divide with //.",
        ),
        Mistake(
            "the number of paged sequences is rounded up",
            _fit(paged=lambda memory, token, tokens, page: -(-memory // (token * page * -(-tokens // page)))),
            "A part of a sequence is no sequence: round down.",
        ),
        Mistake(
            "reserved and paged are exchanged",
            lambda *arguments: (lambda r: {TOKEN: r[TOKEN], RESERVED: r[PAGED], PAGED: r[RESERVED]})(
                _fit()(*arguments)
            ),
            "Reserved room has `longest` tokens for each sequence: see section 7.",
        ),
        Mistake(
            "the bytes of a token are those of one layer",
            _fit(told=lambda layers, K, H, e: 2 * K * H * e),
            "Each layer has a cache of its own: see section 3.",
        ),
        Mistake(
            "the bytes of a token are those of its key",
            _fit(told=lambda layers, K, H, e: layers * K * H * e),
            "A token has a key and a value in each layer: a factor 2, see section 3.",
        ),
    ),
)

# 13.6 Room for one more token


def _room_cases():
    return [
        Case("the case worked by hand", ([3, 5], 6, [0, 0, 0, 2, 0, 2, 1], [0, 4, 2, 1], 4)),
        Case("a page that is not shared has room", ([1], 2, [0, 1, 0, 2], [0, 2], 4)),
        Case("the last page is full", ([2, 0], 8, [1, 0, 1, 0], [1, 3], 4)),
        Case("the last page is full, and shared", ([2, 0], 6, [2, 0, 3, 0, 0], [4, 1, 3], 3)),
        Case("the first token of all", ([], 0, [0, 2, 0], [2, 0], 4)),
        Case("shared by three", ([4, 1, 0], 9, [3, 3, 0, 0, 3], [3, 2], 4)),
        Case("an earlier page is shared, the last is not", ([4, 1, 0], 11, [1, 2, 0, 0, 3], [2, 3], 4)),
        Case("one slot is left, and shared", ([0], 3, [2, 1, 0, 0], [2, 3], 4)),
        Case("pages of one token, shared", ([1, 2], 2, [0, 2, 2, 0], [3, 0], 1)),
    ]


def _room(
    needs_page=lambda length, page: length % page == 0,
    is_shared=lambda table, counts: counts[table[-1]] > 1,
    take=lambda free: free[-1],
    count_new=1,
    leave=lambda count: count - 1,
    with_copy=lambda table, new: [*table[:-1], new],
    copied=lambda source, new: source,
    copied_of_page=lambda new: -1,
    copy_first=False,
):
    """The answer to 13.6, or a wrong one that differs from it in the parts that are passed."""

    def answer(table, length, counts, free, page):
        table, counts = list(table), list(counts)
        full = needs_page(length, page)
        if full and not (copy_first and table and is_shared(table, counts)):
            new = take(free)
            counts[new] = count_new
            return {"table": [*table, new], "counts": counts, "copied": copied_of_page(new)}
        if is_shared(table, counts):
            source, new = table[-1], take(free)
            counts[source], counts[new] = leave(counts[source]), count_new
            return {"table": with_copy(table, new), "counts": counts, "copied": copied(source, new)}
        return {"table": table, "counts": counts, "copied": -1}

    return answer


_ROOM = Exercise(
    number="13.6",
    title="Room for one more token",
    outputs=("result",),
    cases=_room_cases,
    expected=_room(),
    tolerance=1e-9,
    tried="full pages and such with room, shared and not, the first token, and pages of one token",
    mistakes=(
        Mistake(
            "a shared page is written into, where the other sequences will write their own tokens",
            _room(is_shared=lambda table, counts: False),
            "Where others hold the last page too, copy it before writing: see section 8.",
        ),
        Mistake(
            "the last page is copied whether it is shared or not",
            _room(is_shared=lambda table, counts: True),
            "A page that nobody else holds needs no copy: look at its count, see section 8.",
        ),
        Mistake(
            "the last page counts as shared because an earlier one is",
            _room(is_shared=lambda table, counts: any(counts[number] > 1 for number in table)),
            "Only the last page is written into: look at its count, see section 8.",
        ),
        Mistake(
            "a page shared by two does not count as shared",
            _room(is_shared=lambda table, counts: counts[table[-1]] > 2),
            "The sequence itself counts too: more than 1 is shared, see section 8.",
        ),
        Mistake(
            "a full shared page is copied, though nothing is written into it",
            _room(copy_first=True),
            "Ask first whether the last page has room: see section 8.",
        ),
        Mistake(
            "a new page is taken one token too early",
            _room(needs_page=lambda length, page: (length + 1) % page == 0),
            "Token number `length` opens a page where length is a multiple of page: see section 8.",
        ),
        Mistake(
            "a new page is taken one token too late",
            _room(needs_page=lambda length, page: length == 0 or length % page == 1),
            "Token number `length` opens a page where length is a multiple of page: see section 8.",
        ),
        Mistake(
            "no new page is taken where the last is full",
            _room(needs_page=lambda length, page: length == 0),
            "Where length is a multiple of page, all pages of the table are full: see section 8.",
        ),
        Mistake(
            "every token gets a page of its own",
            _room(needs_page=lambda length, page: True),
            "A page has room for `page` tokens: see section 8.",
        ),
        Mistake(
            "the first free page is taken instead of the last",
            _room(take=lambda free: free[0]),
            "Take the last of `free`: see the text of the exercise.",
        ),
        Mistake(
            "the page that was copied keeps its count",
            _room(leave=lambda count: count),
            "This sequence no longer holds it: one fewer does, see section 8.",
        ),
        Mistake(
            "the page that was copied is left by everybody",
            _room(leave=lambda count: 0),
            "Only this sequence leaves it: one fewer holds it, see section 8.",
        ),
        Mistake(
            "the new page is not counted",
            _room(count_new=0),
            "This sequence holds it: its count is 1, see section 8.",
        ),
        Mistake(
            "the copy is appended to the table instead of taking the place of its source",
            _room(with_copy=lambda table, new: [*table, new]),
            "The copy stands where its source stood: the earlier tokens are in it, too, see section 8.",
        ),
        Mistake(
            "the table keeps the page that was copied",
            _room(with_copy=lambda table, new: table),
            "The sequence goes on in the copy: put its number into the table, see section 8.",
        ),
        Mistake(
            "the number of the copy is returned instead of that of its source",
            _room(copied=lambda source, new: new),
            'The caller needs to know what to copy: "copied" is the source, see the text of the exercise.',
        ),
        Mistake(
            "the copy is not reported",
            _room(copied=lambda source, new: -1),
            'The caller does the copying and must be told: "copied" is the source, see the text of the exercise.',
        ),
        Mistake(
            "the counts are returned as they came",
            lambda table, length, counts, free, page: _room()(table, length, counts, free, page) | {"counts": counts},
            "A page that is taken counts 1, one that is left counts one less: see section 8.",
        ),
        Mistake(
            "the table is returned as it came",
            lambda table, length, counts, free, page: _room()(table, length, counts, free, page) | {"table": table},
            "Put the number of the new page into the table: see section 8.",
        ),
        Mistake(
            "0 says that nothing is copied, which is the number of a page",
            lambda *arguments: (lambda r: r | {"copied": max(0, r["copied"])})(_room()(*arguments)),
            'Where nothing is copied "copied" is -1: see the text of the exercise.',
        ),
        Mistake(
            "a new page is reported as if something were to be copied",
            _room(copied_of_page=lambda new: new),
            'Nothing is copied into a page that is opened: "copied" is -1 then, see the text of the exercise.',
        ),
    ),
)

EXERCISES = (_AGAIN, _STEP, _MERGE, _PLACES, _FIT, _ROOM)
