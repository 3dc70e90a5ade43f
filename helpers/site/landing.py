"""The first page of the site: a picture of the result, where to start, and three ways through the series."""

from helpers import series
from helpers.plots import style
from helpers.plots.measuring import HATCHES, LOOKS
from helpers.site.colab import BRANCH, GITHUB, OPENS

CASE = {"pass": "forward", "dtype": "bfloat16", "T": 4096, "N": 16, "K": 16, "H": 128, "is_causal": True}
BARS = {
    "naive": "naive attention",
    "portable": "this series: portable kernel",
    "cudnn": "cuDNN",
    "hopper": "this series: Hopper kernel",
}
FIRST = "notebooks/00_start_here.ipynb"


def rates(recorded):
    """{implementation: TFLOP/s} of the case that the picture shows."""
    return {record["implementation"]: record["tflops"] for record in recorded["records"] if record | CASE == record}


def picture(recorded):
    """TFLOP/s of naive attention, of both kernels of the series and of cuDNN, as bars with their names above them.

    The letters are large, for the picture shrinks with the screen.
    """
    rate, top = rates(recorded), recorded["ceilings"]["matmul_tflops"]
    title = f"Forward pass, {recorded['gpu']}"
    figure, axes = style.subplots(width=4.8, height=3.4)
    figure.get_layout_engine().set(w_pad=0.15, h_pad=0.12)
    for row, (name, words) in enumerate(BARS.items()):
        axes.barh(-row, rate[name], 0.42, color=LOOKS[name][0], hatch=HATCHES[name], ec=style.PAPER)
        weight = "bold" if words.startswith("this series") else "normal"
        axes.text(0, 0.27 - row, words, va="bottom", size=12, weight=weight)
        axes.text(rate[name] + 10, -row, f"{rate[name]:.0f}", va="center", size=12, weight=weight)
    axes.axvline(top, color=style.INK, lw=1.4, ls=":")
    axes.set(xlim=(0, top * 1.02), ylim=(-len(BARS) + 0.65, 0.72), yticks=[])
    axes.spines["left"].set_visible(False)
    axes.tick_params(labelsize=11)
    axes.set_xlabel("TFLOP/s (dotted: matrix product)", size=12)
    axes.set_title(title, size=13)
    told = ", ".join(f"{words} {rate[name]:.0f}" for name, words in BARS.items())
    figure.alt = f"{title}, in TFLOP/s: {told}; a large matrix product {top:.0f}."
    return figure


def shown(recorded):
    """The picture and what it says, in Markdown."""
    rate = rates(recorded)
    return (
        f"![{picture(recorded).alt}](figures/landing.png)\n\n"
        f"Causal attention of {CASE['T']} queries and keys, head dimension {CASE['H']}, {CASE['dtype']}. The "
        "portable kernel computes what that of [05](notebooks/05_forward_kernel.ipynb) does, on any NVIDIA GPU from "
        "Ampere on. The Hopper kernel of [10](notebooks/10_hopper_forward.ipynb) and "
        "[11](notebooks/11_hopper_forward_tuned.ipynb) is "
        f"{rate['hopper'] / rate['naive']:.1f} times as fast as naive attention and "
        f"{rate['hopper'] / rate['cudnn']:.2f} times as fast as cuDNN. In the same run FlashAttention-3 "
        f"reached {rate['flash_attention_3']:.0f} TFLOP/s and FlashAttention-4 {rate['flash_attention_4']:.0f}. "
        "[All results](results.md)"
    )


def buttons(repository, revision):
    """Links to where one can start, in Markdown; without an address of the repository none to other sites."""
    links = {"Start reading": FIRST}
    if repository.startswith(GITHUB):
        name = repository.removeprefix(GITHUB)
        links["Run in Colab"] = f"{OPENS}{name}/blob/{BRANCH}/{FIRST}"
        links["Run in Binder"] = f"https://mybinder.org/v2/gh/{name}/{revision}?urlpath=lab/tree/{FIRST}"
    links["Install"] = "#install"
    return " ".join(f"[{words}]({target})" for words, target in links.items())


def commands(repository):
    """What to type to have the series on a machine."""
    if not repository:
        return "```sh\nmake lab  # in your copy of the repository\n```"
    return f"```sh\ngit clone {repository}\ncd {repository.rsplit('/', 1)[-1]}\nmake lab\n```"


def paths():
    """The three ways through, as boxes in Markdown."""
    boxes = (
        f"```{{container}} path\n**{path['name'].capitalize()}**\n\nabout {series.hours(path['minutes'])} hours\n\n"
        f"{series.steps(path, 'notebooks/')}.\n\n*At the end:* {path['ends']}.\n```"
        for path in series.PATHS
    )
    return "````{container} paths\n" + "\n".join(boxes) + "\n````"
