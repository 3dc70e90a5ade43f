"""The checks catch a broken kernel: each seeded fault must make a comparison with the oracle fail.

A fault is a small change to the source of the kernel. The unchanged source goes through the same
machinery and must pass, so a fault is caught for what it does. All of it is of the full tier: it finds what is
wrong with the checks, which change seldom, and the checks themselves find what is wrong with a kernel.
"""

import functools
import inspect
import types

import pytest
from attention_cases import AttentionCase, check_forward, check_gradients, cotangents

from helpers.attention import masking
from helpers.attention.portable import backward, forward, tiles
from helpers.attention.problem import check_call

pytestmark = pytest.mark.full

CASES = [
    AttentionCase(64, 64, 24, arguments={"local_window_size": (17, 17)}),  # edges at the end of a tile
    AttentionCase(63, 65, 24, N=4, K=2),
    AttentionCase(100, 130, 24, N=4, K=2, arguments={"is_causal": True}),
    AttentionCase(70, 50, 16, B=2, query_lengths=(70, 20), key_lengths=(17, 50)),
    AttentionCase(60, 60, 16, logits="low", arguments={"local_window_size": (9, 4)}),
    AttentionCase(40, 90, 64, dtype="bfloat16"),
    AttentionCase(40, 90, 80, dtype="bfloat16", value_size=1e30, arguments={"scale": -0.3}),
    AttentionCase(33, 1000, 24, dtype="float16", logits="equal", value_size=300.0),
    AttentionCase(64, 64, 24, logits="last huge", arguments={"local_window_size": (17, 17)}),
    AttentionCase(16, 1024, 16, dtype="bfloat16"),  # many tiles, so that rounding adds up
]

FAULTS = {
    "acc is not rescaled": ("acc = alpha[:, None] * acc + ", "acc = acc + "),
    "l is not rescaled": ("l = alpha * l + ", "l = l + "),
    "neither is rescaled": ("alpha = exp2(m - reference, interpret)", "alpha = jnp.ones_like(m)"),
    "alpha is inverted": ("exp2(m - reference, interpret)", "exp2(reference - m, interpret)"),
    "the maximum of the tile replaces the running one": ("jnp.maximum(m, s.max(axis=1))", "s.max(axis=1)"),
    "p uses the old maximum": ("exp2(s - reference[:, None], interpret)", "exp2(s - m[:, None], interpret)"),
    "the maximum starts at zero": ("jnp.full(block_q, -jnp.inf, jnp.float32)", "jnp.zeros(block_q, jnp.float32)"),
    "the scale is forgotten": ("(problem.scale * LOG2_E)", "LOG2_E"),
    "the base is mixed up": ("(problem.scale * LOG2_E)", "problem.scale"),
    "lse stays in base 2": ("(m + jnp.log2(l)) / LOG2_E", "m + jnp.log2(l)"),
    "the result is not divided by l": ("acc / l[:, None]", "acc"),
    "the key tail is not masked": ("(cols < key_length)[:, None] & in_head", "in_head"),
    "the logits are not masked": ("visible(rows[:, None], cols[None, :]", "(cols[None, :] >= 0) | visible(rows[:, None], cols[None, :]"),
    "the last key tile is skipped": ("fori_loop(first, stop,", "fori_loop(first, stop - 1,"),
    "the first key tile is skipped": ("fori_loop(first, stop,", "fori_loop(first + 1, stop,"),
    "every query head reads key head 0": ("n // problem.group, 0)", "0, 0)"),
    "the group is taken modulo": ("n // problem.group, 0)", "n % problem.K, 0)"),
    "query tiles are written one off": ("pl.program_id(0) * block_q", "pl.program_id(0) * block_q + 1"),
    "the head_dim is not masked": ("in_head = jnp.arange(head_padded)[None, :] < problem.H", "in_head = jnp.arange(head_padded)[None, :] < head_padded"),
    "p is summed in 16 bits": ("p.sum(axis=1)", "p.astype(v.dtype).sum(axis=1)"),
    "acc is kept in 16 bits": ("return m_new, l, acc", "return m_new, l, acc.astype(v.dtype).astype(jnp.float32)"),
    "lengths of the keys are ignored": ("length_of(key_length_ref, problem.S)", "problem.S"),
    "lengths of the queries are ignored": ("length_of(query_length_ref, problem.T)", "problem.T"),
    "an empty row divides by zero": ("l = jnp.where(empty, 1, l)", "l = l"),
    "the scale is ignored": ("problem.scale *", "problem.H**-0.5 *"),
    "the sign of the scale is lost": ("problem.scale *", "abs(problem.scale) *"),
    "everything 16-bit becomes float16": ("dot(p.astype(v.dtype), v)", "dot(p.astype(jnp.float16), v.astype(jnp.float16))"),
    "acc is rounded before the division": ("(acc / l[:, None]).astype(out_ref.dtype)", "acc.astype(out_ref.dtype) / l.astype(out_ref.dtype)[:, None]"),
    "values are clipped": ("k = plt.load(k_ref.at[tile, :], mask=k_mask, other=0)\n        v = plt.load(v_ref.at[tile, :], mask=k_mask, other=0)", "k = plt.load(k_ref.at[tile, :], mask=k_mask, other=0)\n        v = jnp.clip(plt.load(v_ref.at[tile, :], mask=k_mask, other=0), -1e4, 1e4)"),
    "the maximum is over hidden keys too": ("jnp.maximum(m, s.max(axis=1))", "jnp.maximum(m, (problem.scale * LOG2_E * dot(q, k.T)).max(axis=1))"),
    "columns repeat past the 64th of the head": ("in_head = jnp.arange(head_padded)[None, :] < problem.H", "in_head = jnp.arange(head_padded)[None, :] < min(problem.H, 64)"),
}  # fmt: skip

