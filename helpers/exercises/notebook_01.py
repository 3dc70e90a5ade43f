"""The exercises of notebook 01."""

import math

import numpy as np

from helpers.attention.reference import oracle
from helpers.exercises.checking import Case, Complaint, Exercise, Mistake
from helpers.exercises.watched import called
from helpers.measure import cost, roofline
from helpers.measure.cost import forward_flops, naive_bytes, naive_footprint

# 1.1 Attention with scale and causal mask


def _attention_cases():
    random = np.random.default_rng(11)
    by_hand = (np.array([[5.0], [1.0]]), np.log([[1.0], [3.0]]), np.array([[2.0], [6.0]]), True)
    cases = [Case("the case worked by hand", by_hand)]
    # Few shapes, because an answer in jax.numpy is compiled for each of them.
    for T, S, H, is_causal in [(3, 5, 2, False), (3, 5, 2, True), (6, 4, 3, True), (5, 5, 64, True)]:
        q, k, v = (random.standard_normal(shape) for shape in ((T, H), (S, H), (S, H)))
        cases.append(Case(f"T={T}, S={S}, H={H}, {'causal' if is_causal else 'no mask'}", (q, k, v, is_causal)))

    # Multiples of 1/4, so that these logits are exact in float32 too.
    q, v = np.zeros((5, 64)), random.standard_normal((5, 64))
    q[:, 0] = -400
    down, rising = np.zeros((5, 64)), np.zeros((5, 64))
    down[:, 0] = [40, 39.75, 40.25, 39.5, 40.5]
    rising[:, 0] = [-22, 20, 0.25, 0.5, 60]
    steep = q * np.array([[1.0], [-1.0], [0.0], [0.125], [-0.125]])
    equal, values = random.standard_normal((3, 2)), math.sqrt(2) * random.standard_normal((5, 2))
    cases += [
        Case("every logit near -2000, causal", (q, down, v, True)),
        Case("the largest logit, 3000, hidden by the mask", (-q, rising, v, True)),
        Case("rows of very different size", (steep, down, v, False)),
        Case("equal keys", (equal, np.ones((5, 2)), values, True)),
    ]
    return cases


def _attention_expected(q, k, v, is_causal):
    q, k, v = (np.asarray(array, np.float32)[:, None] for array in (q, k, v))
    return oracle(q, k, v, is_causal=is_causal)[0][:, 0]


def _mask(T, S, offset=0):
    return np.arange(S)[None, :] <= np.arange(T)[:, None] + offset


def _softmax(s, axis=-1):
    p = np.exp(s - s.max(axis=axis, keepdims=True))
    return p / p.sum(axis=axis, keepdims=True)


def _attention(scale=lambda T, S, H: 1 / math.sqrt(H), seen=_mask, hidden=-np.inf, softmax=_softmax):
    """A wrong answer that differs from the right one in the parts that are passed."""

    def answer(q, k, v, is_causal):
        (T, H), S = q.shape, len(k)
        s = q @ k.T * scale(T, S, H)
        if is_causal:
            s = np.where(seen(T, S), s, hidden)
        return softmax(s) @ v

    return answer


def _masked_after(q, k, v, is_causal):
    p = _softmax(q @ k.T / math.sqrt(q.shape[1]))
    return (np.where(_mask(*p.shape), p, 0) if is_causal else p) @ v


def _lowered_by_1000(q, k, v, is_causal):
    s = q @ k.T / math.sqrt(q.shape[1])
    return _softmax(s - 1000.0 * ~_mask(*s.shape) if is_causal else s) @ v


def _multiplied_by_infinity(q, k, v, is_causal):
    s = q @ k.T / math.sqrt(q.shape[1])
    return _softmax(s + ~_mask(*s.shape) * -np.inf if is_causal else s) @ v


def _maximum_before_mask(q, k, v, is_causal):
    s = q @ k.T / math.sqrt(q.shape[1])
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    if is_causal:
        p = np.where(_mask(*p.shape), p, 0)
    return p / p.sum(axis=-1, keepdims=True) @ v


