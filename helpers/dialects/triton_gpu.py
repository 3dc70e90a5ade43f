"""Run, compare and time the Triton kernels on an NVIDIA GPU that has PyTorch and Triton, and record the figures.

    python -m helpers.dialects.triton_gpu --commit HASH        writes $OUT/triton.json

    correct      errors of the kernels in each case, by result, against the float64 oracle and against PyTorch; of out
                 and lse, against the oracle, the larger one of both forward kernels, where heads can have descriptors
    second       errors of `flash_attention` and of PyTorch against the oracle, and of one against the other
    times        the kernels in their fastest tiles beside the portable Pallas kernels, taken in turns
    tried        every choice of tiles that was tried
    strides      bandwidth of loads whose threads are `stride` elements apart
    samples      single calls of one small kernel, measured twice in turns, and its first call

What cannot be measured is a line in `notes`. Processes beside each other compile and check, one process measures.
"""

import functools
import itertools
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import torch
import triton

from helpers import flash_attention
from helpers.attention.portable import backward as portable_backward
from helpers.attention.portable import forward as portable_forward
from helpers.attention.problem import check_call
from helpers.dev.workers import Workers
from helpers.dialects import on_gpu, triton_launch
from helpers.dialects.on_gpu import RESULTS, TOKENS, WIDTH, T, errors_of, event_ms, to_gpu
from helpers.dialects.triton_launch import DESCRIBED, Launch
from helpers.instruments.timing import Program, kernel_times, time_together

# Tiles, warps and stages to try, of each kernel.
CHOICES = {
    "forward": [(128, 64, 4, 3), (128, 64, 8, 3), (128, 128, 8, 2), (128, 128, 8, 3), (64, 64, 4, 3), (64, 128, 4, 3)],
    "described": [(128, 64, 4, 3), (128, 64, 8, 3), (128, 128, 8, 2), (128, 128, 8, 3), (64, 64, 4, 3)],
    "dkv": [(64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 8, 2), (32, 128, 4, 2), (64, 64, 8, 2)],
    "dq": [(64, 64, 4, 2), (64, 64, 4, 3), (128, 64, 8, 2), (128, 64, 8, 3)],
}
FORWARD = {"forward": "forward_kernel", "described": "forward_by_descriptors"}
TIMED = list(itertools.product((64, 128), (False, True)))  # head_dim, is_causal
SECOND = [
    (512, 512, 64, 8, 8, "bfloat16", True),
    (512, 512, 128, 8, 2, "float16", True),
    (500, 700, 128, 8, 8, "bfloat16", False),
    (700, 500, 80, 8, 4, "float16", True),
    (257, 391, 64, 4, 4, "float32", True),
]
STRIDES = (1, 2, 4, 8, 16, 32)
SECONDS = 130  # what is not timed by then is left out


def compared(case):
    """A row of the record for one case."""
    arrays, dlse = on_gpu.inputs_of(case)
    right, is_causal = on_gpu.right_answers(case, arrays, dlse), case["is_causal"]
    *q_k_v, do = tensors = [*map(to_gpu, arrays)]
    options = {"is_causal": is_causal, "precision": "ieee"}
    out, lse = triton_launch.forward(*q_k_v, **options)

    def results(dlse):
        return dict(
            zip(RESULTS, (out, lse, *triton_launch.backward(*q_k_v, out, lse, do, dlse, **options)), strict=True)
        )

    against = errors_of(results(0 * lse), on_gpu.of_torch(tensors, is_causal))  # which has no gradient of lse
    row = on_gpu.row_of(case, results(to_gpu(dlse)), right, against)
    if case["H"] * arrays[0].itemsize % DESCRIBED == 0:
        described = triton_launch.forward(*q_k_v, **options, kernel=FORWARD["described"])
        other = on_gpu.row_of(case, dict(zip(RESULTS, described, strict=False)), right, against)
        row["errors"] |= {name: max(error, row["errors"][name]) for name, error in other["errors"].items()}
        row["right"] &= other["right"]
    return row


def launch_one(H, is_causal, kernel, choice):
    """A function that launches one kernel on random arrays of the timed size."""
    B, N = TOKENS // T, WIDTH // H
    query, key, value, do = (torch.randn((B, T, N, H), device="cuda", dtype=torch.bfloat16) for _ in range(4))
    options = {"is_causal": is_causal, "launch": Launch(*choice)}
    if kernel in FORWARD:
        return lambda: triton_launch.forward(query, key, value, **options, kernel=FORWARD[kernel])
    rows = [torch.zeros((B, N, T), device="cuda") for _ in range(2)]
    part = triton_launch.dkv if kernel == "dkv" else triton_launch.dq
    return lambda: part(query, key, value, do, *rows, **options)