MASK_FAULTS = {
    "causal hides the diagonal": ("cols <= rows + band.right", "cols < rows + band.right"),
    "causal shows one too many": ("cols <= rows + band.right", "cols <= rows + band.right + 1"),
    "the left edge is one off": ("cols >= rows - band.left", "cols > rows - band.left"),
    "the last visible key of a tile is missed": ("q_stop + band.right)", "q_stop + band.right - 1)"),
    "the first visible key of a tile is missed": ("q_start - band.left, 0)", "q_start - band.left + 1, 0)"),
    "the causal bound rounds down": ("(stop_key + block_k - 1) // block_k", "stop_key // block_k"),
}


GRADIENT_CASES = [
    AttentionCase(64, 64, 24, arguments={"local_window_size": (17, 17)}),
    AttentionCase(63, 65, 24, N=4, K=2, dtype="float32"),
    AttentionCase(100, 70, 24, N=2, K=1, B=2, arguments={"is_causal": True}, key_lengths=(70, 20)),
    AttentionCase(60, 50, 16, B=2, query_lengths=(60, 20), key_lengths=(0, 50)),
    AttentionCase(40, 90, 64, dtype="bfloat16", arguments={"scale": -0.3}),
    # A sharp softmax with dp close to delta.
    AttentionCase(40, 90, 16, dtype="bfloat16", value_size=10.0, arguments={"scale": 3.0}),
]

