"""Attention with a derivative of its own: a forward pass, and a backward pass that uses what the first one kept.

It is the function that exercise 7.3 builds, with three things more. The residuals have names for `jax.checkpoint`.
A forward pass that will be differentiated may be another than one that will not. And a derivative that the kernels do
not have, forward mode or a second one, is an error that says so.
"""

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

# Names of out, of lse, and of the low bits of out where the backward pass wants them.
RESIDUALS = ("flash_attention_out", "flash_attention_lse", "flash_attention_low_bits")
FIRST_ONLY = 'the kernels have a first derivative only; use implementation="reference" for second derivatives'


def differentiable(
    forward, backward, forward_with_residuals=None, refusal=FIRST_ONLY
):  # fmt: skip
    """attend(query, key, value, *others) -> (out, lse), with a derivative.

    forward(*arrays) -> (out, lse). forward_with_residuals: takes its place where the
    call is differentiated, and may return more arrays, that backward wants.
    backward(arrays, residuals, gradients) -> (dq, dk, dv, ...): of what went in, what
    the forward pass returned, and the gradients of out and lse. What it leaves out,
    or returns None for, has no gradient. refusal: what a second derivative is told.
    """

    @jax.custom_vjp
    def attend(*arrays):
        return forward(*arrays)

    def forward_rule(*arrays):
        run = without_derivative(forward_with_residuals or forward, refusal)
        residuals = tuple(map(checkpoint_name, run(*arrays), RESIDUALS))
        return residuals[:2], (arrays, residuals)

    def backward_rule(kept, gradients):
        arrays, _ = kept
        found = without_derivative(backward, refusal)(*kept, gradients)
        return *found, *(None for _ in arrays[len(found) :])

    attend.defvjp(forward_rule, backward_rule)

    def in_reverse_mode_only(query, key, value, *others):
        arrays = map(reverse_mode_only, (query, key, value))
        return attend(*arrays, *others)

    return in_reverse_mode_only


def without_derivative(function, refusal):
    """The function, as one whose derivative is an error with these words."""
    opaque = jax.custom_jvp(function)

    @opaque.defjvp
    def refuse(*_):
        raise NotImplementedError(refusal)

    return opaque


def _refuse_forward_mode(*_, **__):
    raise NotImplementedError(
        "flash_attention's kernels have reverse mode only (jax.grad, jax.vjp, jax.jacrev); for forward mode (jax.jvp, "
        'jax.linearize, jax.jacfwd, jax.hessian) and second derivatives use implementation="reference"'
    )


# JAX has no public function that has a derivative in reverse mode and says itself what is wrong in forward mode:
# there a custom_vjp raises an error of its own. So the arrays go through an operation that changes nothing, and
# whose tangent reverse mode transposes, while forward mode needs its value.
array_p, tangent_p = Primitive("reverse_mode_only"), Primitive("reverse_mode_only_tangent")

for primitive in (array_p, tangent_p):
    primitive.def_abstract_eval(lambda array: array)
array_p.def_impl(lambda array: array)
tangent_p.def_impl(_refuse_forward_mode)
mlir.register_lowering(array_p, lambda _, array: [array])
mlir.register_lowering(tangent_p, _refuse_forward_mode)
batching.defvectorized(array_p)
batching.primitive_batchers[tangent_p] = _refuse_forward_mode
ad.deflinear2(tangent_p, lambda cotangent, _: [cotangent])
ad.primitive_jvps[array_p] = lambda arrays, tangents: (array_p.bind(*arrays), tangent_p.bind(*tangents))


def reverse_mode_only(array):
    """The same array; a derivative through it in forward mode raises NotImplementedError."""
    return array_p.bind(array)