def _one_maximum(s):
    p = np.exp(s - s.max())
    return p / p.sum(axis=-1, keepdims=True)


def _maximum_of_columns(s):
    p = np.exp(s - s.max(axis=0, keepdims=True))
    return p / p.sum(axis=-1, keepdims=True)


def _base_two(s):
    p = np.exp2(s - s.max(axis=-1, keepdims=True))
    return p / p.sum(axis=-1, keepdims=True)


def _not_divided(s):
    return np.exp(s - s.max(axis=-1, keepdims=True))


def _no_maximum(s):
    p = np.exp(s)
    return p / p.sum(axis=-1, keepdims=True)


ATTENTION = Exercise(
    number="1.1",
    title="Attention with scale and causal mask",
    outputs=("out",),
    cases=_attention_cases,
    expected=_attention_expected,
    tried="T below, equal to and above S, with and without the mask, logits from about -2000 to 3000",
    mistakes=(
        Mistake(
            "the logits are not scaled",
            _attention(scale=lambda T, S, H: 1.0),
            "Divide by the square root of H: reread section 2.",
        ),
        Mistake(
            "the logits are divided by H instead of its square root",
            _attention(scale=lambda T, S, H: 1 / H),
            "The spread grows with the square root of H: reread section 2.",
        ),
        Mistake(
            "the logits are multiplied by the square root of H",
            _attention(scale=lambda T, S, H: math.sqrt(H)),
            "The scale makes large logits smaller: reread section 2.",
        ),
        Mistake(
            "the scale is taken from the number of keys instead of the head dimension",
            _attention(scale=lambda T, S, H: 1 / math.sqrt(S)),
            "The last axis of q has length H, and each logit is a sum over it: reread section 2.",
        ),
        Mistake(
            "the scale is taken from the number of queries instead of the head dimension",
            _attention(scale=lambda T, S, H: 1 / math.sqrt(T)),
            "Here q has a row for each query, so len(q) is T; H is its last axis: reread section 2.",
        ),
        Mistake(
            "the exponential is taken to base two",
            _attention(softmax=_base_two),
            "A softmax takes e to the power of s, np.exp: reread section 1.",
        ),
        Mistake(
            "the weights are not divided by their sum",
            _attention(softmax=_not_divided),
            "The weights of one query must sum to one: reread section 1.",
        ),
        Mistake(
            "all weights are divided by one sum, that of the whole table",
            _attention(softmax=lambda s: _not_divided(s) / _not_divided(s).sum()),
            "Every query has a sum of its own, p.sum(axis=-1, keepdims=True): reread section 1.",
        ),
        Mistake(
            "the weights are returned, before they mix the values",
            lambda q, k, v, is_causal: _attention()(q, k, np.eye(len(k)), is_causal),
            "The result is weights @ v, of shape (T, H): reread section 1.",
        ),
        Mistake(
            "the weights multiply the keys instead of the values",
            lambda q, k, v, is_causal: _attention()(q, k, k, is_causal),
            "Queries and keys make the weights, and the weights mix v: reread section 1.",
        ),
        Mistake(
            "the mask is forgotten",
            lambda q, k, v, is_causal: _attention()(q, k, v, False),
            "Where is_causal is True, query i must not see keys after i: reread section 3.",
        ),
        Mistake(
            "the mask is applied even when is_causal is False",
            lambda q, k, v, is_causal: _attention()(q, k, v, True),
            "Look at is_causal before you mask: see the signature of the exercise.",
        ),
        Mistake(
            "a query cannot see the key at its own position",
            _attention(seen=lambda T, S: _mask(T, S, offset=-1)),
            "Query i sees keys j ≤ i, its own position included: reread section 3.",
        ),
        Mistake(
            "a query sees one key too many, the one after its own position",
            _attention(seen=lambda T, S: _mask(T, S, offset=1)),
            "Query i sees keys j ≤ i; np.triu with k=1 begins right after the diagonal: reread section 3.",
        ),
        Mistake(
            "is_causal is read the wrong way round",
            lambda q, k, v, is_causal: _attention()(q, k, v, not is_causal),
            "The mask belongs to is_causal = True: see the exercise.",
        ),
        Mistake(
            "visible and hidden are exchanged, so that a query sees only the keys after its own",
            _attention(seen=lambda T, S: ~_mask(T, S)),
            "np.where(seen, s, -np.inf) keeps what is true in `seen`: reread section 3.",
        ),
        Mistake(
            "the mask hides the past and shows the future",
            _attention(seen=lambda T, S: _mask(S, T).T),
            "Rows are queries and columns are keys; the visible part is the lower left: reread section 3.",
        ),
        Mistake(
            "the mask is aligned with the last query and the last key",
            _attention(seen=lambda T, S: _mask(T, S, offset=S - T)),
            "Query i sees keys j ≤ i, both counted from the start, whatever T and S are: reread section 3.",
        ),
        Mistake(
            "hidden logits are set to 0",
            _attention(hidden=0.0),
            "The exponential of 0 is 1, so a logit of 0 still gets weight: reread section 3.",
        ),
        Mistake(
            "hidden logits are set to a finite number, or lowered by one, and that is not low enough",
            _attention(hidden=-1000.0),
            "A visible logit can be lower still; only -np.inf is always below it: reread section 3.",
            variants=(_lowered_by_1000,),
        ),
        Mistake(
            "a mask of zeros and ones is multiplied by infinity, and 0 · ∞ is NaN",
            _multiplied_by_infinity,
            "Choose with np.where(seen, s, -np.inf) instead of adding: reread section 3.",
        ),
        Mistake(
            "the weights are masked after the softmax, so that they no longer sum to one",
            _masked_after,
            "Mask the logits, before the exponentials are summed: reread section 3.",
        ),
        Mistake(
            "the softmax runs over the queries instead of the keys",
            _attention(softmax=lambda s: _softmax(s, axis=0)),
            "The weights of one query, a row, must sum to one: reread section 1.",
        ),
        Mistake(
            "the maximum is taken over the queries instead of the keys",
            _attention(softmax=_maximum_of_columns),
            "Weights keep their proportions only if one number is subtracted from a whole row, axis=-1: see section 1.",
        ),
        Mistake(
            "the largest logit is not subtracted, and large exponentials overflow or vanish",
            _attention(softmax=_no_maximum),
            "Subtract each row's maximum before the exponential: reread section 1.",
        ),
        Mistake(
            "one maximum is subtracted from the whole table, and rows far below it vanish",
            _attention(softmax=_one_maximum),
            "Every row needs its own maximum, s.max(axis=-1, keepdims=True): reread section 1.",
        ),
        Mistake(
            "the maximum is taken before the mask, so that a hidden logit makes all visible ones vanish",
            _maximum_before_mask,
            "Mask first, then take the maximum of what is left: reread section 3.",
        ),
    ),
)

