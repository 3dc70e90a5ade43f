"""One of two processes that share a ring of four devices: python one_of_two_hosts.py PORT NUMBER.

Prints "right" after a call that gave what one device gives. Host 1 then ends as by a power cut, and host 0 calls
once more.
"""

import os
import signal
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from helpers import flash_attention
from helpers.attention.ring import ring_attention_on_mesh

port, number = sys.argv[1:]
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(number), heartbeat_timeout_seconds=10)
mesh = jax.make_mesh((4,), ("sequence",), axis_types=(AxisType.Auto,))
arrays = [np.random.default_rng(seed).standard_normal((1, 32, 2, 8)).astype(np.float32) for seed in range(3)]
split = NamedSharding(mesh, P(None, "sequence"))
parts = [jax.make_array_from_callback(array.shape, split, array.__getitem__) for array in arrays]


@jax.jit
def gradients(*arrays):
    attend = lambda *arrays: ring_attention_on_mesh(*arrays, mesh=mesh, axis_name="sequence", is_causal=True)
    return jax.grad(lambda *arrays: jnp.square(attend(*arrays)).sum(), (0, 1, 2))(*arrays)


right = jax.grad(lambda *arrays: jnp.square(flash_attention(*arrays, is_causal=True)).sum(), (0, 1, 2))(*arrays)
for mine, other in zip(gradients(*parts), right, strict=True):
    for part in mine.addressable_shards:
        np.testing.assert_allclose(part.data, other[part.index], atol=1e-5)
print("right", flush=True)
if number == "1":
    os.kill(os.getpid(), signal.SIGKILL)
jax.block_until_ready(gradients(*parts))
print("not noticed", flush=True)
