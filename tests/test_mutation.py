"""The list of faults fits the code as it is, its record says enough, and the runner sees what it should."""

import ast

import pytest

from helpers.exercises.edits import changed
from tests import mutation
from tests.mutation import FAULTS, FULL, QUICK, label

ENOUGH = 100


def test_every_fault_fits_its_file():
    assert len({label(fault) for fault in FAULTS}) == len(FAULTS) >= ENOUGH
    for fault in FAULTS:
        text = changed((mutation.ROOT / fault.file).read_text(), (fault.old, fault.new), once=True)
        if fault.file.endswith(".py"):
            ast.parse(text)
        assert mutation.tests_of(fault.file), fault.file


def test_a_fault_that_does_not_fit_is_refused():
    for text in ("", "a a"):
        with pytest.raises(ValueError, match=f"stands in it {text.count('a')} times"):
            changed(text, ("a", "b"), once=True)


def test_the_record_is_good_enough():
    found = mutation.read()
    assert set(found) <= {label(fault) for fault in FAULTS}, "run make mutation"
    assert len(found) >= ENOUGH
    shares = mutation.shares(found)
    assert shares[QUICK] >= mutation.POWER[QUICK] and shares[FULL] >= mutation.POWER[FULL]
