"""Pictures of notebook 12: operands, shared memory, registers, and cycles of two units."""

from helpers.instruments.on_chip import SMEM_LIMIT, SMEM_RATE, TENSOR_RATE, WARPGROUP
from helpers.plots import draw, style

KIB = 1024
HATCHES = {"do": "\\\\", "dp": "\\\\", "ds": "//", "dq": "xx", "dk": "xx", "dv": "xx", "delta": ".."}
# How the product of a name is written, for kernels that own keys and for the one that owns queries.
BY_KEYS = {
    "s": ("k", "qᵀ", "sᵀ"),
    "dp": ("v", "doᵀ", "dpᵀ"),
    "dv": ("pᵀ", "do", "dv"),
    "dk": ("dsᵀ", "q", "dk"),
    "dq": ("ds", "k", "dq"),
}
BY_QUERIES = {"s": ("q", "kᵀ", "s"), "dp": ("do", "vᵀ", "dp"), "dq": ("ds", "k", "dq")}


def products(kernel):
    """The products of one warpgroup in one step, each a left operand, a right operand and an accumulator."""
    names = BY_QUERIES if kernel.name == "dq" else BY_KEYS
    rows = len(kernel.products)
    figure, axes = style.drawing(10, 1.12 * rows + 0.9, x=(0, 10), y=(rows - 0.3, -0.62))
    for y, product in enumerate(kernel.products):
        left, right, result = names[product.name]
        held = product.left == "registers"
        size = 2 * product.m * product.k
        where = f"registers, {size // WARPGROUP // 4} a thread" if held else f"shared memory, {size // KIB} KiB"
        _tile(axes, 1.9, y, product.m, product.k, left, held, where)
        draw.label(axes, 3.35, y, "×", size=14)
        where = f"shared memory, {2 * product.k * product.n // KIB} KiB"
        _tile(axes, 4.8, y, product.k, product.n, right, False, where)
        draw.label(axes, 6.25, y, "→", size=14)
        where = f"accumulator, {product.m * product.n // WARPGROUP} a thread"
        _tile(axes, 7.7, y, product.m, product.n, result, True, where)
        axes.text(0.1, y, f"{product.m}×{product.k}×{product.n}", va="center", size=9)
    axes.set_title(f"{kernel.name}: what one warpgroup multiplies in a step, first to last")
    kinds = {"in shared memory": ("#FFFFFF", None), "in registers": (style.SKIPPED, "///")}
    draw.below(figure, handles=draw.keys(kinds, ec=style.INK))
    return figure


def _tile(axes, x, y, rows, columns, name, held, where):
    height, width = rows / 190, columns / 190
    corner, colour = (x - width / 2, y - height / 2), style.ROLES[name.removesuffix("ᵀ")]
    draw.tinted(axes, *corner, width, height, colour, alpha=0.35, lw=1.4, hatch="///" if held else None)
    draw.label(axes, x, y, name, weight="bold", bbox=draw.paper(1, 0.8))
    axes.text(x, y + height / 2 + 0.03, where, ha="center", va="top", size=8)


def shared_memory(kernels):
    """Stacked bars of what kernels keep in shared memory, with the limit. kernels: {title: `on_chip.Kernel`}."""
    figure, axes = style.subplots(width=10, height=0.72 * len(kernels) + 1.5)
    limit, said = SMEM_LIMIT // KIB, []
    for y, (title, kernel) in enumerate(kernels.items()):
        held = [(name.removesuffix("_smem"), size / KIB) for name, size in kernel.buffers.items()]
        told = ", ".join(f"{name} {amount:.3g}" for name, amount in held)
        said.append(f"{title}: {told}; in all {kernel.smem / KIB:g}.")
        large = [(name, amount) for name, amount in held if name not in ("lse", "delta")]
        small = sum(amount for name, amount in held if name in ("lse", "delta"))
        parts = [_part(name, amount, f"{name}\n{amount:.0f}") for name, amount in large]
        end = draw.stack(axes, y, [*parts, _part("lse", small)], 0.66)
        axes.text(end + 1.5, y, f"{kernel.smem / KIB:g}", va="center", size=9, weight="bold")
    _limited(axes, kernels, limit)
    axes.set(xlim=(0, limit * 1.12), title="What one program keeps in shared memory")
    axes.set_xlabel("KiB of shared memory (the narrow bar at the end: lse and delta)")
    figure.alt = f"What one program keeps in shared memory, in KiB, of {limit}. {' '.join(said)}"
    return figure