def work(task):
    """What a worker does: compare a case, or launch (H, is_causal, kernel, choice) once, which fills Triton's cache."""
    if isinstance(task, dict):
        return compared(task)
    launch_one(*task)()
    torch.cuda.synchronize()
    return None


def in_workers(record):
    """Fill the cache of Triton, and the part `correct` of the record."""
    tasks = [(*group, kernel, choice) for group in TIMED for kernel in CHOICES for choice in CHOICES[kernel]]
    with Workers(work, 12) as workers:
        for outcome in workers.outcomes([*tasks, *on_gpu.cases()], patience=80):
            if outcome.kind != "returned":
                record.note(outcome.task, outcome.failure())
            elif outcome.value:
                record.found["correct"].append(outcome.value)


def fastest(H, is_causal, record):
    """{kernel: Launch}, of those that the GPU takes."""
    best = {}
    for kernel, choices in CHOICES.items():
        times = {}
        for choice in choices:
            try:
                run = launch_one(H, is_causal, kernel, choice)
                run()
                times[choice] = event_ms(run, calls=10)
            except Exception as error:
                record.note((H, kernel, choice), error)
        where = {"H": H, "is_causal": is_causal, "kernel": kernel}
        record.found["tried"] += [where | {"choice": choice, "ms": ms} for choice, ms in times.items()]
        best[kernel] = Launch(*min(times, key=times.get))
    return best


def pallas_programs(H, is_causal):
    """The portable kernels, traced for the timed size: {name: program that is still to be compiled}."""
    B, N = TOKENS // T, WIDTH // H
    array = jax.ShapeDtypeStruct((B, T, N, H), jnp.bfloat16)
    row = jax.ShapeDtypeStruct((B, N, T), jnp.float32)
    call = functools.partial(check_call, is_causal=is_causal)

    def backward(query, key, value, *rest, mends_delta):
        return portable_backward.backward(call(query, key, value), *rest, mends_delta=mends_delta)

    saved = array, array, array, array, row, array, row
    lowered = {"forward": jax.jit(lambda *arrays: portable_forward.forward(call(*arrays))).lower(array, array, array)}
    for name, mends_delta in (("backward", False), ("backward, delta mended", True)):
        lowered[name] = jax.jit(functools.partial(backward, mends_delta=mends_delta)).lower(*saved)
    return lowered


def timed(H, is_causal, pallas, record):
    """Rows of the record: forward and backward, Triton and portable, in turns. pallas: compiled `pallas_programs`."""
    launches = fastest(H, is_causal, record)
    B, N = TOKENS // T, WIDTH // H
    keys = jax.random.split(jax.random.key(16), 4)
    *arrays, do = [jax.random.normal(key, (B, T, N, H), jnp.bfloat16) for key in keys]
    out, lse = pallas["forward"](*arrays)
    saved = jax.block_until_ready((*arrays, out, lse, do, jnp.zeros_like(lse)))
    tensors = tuple(torch.from_dlpack(array) for array in saved)

    def forward(which):
        options = {"is_causal": is_causal, "launch": launches[which], "kernel": FORWARD[which]}
        return Program(functools.partial(triton_launch.forward, **options), [tensors[:3]], on_gpu.wait)

    tiles = {"dkv_launch": launches["dkv"], "dq_launch": launches["dq"]}
    backward = functools.partial(triton_launch.backward, is_causal=is_causal, **tiles)
    programs = {
        "forward": {
            "pallas": Program(pallas["forward"], [saved[:3]]),
            "triton": forward("forward"),
            "triton, descriptors": forward("described"),
        },
        "backward": {
            "pallas": Program(pallas["backward"], [saved]),
            "pallas, delta mended": Program(pallas["backward, delta mended"], [saved]),
            "triton": Program(backward, [tensors], on_gpu.wait),
        },
    }
    rows = []
    for which, together in programs.items():
        times = time_together(together, device_samples=functools.partial(kernel_times, calls=5), sample_ms=20)
        by_device = all(timing.device_ms for timing in times.values())
        for name, timing in times.items():
            ms = timing.device_ms if by_device else timing.wall_ms
            tiles = {kernel: launch._asdict() for kernel, launch in launches.items()} if name == "triton" else None
            case = {"implementation": name, "pass": which, "H": H, "T": T, "is_causal": is_causal, "tiles": tiles}
            clocks = {"device_ms": timing.device_ms, "wall_ms": timing.wall_ms, "spread": timing.spread}
            rows.append({**case, **clocks, "tflops": on_gpu.tflops(which, ms, H, N, B, is_causal)})
    return rows