# 1.2 FLOPs and bytes by hand


def _bill_cases():
    shapes = [(2, 3, 4, 2), (1, 5, 3, 4), (6, 2, 8, 1), (1024, 384, 64, 4), (4096, 4096, 128, 2)]
    by_hand, *others = (Case(f"T={T}, S={S}, H={H}, itemsize={e}", (T, S, H, e)) for T, S, H, e in shapes)
    return [Case(f"the case worked by hand, {by_hand.label}", by_hand.arguments), *others]


def _bill_expected(T, S, H, itemsize):
    return {"flops": forward_flops(T, S, H), "bytes": naive_bytes(T, S, H, itemsize)}


def _run_without_cost(answer, *arguments):
    result, name = called(cost, lambda: answer(*arguments))
    if name:
        raise Complaint(f"`{name}` of helpers.measure.cost was called; here the formulas are yours to write.")
    return result


def _bill(flops=forward_flops, moved=naive_bytes):
    """A wrong answer that differs from the right one in the part that is passed."""
    return lambda T, S, H, itemsize: {"flops": flops(T, S, H), "bytes": moved(T, S, H, itemsize)}


BILL = Exercise(
    number="1.2",
    title="FLOPs and bytes by hand",
    outputs=("the bill",),
    cases=_bill_cases,
    expected=_bill_expected,
    run=_run_without_cost,
    tried="T and S equal and different, elements of 1, 2 and 4 bytes",
    mistakes=(
        Mistake(
            "only one of the two products is counted, or a multiplication and its addition as one operation",
            _bill(flops=lambda T, S, H: 2 * T * S * H),
            "There are two products, and each term of a sum costs two operations: reread section 4.",
        ),
        Mistake(
            "only multiplications of one product are counted",
            _bill(flops=lambda T, S, H: T * S * H),
            "Count additions too, and the second product: reread section 4.",
        ),
        Mistake(
            "T is squared although there are S keys",
            _bill(
                flops=lambda T, S, H: 4 * T * T * H,
                moved=lambda T, S, H, e: e * (4 * T * T + 4 * T * H),
            ),
            "The table has T rows and S columns: reread section 4.",
        ),
        Mistake(
            "T is squared in the FLOPs although there are S keys",
            _bill(flops=lambda T, S, H: 4 * T * T * H),
            "The table has T rows and S columns: reread section 4.",
        ),
        Mistake(
            "only the tables are multiplied by itemsize",
            _bill(moved=lambda T, S, H, e: e * 4 * T * S + 2 * T * H + 2 * S * H),
            "Every array has elements of itemsize bytes: put brackets around the sum.",
        ),
        Mistake(
            "the two tables are counted in float32",
            _bill(moved=lambda T, S, H, e: 16 * T * S + e * (2 * T * H + 2 * S * H)),
            "Here itemsize is the same for all arrays, the tables included: see the exercise.",
        ),
        Mistake(
            "one of the four crossings of a table is forgotten",
            _bill(moved=lambda T, S, H, e: e * (3 * T * S + 2 * T * H + 2 * S * H)),
            "s is written and read, then the weights are written and read: reread section 5.",
        ),
        Mistake(
            "each table is counted once, as if what was written came back for nothing",
            _bill(moved=lambda T, S, H, e: e * (2 * T * S + 2 * T * H + 2 * S * H)),
            "What one step writes, the next one must read: reread section 5.",
        ),
        Mistake(
            "only one of the two tables is counted",
            _bill(moved=lambda T, S, H, e: e * (T * S + 2 * T * H + 2 * S * H)),
            "There are two tables, logits and weights, and each is written and read: reread section 5.",
        ),
        Mistake(
            "q, k, v and out are left out",
            _bill(moved=lambda T, S, H, e: e * 4 * T * S),
            "The inputs are read and the result is written too: reread section 5.",
        ),
        Mistake(
            "k and v are given T rows instead of S",
            _bill(moved=lambda T, S, H, e: e * (4 * T * S + 4 * T * H)),
            "q and out have T rows, k and v have S: reread section 1.",
        ),
        Mistake(
            "elements are counted instead of bytes",
            _bill(moved=lambda T, S, H, e: 4 * T * S + 2 * T * H + 2 * S * H),
            "Multiply by itemsize, the bytes of one element: reread section 5.",
        ),
        Mistake(
            "bits are counted instead of bytes",
            _bill(moved=lambda T, S, H, e: 8 * naive_bytes(T, S, H, e)),
            "itemsize is in bytes already, 2 for an element of 16 bit: reread section 5.",
        ),
        Mistake(
            "the two numbers are exchanged",
            lambda T, S, H, itemsize: {"flops": naive_bytes(T, S, H, itemsize), "bytes": forward_flops(T, S, H)},
            "FLOPs are arithmetic and bytes are traffic: see the picture of section 4.",
        ),
    ),
)

