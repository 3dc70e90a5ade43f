"""What the pages of the site show that code knows better than prose: what serves a call, and records."""

import collections
import functools
import itertools
import re
import statistics
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from helpers.attention.problem import check_call
from helpers.attention.public import registry
from helpers.instruments import results
from helpers.plots import measuring as plots
from helpers.site import landing

H100 = jax.sharding.AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu")
TPU = jax.sharding.AbstractDevice(device_kind="TPU v6 lite", num_cores=1, platform="tpu")
LENGTHS = (1024, 4096, 16384)
WIDTH = 2048  # N H of the recorded grid
COLUMNS = tuple(itertools.product((64, 128), (False, True)))
PASSES = ("forward", "backward")
PEERS = {"cudnn": "cuDNN", "flash_attention_3": "FlashAttention-3", "flash_attention_4": "FlashAttention-4"}
SEGMENTS = ("query_segment_ids", "key_value_segment_ids")
# What a note of the benchmark holds, and how a reader is told. Where several fit, the first does.
REASONS = (
    ("not supported in the backwards", "has no backward pass of causal attention"),
    ("past the end of arrays", "was timed on whole blocks: JAX 0.11 has it write past the end of others"),
    ("too little memory on this GPU", "ran out of the memory of this GPU"),
    ("", "stopped with an error"),
)

# What a call may ask for: its name, then what differs from a full call of 16-bit arrays that all implementations serve.
REQUESTS = (
    ("bfloat16 or float16", {}),
    ("float32", {"dtype": "float32"}),
    ("head dimension up to 128, in multiples of 8", {"H": 72}),
    ("any head dimension up to 256", {"H": 250}),
    ("fewer key/value heads than query heads", {"K": 1}),
    ("more keys than queries, or fewer", {"S": 24}),
    ("`is_causal`", {"is_causal": True}),
    ("`local_window_size`, nothing to the right", {"local_window_size": (4, 0)}),
    ("`local_window_size`, both sides", {"local_window_size": (4, 4)}),
    ("`query_seq_lengths`, `key_value_seq_lengths`", {"lengths": True}),
    ("`causal_offset`", {"is_causal": True, "causal_offset": 4}),
    ("`bias`", {"bias": np.zeros((16, 16), np.float32)}),
    ("`mask`", {"mask": np.ones((16, 16), bool)}),
    ("`query_segment_ids`, `key_value_segment_ids`", dict.fromkeys(SEGMENTS, np.zeros((1, 16), np.int32))),
    ("`logits_soft_cap`", {"logits_soft_cap": 30.0}),
    ("`sinks`", {"sinks": np.zeros(2, np.float32)}),
    ("`mask_mod`", {"mask_mod": lambda b, n, i, j: i >= j}),
    ("`score_mod`", {"score_mod": lambda s, b, n, i, j: s}),
    ("`scale` of any sign", {"scale": -1.0}),
    ("`return_residual`", {"return_residual": True}),
)


def write(stage, repository, revision):
    """Write the computed pages and parts of pages into the folder that Sphinx reads.

    repository and revision: as in `build.build`.
    """
    generated = stage / "generated"
    generated.mkdir()
    recorded = results.read()
    versions = ", ".join(f"{name} {version}" for name, version in recorded["versions"].items())
    texts = {
        "buttons.md": landing.buttons(repository, revision),
        "shown.md": landing.shown(recorded),
        "paths.md": landing.paths(),
        "commands.md": landing.commands(repository),
        "serves.md": serves_table(),
        "run.md": f"{recorded['gpu']}, {recorded['date']}, commit {recorded['commit']}; {versions}",
        "conclusion.md": conclusion(recorded),
        "not_measured.md": not_measured(recorded["notes"]),
    }
    for which in PASSES:
        texts[f"{which}.md"] = rates_table(recorded, which)
        texts[f"ratios_{which}.md"] = ratios_table(recorded["records"], which)
    for name, text in texts.items():
        (generated / name).write_text(text + "\n", encoding="utf-8")
    for name, figure in pictures(recorded).items():
        figure.savefig(stage / "figures" / name, dpi=2 * figure.dpi)


