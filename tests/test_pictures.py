"""The pictures that cells show: sharp, and with words for those who cannot see them."""

import base64
import io

import lessons
import numpy as np
import pytest
from PIL import Image

from helpers.plots import style
from helpers.plots.describe import description


def test_a_line_is_told_by_its_name_and_its_ends():
    figure, axes = style.subplots()
    axes.plot([1024, 4096], [0.5, 12.25], label="naive")
    axes.plot([0, 1], [0, 0])  # without a name: it only guides the eye
    axes.set(title="Time", xlabel="length $T$", ylabel="ms")
    assert description(figure) == "Time. ms against length T. naive: from 0.5 at 1,024 to 12.2 at 4,096."


def test_a_line_across_the_panel_is_told_by_its_height():
    figure, axes = style.subplots()
    axes.plot([10, 20], [1, 3], label="kernel")
    axes.axhline(2.5, label="the card")
    assert description(figure) == "kernel: from 1 at 10 to 3 at 20; the card: 2.5."


@pytest.mark.parametrize("lies", [False, True])
def test_bars_are_told_by_their_ticks(lies):
    figure, axes = style.subplots()
    (axes.barh if lies else axes.bar)([0, 1], [3, 0.125], label="read")
    (axes.set_yticks if lies else axes.set_xticks)([0, 1], ["q", "k"])
    assert description(figure) == "read: q 3, k 0.125."


def test_bars_are_told_in_order_however_often_a_size_comes_back():
    figure, axes = style.subplots()
    for place, size in enumerate((475, 436, 475)):
        axes.barh(place, size, alpha=0.5)
        axes.barh(place, size, fc="none", hatch="//")  # the same bar, hatched
        axes.text(size, place, f"{size}")
    axes.set_yticks(range(3), ["ours", "cuDNN, bfloat16", "ours again"])
    assert description(figure) == "ours 475; cuDNN, bfloat16 436; ours again 475."


def test_bars_at_one_tick_are_told_together():
    figure, axes = style.subplots()
    for start, size in ((0, 64), (64, 32), (96, 32)):
        axes.barh(0, size, left=start)
    axes.set_yticks([0], ["registers"])
    assert description(figure) == "registers 64 + 32 + 32."


def test_an_inner_panel_names_its_bars_too():
    figure, panels = style.subplots(1, 2, sharey=True)
    for axes in panels:
        axes.barh([0, 1], [3, 4])
    panels[0].set_yticks([0, 1], ["q", "k"])
    assert description(figure) == "q 3, k 4. q 3, k 4."


def test_how_many_bars_are_left_out_is_told():
    figure, axes = style.subplots()
    axes.bar(range(100), range(100))
    axes.set_xticks([])
    assert description(figure).endswith(", 46, 47, and 52 more.")


def test_an_exponent_keeps_its_brackets():
    figure, axes = style.subplots()
    axes.set_title("units of $e^m$: $e^{s - m}$ in $m_{new}$")
    assert description(figure) == "units of e^m: e^(s - m) in m_new."


def test_a_table_is_told_by_its_range_and_its_colour_bar_is_no_panel():
    figure, axes = style.subplots()
    figure.colorbar(axes.imshow(np.arange(6.0).reshape(2, 3)), ax=axes, label="weight")
    assert description(figure) == "a table of 2 × 3 colours, weight from 0 to 5."


def test_a_drawing_is_told_by_the_words_in_it():
    figure, axes = style.subplots(1, 2)
    figure.suptitle("Who reads what")
    axes[0].text(0, 0, "the\nchip")
    axes[1].text(0, 0, "the memory")
    assert description(figure) == "Who reads what. the chip. the memory."


def test_a_picture_has_twice_the_dots_and_says_how_large_it_is():
    figure, _ = style.subplots(width=3, height=2)
    data, metadata = figure._repr_mimebundle_()
    width, height = Image.open(io.BytesIO(base64.b64decode(data["image/png"]))).size
    shown = metadata["image/png"]
    assert 500 < width < 650 and (width // 2, height // 2) == (shown["width"], shown["height"])
    figure.alt = "Two boxes."
    assert figure._repr_mimebundle_()[1]["image/png"]["alt"] == "Two boxes."


@pytest.mark.parametrize("path", lessons.PATHS, ids=lambda path: path.stem)
def test_every_picture_in_a_notebook_is_sharp_and_has_words(path):
    outputs = [output for cell in lessons.read(path).cells for output in cell.get("outputs", [])]
    for output in (output for output in outputs if "image/png" in output.get("data", {})):
        shown = output.metadata["image/png"]
        assert len(shown["alt"]) >= 30
        width, _ = Image.open(io.BytesIO(base64.b64decode(output.data["image/png"]))).size
        assert width // 2 == shown["width"], "Matplotlib's own picture took the place of ours"