# 1.3 The longest sequence that fits


def _fit_cases():
    cases = [
        Case("the case worked by hand", (64, 1, 2, 2)),
        Case("one byte less than the case worked by hand", (63, 1, 2, 2)),
        Case("less than one query needs", (10, 1, 2, 2)),
        Case("memory=1000, heads=2, H=3, itemsize=4", (1000, 2, 3, 4)),
        Case("memory=21490815, heads=16, H=64, itemsize=2", (21490815, 16, 64, 2)),
        Case("just enough for T=100 with 3 heads", (3 * naive_footprint(100, 100, 64, 2), 3, 64, 2)),
    ]
    cards = [(roofline.T4, 1, 64, 4), (roofline.RTX_4090, 32, 128, 2), (roofline.H200, 128, 256, 2)]
    return cases + [
        Case(f"{card.name}, {heads} head{'s' if heads > 1 else ''}, H={H}, itemsize={e}", (card.memory, heads, H, e))
        for card, heads, H, e in cards
    ]


def _longest(fits):
    """The largest T for which fits(T) holds, by bisection; fits(0) is taken to hold."""
    low, high = 0, 1
    while fits(high):
        high *= 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _fit(footprint=lambda T, H, e: naive_footprint(T, T, H, e), all_heads=True, spare=0, beyond=0):
    """The answer to 1.3, or a wrong one that differs from it in the parts that are passed."""

    def answer(memory, heads, H, itemsize):
        count = heads if all_heads else 1
        return _longest(lambda T: count * footprint(T, H, itemsize) + spare <= memory) + beyond

    return answer