def second_oracle():
    """`flash_attention` and PyTorch, each against the oracle, and against each other."""
    rows = []
    for numbers in SECOND:
        case = dict(zip((*"TSHNK", "dtype", "is_causal"), numbers, strict=True))
        arrays, dlse = on_gpu.inputs_of(case)
        right = on_gpu.right_answers(case, arrays, 0 * dlse)

        @jax.jit
        def run(inputs, do, is_causal=case["is_causal"]):
            out, pull_back = jax.vjp(lambda *inputs: flash_attention(*inputs, is_causal=is_causal), *inputs)
            return out, *pull_back(do)

        with jax.default_matmul_precision("highest"):
            *inputs, do = map(jnp.asarray, arrays)
            ours = dict(zip(("out", "dq", "dk", "dv"), run(inputs, do), strict=True))
        theirs = on_gpu.of_torch([*map(to_gpu, arrays)], case["is_causal"])
        found = {"ours": errors_of(ours, right), "torch": errors_of(theirs, right)}
        rows.append({**case, **found, "ours_and_torch": errors_of(ours, theirs)})
    return rows


def strides():
    """GB/s of what is used, where neighbouring threads read elements `stride` apart and nothing is read twice."""
    kernel = triton_launch.kernels(interpret=False).strided_sum_kernel
    count, block = 2**26, 1024
    rows = []
    for stride in STRIDES:
        source = torch.ones(count * stride, device="cuda")
        sums = torch.empty(count // block, device="cuda")
        run = functools.partial(kernel[(count // block,)], source, sums, stride, block)
        run()
        if float(sums.min()) != block or float(sums.max()) != block:
            raise RuntimeError(f"stride {stride}: a wrong sum")
        rows.append({"stride": stride, "gbps": 4 * count / event_ms(run, calls=10) / 1e6})
    return rows


def samples(calls=300):
    """Milliseconds of single calls of one small kernel: the first two, then two series of it in turns."""
    query, key, value = (torch.randn((1, 1024, 8, 64), device="cuda", dtype=torch.float16) for _ in range(3))
    launch = Launch(32, 64, 4, 2)  # tiles that nothing has compiled yet
    one = functools.partial(event_ms, lambda: triton_launch.forward(query, key, value, launch=launch), rounds=1)
    first = []
    for _ in range(2):
        clock = time.perf_counter()
        one()
        first.append(1e3 * (time.perf_counter() - clock))
    series = {"a": [], "b": []}
    for turn in range(calls):
        for name in ("ab", "ba")[turn % 2]:
            series[name].append(round(one(), 5))
    return {"first_wall_ms": first, "series": series, "median_ms": statistics.median(series["a"] + series["b"])}


def main(arguments=None):
    commit = on_gpu.parse(arguments, __doc__)
    record = on_gpu.Record("triton", commit, on_gpu.versions(triton=triton.__version__))
    found = record.found
    found |= {"tried": [], "cases": len(on_gpu.cases())}
    in_workers(record)
    record.save(f"{sum(row['right'] for row in found['correct'])} of {found['cases']} cases are right")
    for name, part in (("strides", strides), ("samples", samples), ("second", second_oracle)):
        found[name] = record.attempt(name, part)
        record.save(name)
    with ThreadPoolExecutor(12) as pool:
        waiting = {
            group: {name: pool.submit(one.compile) for name, one in pallas_programs(*group).items()} for group in TIMED
        }
    for group, programs in waiting.items():
        if record.seconds > SECONDS:
            found["notes"].append(f"{group}: left out, {SECONDS} s are over")
            continue
        pallas = {name: one.result() for name, one in programs.items()}
        found["times"] += record.attempt(group, timed, *group, pallas, record)
        record.save(group)
    print(*found["notes"], sep="\n")


if __name__ == "__main__":
    sys.exit(main())
