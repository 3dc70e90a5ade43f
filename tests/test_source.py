"""Sources as the notebooks show them."""

import inspect
import textwrap

import pytest

from helpers.source import show


def sample():
    first = 1
    if first:
        second = 2
    return second


def test_a_whole_function_or_parts_of_it():
    assert show(sample) == textwrap.dedent(inspect.getsource(sample)).rstrip()
    assert show(sample, ("if first", "second = 2")) == "if first:\n    second = 2"
    assert show(sample, "first = 1", "return") == "first = 1\n\nreturn second"


def test_a_part_ends_where_its_last_text_comes_next():
    assert show(sample, ("second", "second")) == "second = 2"


@pytest.mark.parametrize("part", ["third", ("first", "third"), ("return", "if first")])
def test_lines_that_are_not_there(part):
    """A notebook must fail when a kernel changes under it, and not show other lines."""
    with pytest.raises(ValueError, match="no line"):
        show(sample, part)


def test_a_notebook_shows_it_as_python():
    assert show(sample, "first = 1")._repr_markdown_() == "```python\nfirst = 1\n```"