def _fit_sum(footprint):
    """A wrong answer to 1.3 whose footprint of all heads is not a multiple of that of one."""
    return lambda memory, heads, H, itemsize: _longest(lambda T: footprint(T, H, itemsize, heads) <= memory)


def _exact_root(memory, heads, H, itemsize):
    """Where the footprint is exactly the memory: a number between the last T that fits and the first that does not."""
    b = 4 * itemsize * H
    return (math.sqrt(b * b + 32 * memory / heads) - b) / 16


def _root(dtype):
    """By the quadratic formula, in a floating-point type that may round the wrong way."""

    def answer(memory, heads, H, itemsize):
        b, memory = dtype(4 * itemsize * H * heads), dtype(memory)
        return int((np.sqrt(b * b + dtype(32 * heads) * memory) - b) / dtype(16 * heads))

    return answer


FIT = Exercise(
    number="1.3",
    title="The longest sequence that fits",
    outputs=("T",),
    cases=_fit_cases,
    expected=_fit(),
    tried="exact fits, one byte too few, no room at all, and real cards with up to 128 heads",
    mistakes=(
        Mistake(
            "q, k, v and out are forgotten",
            _fit(lambda T, H, e: 8 * T * T),
            "The four small matrices must fit too: reread section 6.",
        ),
        Mistake(
            "only one of q, k, v and out is counted",
            _fit(lambda T, H, e: 8 * T * T + e * T * H),
            "There are four of them, each T by H: reread section 6.",
        ),
        Mistake(
            "the footprint of one head is taken for that of all of them",
            _fit(all_heads=False),
            "All heads are in memory at once: multiply by their number, see the exercise.",
        ),
        Mistake(
            "one table is counted instead of two",
            _fit(lambda T, H, e: 4 * T * T + 4 * e * T * H),
            "A step reads one table while it writes the next, so two are alive: reread section 6.",
        ),
        Mistake(
            "the tables are given elements of itemsize bytes, like q, k and v",
            _fit(lambda T, H, e: 2 * e * T * T + 4 * e * T * H),
            "The helper keeps both tables in float32, whatever the inputs are: reread section 6.",
        ),
        Mistake(
            "bytes moved are taken for the footprint, four crossings instead of two tables",
            _fit(lambda T, H, e: 16 * T * T + 4 * e * T * H),
            "What must fit is what is alive at one moment: see the picture of section 4.",
        ),
        Mistake(
            "an exact fit is refused",
            _fit(spare=1),
            "Memory that is filled to the last byte still fits: compare with ≤.",
        ),
        Mistake(
            "the first length that no longer fits is returned",
            _fit(beyond=1),
            "Return the last T that fits, one less.",
        ),
        Mistake(
            "the square root is taken in float32, which rounds it up past the last T that fits",
            _root(np.float32),
            "float32 holds seven digits, and the memory has more: use integers, or at least float64.",
        ),
        Mistake(
            "three of the four matrices are counted",
            _fit(lambda T, H, e: 8 * T * T + 3 * e * T * H),
            "q, k, v and out: out must fit too, see the exercise.",
        ),
        Mistake(
            "the search begins at T = 1, though not even that may fit",
            lambda memory, heads, H, itemsize: max(1, _fit()(memory, heads, H, itemsize)),
            "Where T = 1 is too much the answer is 0: begin there.",
        ),
        Mistake(
            "the small matrices are counted for one head only",
            _fit_sum(lambda T, H, e, heads: heads * 8 * T * T + 4 * e * T * H),
            "Each head has its own q, k, v and out, and its own tables: see the exercise.",
        ),
        Mistake(
            "the tables are counted for one head only",
            _fit_sum(lambda T, H, e, heads: 8 * T * T + heads * 4 * e * T * H),
            "Each head has its own q, k, v and out, and its own tables: see the exercise.",
        ),
        Mistake(
            "q, k, v and out are given one byte an element",
            _fit(lambda T, H, e: 8 * T * T + 4 * T * H),
            "Multiply by itemsize, the bytes of one element: see the exercise.",
        ),
        Mistake(
            "the solution of the quadratic equation is rounded to the nearest integer",
            lambda memory, heads, H, itemsize: round(_exact_root(memory, heads, H, itemsize)),
            "What is larger does not fit, by however little: round down.",
        ),
        Mistake(
            "the solution of the quadratic equation is not rounded",
            _exact_root,
            "T is a whole number, and what is larger does not fit: round down.",
        ),
        Mistake(
            "the solution of the quadratic equation is rounded up",
            lambda memory, heads, H, itemsize: math.ceil(_exact_root(memory, heads, H, itemsize)),
            "What is larger does not fit, by however little: round down.",
        ),
    ),
)

