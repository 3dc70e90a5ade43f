"""The pictures that cells show: sharp, and with words for those who cannot see them."""

import base64
import io

import lessons
import pytest
from PIL import Image

from helpers.plots import style
from helpers.plots.describe import description


def two_lines(axes):
    axes.plot([1024, 4096], [0.5, 12.25], label="naive")
    axes.plot([0, 1], [0, 0])  # without a name: it only guides the eye
    axes.set(title="Time", xlabel="length $T$", ylabel="ms")


def bars(axes):
    axes.bar([0, 1], [3, 0.125], label="read")
    axes.set_xticks([0, 1], ["q", "k"])


def test_a_picture_is_told():
    for draw, told in (
        (two_lines, "Time. ms against length T. naive: from 0.5 at 1,024 to 12.2 at 4,096."),
        (bars, "read: q 3, k 0.125."),
    ):
        figure, axes = style.subplots()
        draw(axes)
        assert description(figure) == told


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