GRADIENT_FAULTS = {
    "delta is missing": ("p * (dp - delta[:, None])", "p * dp"),
    "delta is added": ("p * (dp - delta[:, None])", "p * (dp + delta[:, None])"),
    "delta is rowsum(do)": ("(out * do).sum(axis=1)", "do.sum(axis=1)"),
    "the gradient of lse is forgotten": (".sum(axis=1) - dlse", ".sum(axis=1)"),
    "the gradient of lse is added to delta": (".sum(axis=1) - dlse", ".sum(axis=1) + dlse"),
    "blind rows pass a gradient": ("jnp.where(lse == -jnp.inf, 0, delta)", "delta / 0"),
    "lse is not in base 2": ("(LOG2_E * lse)", "lse"),
    "p is not masked": (
        "jnp.where(seen, exp2(s - (LOG2_E * lse)[:, None], interpret), 0)",
        "exp2(s - (LOG2_E * lse)[:, None], interpret)",
    ),
    "the scale is missing in p": ("(scale * LOG2_E)", "LOG2_E"),
    "lse is rounded to 16 bits": ("(LOG2_E * lse)", "(LOG2_E * lse.astype(q.dtype if q.dtype.itemsize == 2 else jnp.float16)).astype(jnp.float32)"),
    "dv uses ds": ("dv += dot(p.astype(do.dtype).T, do)", "dv += dot(ds.astype(do.dtype).T, do)"),
    "dv is overwritten": ("dv += dot(", "dv = dot("),
    "dk is overwritten": ("dk += dot(", "dk = dot("),
    "dk is not scaled": ("(problem.scale * dk)", "dk"),
    "dq is not scaled": ("(problem.scale * dq)", "dq"),
    "dq is scaled twice": ("(problem.scale * dq)", "(problem.scale**2 * dq)"),
    "only the first head of a group counts": ("fori_loop(0, problem.group, one_head", "fori_loop(0, 1, one_head"),
    "the first query tile is skipped": ("fori_loop(first, stop, one_tile", "fori_loop(first + 1, stop, one_tile"),
    "the last key tile is skipped": ("fori_loop(first, stop, lambda j", "fori_loop(first, stop - 1, lambda j"),
    "delta is never mended": ("eps * norm).max() > 0", "eps * norm).max() < 0"),
    "delta is mended the wrong way": ("delta += error", "delta -= error"),
    "delta is mended as if lse had no gradient": ("ds_sum - dlse", "ds_sum"),
    "the mended delta does not reach dk": ("(*arrays[:5], delta, *arrays[6:])", "arrays"),
    "ds is rounded to float16": ("ds = ds.astype(q.dtype)", "ds = ds.astype(jnp.float16).astype(q.dtype)"),
    "every query head reads key head 0": ("n // problem.group, 0)", "0, 0)"),
}  # fmt: skip

MODULES = (masking, tiles, forward, backward)


def kernels_with(changed=None, fault=None):
    """Copies of the kernel modules in which `fault` = (old, new) changed the source of one of them."""
    copies = {}
    for module in MODULES:
        source = inspect.getsource(module)
        if module is changed:
            old, new = fault
            assert source.count(old) >= 1, f"{old!r} does not stand in {module.__name__}"
            source = source.replace(old, new)
        copy = copies[module] = types.ModuleType(module.__name__)
        copy.__file__ = module.__file__
        exec(compile(source, module.__file__, "exec"), copy.__dict__)
        # What the copy imported from a module that was copied before it, it takes from that copy.
        for original, earlier in copies.items():
            for name, value in vars(original).items():
                if not name.startswith("__") and vars(copy).get(name) is value and original is not module:
                    setattr(copy, name, getattr(earlier, name))
    return copies


def run_forward(copies, query, key, value, **arguments):
    call = check_call(query, key, value, **arguments)
    out, lse = copies[forward].forward(call, block_q=16, block_k=32, interpret=True)
    return out, lse.swapaxes(1, 2)


def run_backward(copies, case):
    arrays, arguments = case.inputs()
    call = check_call(*arrays, **arguments)
    dout, dlse = cotangents(case)
    out, lse = forward.forward(call, interpret=True)
    options = {"block_q": 16, "block_k": 32, "interpret": True}
    return copies[backward].backward(call, out, lse, dout, dlse.swapaxes(1, 2), **options)


def caught(copies):
    """Whether some forward case fails its comparison with the oracle."""
    return _fails(lambda case: check_forward(functools.partial(run_forward, copies), case), CASES)


def gradients_caught(copies):
    """Whether some backward case does."""
    return _fails(lambda case: check_gradients(functools.partial(run_backward, copies), case), GRADIENT_CASES)


def _fails(check, cases):
    for case in cases:
        try:
            check(case)
        except AssertionError:
            return True
    return False


def test_the_sound_kernels_pass():
    assert not caught(kernels_with())
    assert not gradients_caught(kernels_with())


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_the_kernel_is_caught(name):
    assert caught(kernels_with(forward, FAULTS[name]))


@pytest.mark.parametrize("name", GRADIENT_FAULTS)
def test_a_fault_in_the_backward_kernels_is_caught(name):
    assert gradients_caught(kernels_with(backward, GRADIENT_FAULTS[name]))


@pytest.mark.parametrize("name", MASK_FAULTS)
def test_a_fault_in_the_mask_is_caught(name):
    copies = kernels_with(masking, MASK_FAULTS[name])
    assert caught(copies) and gradients_caught(copies)