def table(head, rows):
    """A Markdown table whose first column is text, and the others centred."""
    lines = [head, ["---", *[":-:"] * (len(head) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


# The function


def serves_table():
    """What each implementation serves on an H100, or on a TPU, as the checks of `flash_attention` say it."""
    names = registry.IMPLEMENTATIONS
    rows = [[name, *("✓" if why_not(i, **request) is None else "–" for i in names)] for name, request in REQUESTS]
    return table(["a call with", *(f"`{name}`" for name in names)], rows)


def why_not(implementation, dtype="bfloat16", S=16, K=2, H=64, lengths=False, return_residual=False, **options):
    """Why an implementation cannot serve a call on its device, or None where it can."""
    query, key = jnp.zeros((1, 16, 2, H), dtype), jnp.zeros((1, S, K, H), dtype)
    if lengths:
        options |= dict.fromkeys(("query_seq_lengths", "key_value_seq_lengths"), jnp.full(1, 16, jnp.int32))
    call = check_call(query, key, key, **options)
    device = TPU if implementation == "tpu" else H100
    with mock.patch.object(registry, "compute_capability", lambda _: (9, 0)):
        return registry.why_not(implementation, call, return_residual, device)


# The results


def find(records, which, T, H, is_causal, dtype="bfloat16"):
    """{implementation: record} of one case of the grid, with a key/value head for each query head."""
    case = {"pass": which, "T": T, "H": H, "K": WIDTH // H, "is_causal": is_causal, "dtype": dtype}
    return {record["implementation"]: record for record in records if record | case == record}


def column_names():
    return [f"H = {H}, {plots.mask_of(is_causal)}" for H, is_causal in COLUMNS]


def rates_table(recorded, which):
    """TFLOP/s by device time and per cent of the matrix product at T = 4096, for each implementation."""
    top = recorded["ceilings"]["matmul_tflops"]
    cases = [find(recorded["records"], which, 4096, *column) for column in COLUMNS]
    rows = []
    for name in plots.LOOKS:
        rates = [case[name]["tflops"] if name in case and case[name]["device_ms"] else None for case in cases]
        if any(rates):
            rows.append([f"`{name}`", *(f"{rate:.0f} ({rate / top:.0%})" if rate else "–" for rate in rates)])
    return table([which, *column_names()], rows)


def ratios_table(records, which):
    """TFLOP/s of the Hopper kernels, and as multiples of those of each peer."""
    rows = []
    for T in LENGTHS:
        row = [f"T = {T}"]
        for column in COLUMNS:
            rates = {name: record["tflops"] for name, record in find(records, which, T, *column).items()}
            ratios = (rates["hopper"] / rates[peer] for peer in PEERS)
            row.append(" · ".join([f"{rates['hopper']:.0f}", *(f"{ratio:.2f}" for ratio in ratios)]))
        rows.append(row)
    return table([which, *column_names()], rows)


def conclusion(recorded):
    """What the tables say of the kernels of this series, in four sentences."""
    *others, last = PEERS.values()
    told = functools.partial(_told, recorded["records"])
    return (
        f"On an {recorded['gpu']} in bfloat16, the Hopper kernels of this series are {told('hopper', PEERS)} as the "
        f"fastest of {', '.join(others)} and {last}. Beside cuDNN alone they are {told('hopper', ['cudnn'])}. The "
        f"portable kernels, for NVIDIA GPUs from Ampere on, are {told('portable', ['torch_sdpa'])} as PyTorch's "
        "FlashAttention-2. These are geometric means over twelve shapes, and in brackets the lowest and the highest."
    )


def _told(records, ours, peers):
    """How many times as fast an implementation is as the fastest of its peers, in all cases of the tables."""
    said = []
    for which in PASSES:
        cases = [find(records, which, T, *column) for column, T in itertools.product(COLUMNS, LENGTHS)]
        ratios = [case[ours]["tflops"] / max(case[peer]["tflops"] for peer in peers) for case in cases]
        times = f"{statistics.geometric_mean(ratios):.2f} times" + " as fast" * (not said)
        said.append(f"{times} {which} ({min(ratios):.2f} to {max(ratios):.2f})")
    return " and ".join(said)


def not_measured(notes):
    """What the benchmark could not measure, decoding aside: a line of Markdown for each reason, for all its cases."""
    found = collections.defaultdict(dict)
    for note in notes:
        if note.startswith("decode"):
            continue
        reason = next(words for part, words in REASONS if part in note)
        name = next(part for part in note.split(": ") if part.isidentifier() and part != "memory")
        found[reason].setdefault(name, []).extend(re.findall(r"\w+ at T = \d+", note))
    lines = []
    for reason, places in found.items():
        names = (f"`{name}`" + f" ({', '.join(where)})" * bool(where) for name, where in places.items())
        lines.append(f"- {' and '.join(names)} {reason}.")
    return "\n".join(lines)


def pictures(recorded):
    """{file name: figure} of the first page and of that with the results."""
    top = recorded["ceilings"]["matmul_tflops"]
    drawn = {"landing.png": landing.picture(recorded)}
    for which in PASSES:
        rates = {column: {} for column in COLUMNS}
        for column, T in itertools.product(COLUMNS, LENGTHS):
            for name, record in find(recorded["records"], which, T, *column).items():
                if record["device_ms"] and name != "triton":  # portable stands in its place
                    rates[column].setdefault(name, {})[T] = record["tflops"]
        drawn[f"results-{which}.png"] = plots.against(rates, LENGTHS, top, f"{which.capitalize()} pass, bfloat16")
    return drawn
