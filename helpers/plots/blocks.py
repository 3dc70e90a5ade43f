"""Pictures of notebook 04: which block each program of a kernel sees, and what a tail holds.

`program_blocks` and `one_program` draw a `helpers.instruments.traffic.KernelCall`, so they
show the real grid, BlockSpecs and loads of a replayed `pallas_call`. Of an array with more than two axes they
draw two: those along which its blocks move.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from helpers.instruments.traffic import replay
from helpers.plots import draw, style

# Drawn as light tints, and every block is labelled: here colour only helps to find a program again.
PROGRAM_COLOURS = (style.QUERY, style.KEY, style.VALUE, style.LOGITS, style.STATE, style.OUTPUT)
OVERHANG = "////"
MOST_NAMES = 4  # programs named on one block before the list is shortened
MOST_COLUMNS = 3  # panels side by side


def program_blocks(call):
    """One panel for each array: every block carries the numbers of the programs that see it.

    A block that several programs share is grey. The part of a block that hangs over the end of
    its array is hatched.
    """
    views = [_View(operand) for operand in call.operands.values()]
    figure, panels = _panels(views)
    # More programs than colours share one, or equal colours would seem to say something.
    colours = PROGRAM_COLOURS if len(call.programs) <= len(PROGRAM_COLOURS) else [style.STATE] * len(call.programs)
    said = []
    for axes, view in zip(panels, views, strict=True):
        _outline(axes, view)
        rows = {}
        for block, numbers in view.owners().items():
            look = (colours[numbers[0]], 0.45) if len(numbers) == 1 else (style.SKIPPED, 0.8)
            _draw_block(axes, view, block, *look)
            (x, width), (y, height) = view.visible(block)
            if width and height:
                programs = [call.programs[number] for number in numbers]
                size = 9 if len(call.grid) < 3 else 7.5
                draw.label(axes, x + width / 2, y + height / 2, _names(programs), size=size)
                rows.setdefault(y, {})[x] = _spoken(programs)
        axes.set_title(view.title, size=10)
        told = "; ".join(", ".join(row[x] for x in sorted(row)) for _, row in sorted(rows.items()))
        said.append(f"{view.name}, row by row: {told}.")
    figure.suptitle("Each block with the programs that see it", x=0.01, ha="left", size=11)
    figure.alt = f"Each block with the programs that see it. {' '.join(said)}"
    return figure


def one_program(call, *programs):
    """One row for each program, such as (0, 1), one panel for each array: the block it sees."""
    numbers = [call.programs.index(tuple(program)) for program in programs]
    views = [_View(operand, number) for number in numbers for operand in call.operands.values()]
    figure, panels = _panels(views, columns=len(call.operands))
    for axes, view in zip(panels, views, strict=True):
        _outline(axes, view)
        for block in view.owners():
            _draw_block(axes, view, block, style.PAPER, 1, ink=style.SKIPPED)
        colour = style.OUTPUT if view.operand.is_output else style.QUERY
        _draw_block(axes, view, view.blocks[view.number], colour, 0.6)
        if view.number == numbers[0] or view.note:
            axes.set_title(view.title, size=10)
        if view.number != numbers[-1]:
            axes.set_xlabel("")
    for axes, program in zip(panels[:: len(call.operands)], programs, strict=True):
        axes.set_ylabel(f"program {_name(program)}\n{axes.get_ylabel()}", size=9)
    return figure


def tail(length, tiles):
    """What each way of loading puts into the tiles of an array that holds 1, 2, …, length.

    tiles: {name of the way: what it loaded, shape (tiles, block)}.
    """
    ways, (count, block) = len(tiles), next(iter(tiles.values())).shape
    figure, axes = style.drawing(9, 0.75 * ways + 0.9, x=(-4.4, count * (block + 0.35)), y=(ways + 0.3, -0.5))
    said = []
    for row, (way, loaded) in enumerate(tiles.items()):
        axes.text(-0.25, row + 0.4, way, ha="right", va="center", size=10)
        texts = [f"{value:g}".replace("nan", "NaN") for value in np.ravel(loaded)]
        for position, text in enumerate(texts):
            if text == "NaN":
                colour, hatch = style.SKIPPED, OVERHANG
            elif text == f"{position + 1}":
                colour, hatch = style.KEY, None
            elif position >= length and text == "0":
                colour, hatch = style.PAPER, None
            else:
                colour, hatch = style.OUTPUT, "...."
            x = position + 0.35 * (position // block)
            draw.box(axes, x, row, 1, 0.8, colour, ec=style.FAINT, hatch=hatch, alpha=0.55, lw=1)
            draw.label(axes, x + 0.5, row + 0.4, text, size=10, bbox=draw.paper() if hatch else None)
        said.append(f"{way}: {'; '.join(' '.join(tile) for tile in itertools.batched(texts, block))}.")
    for number in range(count):
        draw.label(axes, number * (block + 0.35) + block / 2, -0.22, f"tile {number}", size=10)
    end = length + 0.35 * (length // block)
    axes.plot([end, end], [-0.1, ways - 0.1], color=style.INK, lw=1.6, ls="--")
    draw.label(axes, end + 0.08, ways + 0.05, f"end of the array ({length})", size=9)
    figure.alt = f"What {count} tiles of {block} hold of an array of {length} elements. {' '.join(said)}"
    return figure


def exercise_index_map():
    """The picture of exercise 4.1, drawn from a kernel with the index map that it asks for."""

    def copy(x_ref, out_ref):
        out_ref[...] = x_ref[...]

    whole = jax.ShapeDtypeStruct((6, 16), jnp.float32)
    x_spec, out_spec = pl.BlockSpec((2, 4), lambda i, j: (j // 2, i)), pl.BlockSpec((2, 4), lambda i, j: (i, j))
    call = pl.pallas_call(copy, whole, grid=(3, 4), in_specs=[x_spec], out_specs=out_spec, interpret=True)
    (replayed,), _ = replay(call, np.zeros((4, 12), np.float32))
    return program_blocks(replayed)


def matmul_tiles():
    """Program (1, 0) of the matmul, at step j = 2 of its loop."""
    figure, axes = style.drawing(9, 3.9, x=(-0.9, 16.1), y=(5.0, -0.6))
    for name, across, down, x, width, height in (
        ("p", "S", "T", 0.0, 6.0, 3.0),
        ("v", "H", "S", 7.9, 3.0, 4.2),
        ("out", "H", "T", 12.8, 3.0, 3.0),
    ):
        draw.box(axes, x, 0, width, height, "none", ec=style.INK, lw=1.6)
        axes.text(x, -0.2, name, size=12, weight="bold", va="bottom")
        draw.label(axes, x + width / 2, height + 0.4, across, va="top", weight="bold")
        axes.text(x - 0.35, height / 2, down, ha="right", va="center", weight="bold")
        # From edge to edge: these letters are lengths.
        length = {"arrowstyle": "|-|, widthA=0.25, widthB=0.25", "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", (x + width, height + 0.22), (x, height + 0.22), arrowprops=length)
        axes.annotate("", (x - 0.2, height), (x - 0.2, 0), arrowprops=length)
    for *place, colour, hatch, alpha in (
        (0, 1.5, 6, 1.5, style.LOGITS, None, 0.3),
        (3, 1.5, 1.5, 1.5, style.LOGITS, "///", 0.75),
        (7.9, 0, 1.5, 4.2, style.VALUE, None, 0.3),
        (7.9, 2.1, 1.5, 1.05, style.VALUE, "///", 0.75),
        (12.8, 1.5, 1.5, 1.5, style.OUTPUT, None, 0.6),
    ):
        draw.box(axes, *place, colour, alpha=alpha, hatch=hatch, ec=style.INK, lw=1.2)
    draw.label(axes, 3.75, 2.25, "tile j", size=9.5, bbox=draw.paper())
    draw.label(axes, 8.65, 2.62, "tile j", size=9.5, bbox=draw.paper())
    draw.label(axes, 13.55, 2.25, "acc", size=10)
    draw.label(axes, 6.55, 1.6, "×", size=18)
    draw.label(axes, 11.75, 1.6, "=", size=18)
    draw.arrow(axes, (0.1, 1.2), (5.9, 1.2), size=10, lw=1, zorder=3)
    draw.label(axes, 3, 1.1, "j = 0, 1, 2, …", va="bottom", size=9.5)
    draw.arrow(axes, (9.75, 0.1), (9.75, 4.1), size=10, lw=1, zorder=3)
    axes.text(9.95, 2.1, "j", ha="left", va="center", size=9.5)
    return figure


class _View:
    """The two axes of an operand that are drawn, rows first, and where its blocks lie on them.

    number: the program at whose blocks the axes that are not drawn are cut. An array of one axis is a row.

    name, title: the array with its shape, and below it where the axes that are not drawn are cut, if blocks differ
    there. blocks: for each program ((start, size) along the columns, (start, size) along the rows).
    """

    def __init__(self, operand, number=0):
        self.operand, self.number = operand, number
        shape, sizes = operand.values.shape, [size or 1 for size in operand.block_shape]
        starts = operand.block_of * np.array(sizes, int)
        moves = (starts != starts[:1]).any(axis=0)

        def interest(axis):
            return moves[axis], operand.block_shape[axis] is not None, shape[axis]

        self.drawn = sorted(sorted(range(len(shape)), key=interest, reverse=True)[:2])
        hidden = [axis for axis in range(len(shape)) if axis not in self.drawn]
        self.cut = starts[number]
        self.alike = np.flatnonzero((starts[:, hidden] == self.cut[hidden]).all(axis=1))  # programs with the same cut
        self.note = ", ".join(f"axis {axis} at {self.cut[axis]}" for axis in hidden if moves[axis])
        self.name = f"{operand.name} ({' × '.join(map(str, shape)) or 'one number'})"
        self.title = f"{self.name}\n{self.note}".strip()
        missing = 2 - len(self.drawn)
        self.labels = [""] * missing + [f"axis {axis}" for axis in self.drawn]
        self.shape = (*[1] * missing, *(shape[axis] for axis in self.drawn))
        of_drawn = [[(int(start[axis]), sizes[axis]) for axis in self.drawn] for start in starts]
        self.blocks = [tuple(reversed([(0, 1)] * missing + sides)) for sides in of_drawn]

    def visible(self, block):
        """The part of a block that lies inside the array."""
        parts = []
        for (start, size), length in zip(block, reversed(self.shape), strict=True):
            low, high = min(max(start, 0), length), min(max(start + size, 0), length)
            parts.append((low, high - low))
        return tuple(parts)

    def owners(self):
        """{block: numbers of the programs that see it}, on the hidden axes as program `number`."""
        found = {}
        for number in self.alike:
            found.setdefault(self.blocks[number], []).append(number)
        return found

    def edges(self):
        """Edges of the blocks, ((along columns), (along rows)), for ticks."""
        sides = [{0, length} for length in reversed(self.shape)]
        for block in self.blocks:
            for edges, (start, size), length in zip(sides, block, reversed(self.shape), strict=True):
                edges.update(edge for edge in (start, start + size) if 0 <= edge <= length)
        return tuple(sorted(edges) for edges in sides)


def _panels(views, columns=None):
    """(figure, array of axes), one for each view, as high as its blocks need."""
    columns = columns or min(len(views), MOST_COLUMNS)
    rows = -(-len(views) // columns)
    flat = all(view.shape[0] == 1 for view in views)
    height = 1.3 if flat else max(min(3.2, 0.45 * len(view.edges()[1]) + 1.1) for view in views)
    height = rows * (height + 0.2 * any(view.note for view in views)) + 0.3
    figure, panels = style.subplots(rows, columns, width=min(10.0, 3.0 * columns + 0.6), height=height, squeeze=False)
    for axes in panels.flat[len(views) :]:
        axes.remove()
    return figure, panels.flat[: len(views)]


def _outline(axes, view):
    rows, columns = view.shape
    style.bare(axes)
    draw.box(axes, 0, 0, columns, rows, "none", ec=style.INK, lw=1.8, zorder=4)
    across, down = view.edges()
    axes.set(xticks=_thin(across), yticks=_thin(down) if view.labels[0] else [])
    axes.tick_params(labelsize=8, length=2)
    over = [max((start + size for start, size in sides), default=0) for sides in zip(*view.owners(), strict=True)]
    axes.set(xlim=(-0.02 * columns, max(1.02 * columns, over[0])), ylim=(max(1.02 * rows, over[1]), -0.02 * rows))
    for set_label, label in zip((axes.set_ylabel, axes.set_xlabel), view.labels, strict=True):
        set_label(label and f"{label} (elements)", size=9)


def _thin(edges, most=9):
    step = -(-len(edges) // most)
    return [*edges[:-1:step], edges[-1]]


def _draw_block(axes, view, block, colour, alpha, ink=style.INK):
    (x, width), (y, height) = block
    draw.box(axes, x, y, width, height, "none", ec=style.FAINT, hatch=OVERHANG, lw=0.8)
    (x, width), (y, height) = view.visible(block)
    if width and height:
        draw.box(axes, x, y, width, height, style.PAPER, ec="none")
        draw.box(axes, x, y, width, height, colour, alpha=alpha, ec="none")
        draw.box(axes, x, y, width, height, "none", ec=ink, lw=0.9)


def _name(program):
    return (", " if len(program) < 3 else ",").join(map(str, program)) if program else "0"


def _names(programs):
    names = [_name(program) for program in programs]
    if len(names) > MOST_NAMES:
        return f"{names[0]}\n…\n{names[-1]}"
    return "\n".join(names) if len(programs[0]) > 1 else "  ".join(names)


def _spoken(programs):
    """`_names` on one line, for the words of a picture."""
    names = [f"({_name(program)})" if len(program) > 1 else _name(program) for program in programs]
    return " and ".join(names) if len(names) <= MOST_NAMES else f"{names[0]} … {names[-1]}"


FIGURES = {"04-exercise-index-map.png": exercise_index_map, "04-matmul-tiles.png": matmul_tiles}
