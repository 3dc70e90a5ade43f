"""Calls that go near every edge of the kernels' memory, for a tool that watches each access.

    compute-sanitizer --error-exitcode 1 python -m helpers.dev.memcheck        (make gpu-memcheck)

Results are compared with float64 by the way. There are tails on both sides, fewer queries than a tile and
more, every padded head_dim, walks up and down through the heads of a group, guesses that fail, both forms
of the Hopper backward pass, windows and lengths for the portable kernels, and few queries whose keys lie in one
piece or in pages, with a table that is wrong where no key is. Small, for the tool makes a
kernel hundreds of times slower. The exit status is 1 if a result is wrong; compute-sanitizer has its own.
"""

import itertools
import sys
from dataclasses import replace

import jax
from tqdm import tqdm

from helpers.attention.hopper import backward_schedule, forward
from helpers.dev.fuzz import Trial, attempt

SHAPES = ((65, 257), (200, 129), (7, 300), (321, 40))
NUM_SMS = 4  # as many the kernels are told that there are, so that programs take turns and walks go up


def trials():
    """Every `fuzz.Trial` to be run, in pairs of neighbouring shapes and masks rather than all with all."""
    cases = itertools.product((64, 80, 200), ("bfloat16", "float16"))
    for n, (H, dtype) in enumerate(cases):
        for is_causal, kinds in ((True, ()), (False, (("key", "rising", 10.0),)), (True, (("logits", "spread", 8.0),))):
            T, S = SHAPES[(n + is_causal) % len(SHAPES)]
            one = Trial(T, S, H, N=4, K=2, B=2, dtype=dtype, is_causal=is_causal, kinds=kinds)
            yield replace(one, implementation="hopper")
            yield replace(one, implementation="portable", window=(30, 5), query_lengths=(T, T // 2), key_lengths=(3, S))
    for n, (T, S) in enumerate(((1, 1000), (3, 517), (16, 2048), (2, 15))):
        one = Trial(T, S, (64, 80, 200)[n % 3], N=6, K=2, B=2, key_lengths=(S, S // 3), implementation="portable")
        yield one
        yield replace(one, page=(16, 17, 64, 200)[n], dtype="float16")
    for T, S in SHAPES:
        yield Trial(T, S, 40, dtype="float32", is_causal=True, implementation="portable")


def main():
    wrong = 0
    todo = list(trials())
    if jax.devices()[0].platform != "gpu":
        sys.exit("This needs a GPU.")
    backward_schedule.core_count = forward.core_count = lambda _: NUM_SMS
    for trial in tqdm(todo, unit=" calls", mininterval=5.0):
        report = attempt((trial,))
        if report.kind != "right":
            wrong += 1
            print(f"{report.text}\n  {report.reproduction}")
    print(f"{len(todo)} calls, {wrong} wrong.")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