def _part(name, amount, text=None):
    return amount, style.ROLES[name], HATCHES.get(name), text


def _limited(axes, names, limit):
    """Rows of bars with a line at what there is."""
    axes.axvline(limit, color=style.INK, ls="--", lw=1.4)
    axes.text(limit + 1, -0.62, f"limit: {limit}", va="center", size=9)
    draw.rows(axes, names)
    axes.set_ylim(len(names) - 0.5, -0.8)


def registers(panels, limit):
    """Stacked bars of registers of a thread. panels: {title: {name: registers}}; limit: what a thread may have."""
    figure, axes = style.subplots(width=10, height=0.62 * len(panels) + 1.4)
    said, ends = [], []
    for y, (title, held) in enumerate(panels.items()):
        told = ", ".join(f"{name} {amount}" for name, amount in held.items())
        parts = [_part(name.split("1")[0], amount, f"{name}\n{amount}") for name, amount in held.items()]
        ends.append(draw.stack(axes, y, parts, 0.66))
        said.append(f"{title}: {told}; in all {ends[-1]}.")
        text = f"{ends[-1]}" + (" ✗" if ends[-1] > limit else "")
        axes.text(ends[-1] + 2, y, text, va="center", weight="bold", size=9)
    _limited(axes, panels, limit)
    axes.set(xlim=(0, max(limit * 1.15, 1.08 * max(ends))), xlabel="registers of a thread")
    title = "Accumulators and 16-bit operands that live at the same time"
    axes.set_title(title)
    figure.alt = f"{title}, in registers of a thread, of {limit}. {' '.join(said)}"
    return figure


def cycles(forms):
    """Least cycles of one step by two units. forms: {title: {kernel: (FLOPs, {what: bytes})}}."""
    figure, axes = style.subplots(width=10, height=0.95 * sum(map(len, forms.values())) + 1.7)
    words = {"size": 7.5, "bbox": draw.paper(0.5, 0.75)}
    y, ticks, ends, said = 0.0, {}, [], []
    for title, kernels in forms.items():
        for name, (flops, traffic) in kernels.items():
            tensor = flops / TENSOR_RATE
            axes.barh(y, tensor, 0.36, color=style.SKIPPED, ec=style.INK, lw=0.8)
            axes.text(tensor + 20, y, f"{tensor:.0f}", va="center", size=9)
            parts = []
            for what, amount in traffic.items():
                label = what.split(":")[0].replace(" written", " in").replace(" read by TMA", " out")
                colour = style.ROLES.get(what.split(":")[0].split()[0], style.STATE)
                parts.append((amount / SMEM_RATE, colour, "" if "operands" in what else "//", label))
            end = draw.stack(axes, y + 0.4, parts, 0.36, words, lw=1)
            axes.text(end + 20, y + 0.4, f"{end:.0f}", va="center", size=9)
            ends += [end, tensor]
            ticks[y + 0.2] = f"{title}\n{name}" if len(kernels) > 1 else title
            told = ", ".join(f"{label} {wide:.0f}" for wide, *_, label in parts)
            whose = ticks[y + 0.2].replace("\n", ", ")
            said.append(f"{whose}: tensor core {tensor:.0f}, shared memory {end:.0f}: {told}.")
            y += 1
        y += 0.25
    axes.set_yticks(list(ticks), list(ticks.values()))
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set(xlim=(0, max(ends) * 1.1), xlabel="cycles for 64 queries and 128 keys, at the least")
    axes.set_title("Grey: tensor core. Coloured: shared memory (hatched: not an operand)")
    figure.alt = f"Cycles for 64 queries and 128 keys, at the least. {' '.join(said)}"
    return figure
