"""What the warpgroups of a Hopper backward kernel do in a step, for the model of `helpers.instruments.timeline`.

A walk is a function of (operations, steps) that yields operations; operations[name] is a list of those of one name.
"""

from helpers.instruments.on_chip import SMEM_RATE, TENSOR_RATE
from helpers.instruments.timeline import Issue, Work, simulate

EXPONENTIAL_RATE, ARITHMETIC_RATE = 16, 128  # a cycle of one SM, which its warpgroups share
OPERATIONS_OF_DS = 4


def operations(kernel, slow, me):
    """{name: operations} of warpgroup `me` in a step of an `on_chip.Kernel`.

    A product takes the longer of its times at the tensor core and at shared memory. The work of the threads
    takes a unit of the SM as long as its rate allows, and the warpgroup `slow` times as long.
    """
    products = dict.fromkeys(("s", "dp", "dv", "dq", "dk"), 0.0)
    for product in kernel.products:
        products[product.name] += max(product.flops / TENSOR_RATE, product.bytes_from_smem / SMEM_RATE)
    tiles, H = kernel.tiles, kernel.buffer("k_smem").shape[-1]
    entries, entries_of_dq = 64 * tiles.block_q, tiles.block_q * H / tiles.warpgroups
    threads = {
        "p": ("exponentials", entries / EXPONENTIAL_RATE),
        "ds": ("arithmetic", OPERATIONS_OF_DS * entries / ARITHMETIC_RATE),
        "store ds": ("shared memory", 2 * entries / SMEM_RATE),
        "store dq": ("shared memory", 4 * entries_of_dq / SMEM_RATE),
    }
    found = {name: [Issue("tensor core", cycles, name)] for name, cycles in products.items()}
    for name, (unit, cycles) in threads.items():
        found[name] = [Work(unit, cycles, name)]
        if slow > 1:
            found[name] += [Work(f"threads {me}", (slow - 1) * cycles, name)]
    return found


def run(walk, kernel, slow, steps):
    """The `Run` of two warpgroups over some steps."""
    warpgroups = {f"warpgroup {me}": walk(operations(kernel, slow, me), steps) for me in range(2)}
    return simulate(warpgroups, {"ds_ready": 2})


def cycles_of_a_step(walk, kernel, slow):
    """Once the loop is running: the last 20 of 40 steps."""
    return (run(walk, kernel, slow, steps=40).end - run(walk, kernel, slow, steps=20).end) / 20
