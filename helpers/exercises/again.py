"""Mistakes that whole kernels have in common: edits of lines that stand in several solutions, for each of these."""

OF_THE_END = (
    ("out is not divided by l", "acc / l[:, None]", "acc",
     "acc is a sum of p v; the weights add up to one only after the division: see section 1 of notebook 05."),
    ("a row without a key is divided by zero", "jnp.where(l == 0, 1, l)", "l",
     "Where no key was seen, l is 0 and out shall be 0: divide by 1 there, see section 7 of notebook 02."),
)  # fmt: skip
OF_A_STATE = (  # of a loop that keeps m, l and acc
    ("acc is not rescaled by alpha", "alpha[:, None] * acc", "acc",
     "What acc holds was measured from the old maximum, just like l: reread section 2 of notebook 05."),
    ("l is not rescaled by alpha", "alpha * l", "l",
     "What l holds was measured from the old maximum, just like acc: reread section 2 of notebook 05."),
    ("m starts at 0", "-jnp.inf), jnp.zeros", "0.0), jnp.zeros",
     "Where all logits lie far below 0 each exponential vanishes: start at −∞, see section 6 of notebook 02."),
    ("exp2 stands where exp belongs", "jnp.exp", "jnp.exp2",
     "With exp2, logits are multiplied by log2 e, and lse is divided by it: see section 8 of notebook 05."),
    ("the logits are not scaled", " / math.sqrt(H)", "", "s = q kᵀ / √H: see section 1 of notebook 05."),
    ("the logits are divided by √H twice", "math.sqrt(H)", "H", "s = q kᵀ / √H: scale the product, once."),
    ("p keeps 32 bits where the values have 16", "p.astype(v.dtype)", "p",
     "A product has operands of one dtype on a GPU: convert p to that of v, see section 9 of notebook 05."),
    ("lse is the logarithm of the sum alone", "m + jnp.log", "jnp.log",
     "The sum was measured from m: lse = m + log l, see section 1 of notebook 05."),
    OF_THE_END[0],
)  # fmt: skip
OF_HEADS = (  # of the head of k and v that a query head reads
    ("the key/value head is n % K", "n // group", "n % K",
     "That deals the query heads out in turn; neighbours share a head: see section 7 of notebook 05."),
    ("n is divided by K instead of by the size of a group", "n // group", "n // K",
     "A group has N // K query heads, and the head is n divided by that: see the start of section 7 of notebook 05."),
)  # fmt: skip
OF_ROWS = (  # of a program that has a tile of queries; the first two in any causal kernel
    ("a query does not see its own key", "cols <= rows", "cols < rows",
     "Query i sees the keys j ≤ i, its own among them: see section 5 of notebook 05."),
    ("the causal mask is turned round", "cols <= rows", "cols >= rows", "Query i sees keys j ≤ i: see notebook 05."),
    ("the diagonal ends at the lower right corner, as if query T - 1 stood beside key S - 1",
     ("<= rows[:, None]", "jnp.minimum(q_start + block_q, min(T, S))"),
     ("<= rows[:, None] + S - T", "jnp.clip(q_start + block_q + S - T, 0, S)"),
     "Query i sees the keys j ≤ i, whatever S and T are: see section 5 of notebook 03."),
    ("no tile is skipped", "if is_causal else S", "if False else S",
     "The loop ends at the tile that holds the last key that the last query sees: see exercise 5.1."),
    ("tiles are read that only rows past the last query would see", "min(T, S)", "S",
     "The last tile of queries may reach beyond T, and the loop ends at T all the same: see exercise 5.1."),
    ("the last tile is left out where it is not whole", "pl.cdiv(stop, block_k)", "stop // block_k",
     "Round the number of tiles up, and mask what lies behind the end: see section 6 of notebook 05."),
)  # fmt: skip
BY_HAND = (  # what a kernel takes from `online_softmax`, written in it
    ("m, l, alpha, p = online_softmax.step(m, l, s, exp=jnp.exp)",
     "m_new = jnp.maximum(m, s.max(axis=1)); reference = jnp.where(m_new == -jnp.inf, 0, m_new); "
     "alpha = jnp.exp(m - reference); p = jnp.exp(s - reference[:, None]); l = alpha * l + p.sum(axis=1); m = m_new"),
    ("one_key_tile, state)\n",
     "one_key_tile, state); m, l, acc = state; lse = m + jnp.log(l); l = jnp.where(l == 0, 1, l)\n"),
    ("online_softmax.finish(*state, log=jnp.log, log_e=1)", "(acc / l[:, None], lse)"),
)  # fmt: skip


def by_hand(*more):
    """Those of a state, its end and more, in a kernel that takes its softmax from `online_softmax`: edits `BY_HAND`."""
    olds, news = zip(*BY_HAND, strict=True)
    mistakes = *OF_A_STATE, OF_THE_END[1], *more
    return tuple((name, (*olds, old), (*news, new), advice) for name, old, new, advice in mistakes)