# 1.4 The shortest time


def _time_cases():
    shapes = [
        (roofline.Card("a toy card", 1024, 48.0, 32.0), 2, 3, 4, 2),
        (roofline.Card("a slower toy card", 1024, 8.0, 32.0), 2, 3, 4, 2),
        (roofline.T4, 100, 300, 64, 4),
        (roofline.T4, 8192, 8192, 512, 2),
        (roofline.RTX_4090, 2048, 512, 128, 2),
        (roofline.A100_80GB, 4096, 16384, 128, 1),
        (roofline.H100, 4096, 4096, 128, 2),
        (roofline.H100, 8192, 4096, 1024, 2),
    ]
    by_hand, *others = (
        Case(f"{card.name}, T={T}, S={S}, H={H}, itemsize={e}", (T, S, H, e, card)) for card, T, S, H, e in shapes
    )
    return [Case("the case worked by hand, T=2, S=3, H=4, itemsize=2", by_hand.arguments), *others]


def _sides(T, S, H, itemsize, card):
    """Seconds that the matrix units and the memory need."""
    return forward_flops(T, S, H) / card.matrix_rate, naive_bytes(T, S, H, itemsize) / card.bandwidth


def _time(seconds=max, limit=lambda compute, memory: "memory" if memory > compute else "compute"):
    """The answer to 1.4, or a wrong one: seconds and limit take the seconds of both sides."""

    def answer(T, S, H, itemsize, card):
        compute, memory = _sides(T, S, H, itemsize, card)
        return seconds(compute, memory), limit(compute, memory)

    return answer


def _compared_as_numbers(T, S, H, itemsize, card):
    limit = "memory" if naive_bytes(T, S, H, itemsize) > forward_flops(T, S, H) else "compute"
    return max(_sides(T, S, H, itemsize, card)), limit


def _ratio_of(seconds, bytes_of=naive_bytes):
    """A wrong answer to 1.4: seconds(flops, bytes, card) gives the times of both sides."""

    def answer(T, S, H, itemsize, card):
        compute, memory = seconds(forward_flops(T, S, H), bytes_of(T, S, H, itemsize), card)
        return max(compute, memory), "memory" if memory > compute else "compute"

    return answer


def _one_product(T, S, H, itemsize, card):
    compute, memory = _sides(T, S, H, itemsize, card)
    return max(compute / 2, memory), "memory" if memory > compute / 2 else "compute"


