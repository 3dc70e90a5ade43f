"""What happens to derivatives that the kernels do not have: an error that says which there are."""

from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


def _refuse(*_, **__):
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
tangent_p.def_impl(_refuse)
mlir.register_lowering(array_p, lambda _, array: [array])
mlir.register_lowering(tangent_p, _refuse)
batching.defvectorized(array_p)
batching.primitive_batchers[tangent_p] = _refuse
ad.deflinear2(tangent_p, lambda cotangent, _: [cotangent])
ad.primitive_jvps[array_p] = lambda arrays, tangents: (array_p.bind(*arrays), tangent_p.bind(*tangents))


def reverse_mode_only(array):
    """The same array; a derivative through it in forward mode raises NotImplementedError."""
    return array_p.bind(array)