TIME = Exercise(
    number="1.4",
    title="The shortest possible time",
    outputs=("seconds", "limit"),
    cases=_time_cases,
    expected=_time(),
    tried="both limits, six cards, real and toy, T and S equal and different",
    mistakes=(
        Mistake(
            "the two times are added",
            _time(seconds=lambda compute, memory: compute + memory),
            "Arithmetic and traffic can go on at once, so only the longer one counts: reread section 7.",
        ),
        Mistake(
            "the shorter of the two times is taken",
            _time(seconds=min, limit=lambda compute, memory: "memory" if memory < compute else "compute"),
            "Both sides must finish, so the longer one decides: reread section 7.",
        ),
        Mistake(
            "the shorter of the two times is taken, though the limit is named rightly",
            _time(seconds=min),
            "Both sides must finish, so the longer one decides: reread section 7.",
        ),
        Mistake(
            "the two limits are exchanged",
            _time(limit=lambda compute, memory: "compute" if memory > compute else "memory"),
            "The limit is the side that takes longer: reread section 7.",
        ),
        Mistake(
            "naive attention is taken to be limited by the memory always",
            _time(seconds=lambda compute, memory: memory, limit=lambda compute, memory: "memory"),
            "With a large head dimension the matrix units can be slower: compute both times.",
        ),
        Mistake(
            "the memory is taken to be fast enough always",
            _time(seconds=lambda compute, memory: compute, limit=lambda compute, memory: "compute"),
            "Compute the seconds of the traffic too: reread section 7.",
        ),
        Mistake(
            "the number of bytes is compared with the number of FLOPs",
            _compared_as_numbers,
            "Compare seconds, or the intensity with card.ridge: reread section 7.",
        ),
        Mistake(
            "the limit is always given as memory, though the time is right",
            _time(limit=lambda compute, memory: "memory"),
            "Name the side that takes longer: with a large head dimension it can be the matrix units.",
        ),
        Mistake(
            "the limit is always given as compute, though the time is right",
            _time(limit=lambda compute, memory: "compute"),
            "Name the side that takes longer: reread section 7.",
        ),
        Mistake(
            "the attainable rate is returned instead of a time",
            lambda T, S, H, itemsize, card: (
                forward_flops(T, S, H) / _time()(T, S, H, itemsize, card)[0],
                _time()(T, S, H, itemsize, card)[1],
            ),
            "Seconds are asked for: the FLOPs divided by that rate.",
        ),
        Mistake(
            "FLOPs are divided by the bandwidth, and bytes by the matrix rate",
            _ratio_of(lambda flops, moved, card: (flops / card.bandwidth, moved / card.matrix_rate)),
            "FLOPs go with FLOP/s, and bytes with bytes/s: see hint 1.",
        ),
        Mistake(
            "the rates are divided by the amounts",
            _ratio_of(lambda flops, moved, card: (card.matrix_rate / flops, card.bandwidth / moved)),
            "Seconds are FLOPs divided by FLOP/s, and bytes divided by bytes/s: see hint 1.",
        ),
        Mistake(
            "T is taken for the number of keys too",
            lambda T, S, H, itemsize, card: _time()(T, T, H, itemsize, card),
            "There are S keys: the table has T rows and S columns, see section 4.",
        ),
        Mistake(
            "the footprint is taken for the bytes moved",
            _ratio_of(lambda flops, moved, card: (flops / card.matrix_rate, moved / card.bandwidth), naive_footprint),
            "The bandwidth counts what crosses, naive_bytes: reread section 4.",
        ),
        Mistake(
            "only half of the FLOPs are counted, as for one product or for a causal mask",
            _one_product,
            "Both products count, 4 T S H: reread section 4, or call forward_flops.",
        ),
        Mistake(
            "the time is given in milliseconds",
            _time(seconds=lambda compute, memory: 1000 * max(compute, memory)),
            "Rates are per second, so FLOPs divided by FLOP/s are seconds already.",
        ),
    ),
)

EXERCISES = (ATTENTION, BILL, FIT, TIME)
