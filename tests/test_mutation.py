"""The list of faults fits the code as it is, its record says enough, and the runner sees what it should."""

import ast

import pytest

from tests import mutation
from tests.mutation import FULL, QUICK, SURVIVED, Copy, Found, label
from tests.mutations import FAULTS, Fault

ENOUGH = 120


def test_every_fault_fits_its_file():
    assert len({label(fault) for fault in FAULTS}) == len(FAULTS) >= ENOUGH
    for fault in FAULTS:
        text = mutation.changed(fault, (mutation.ROOT / fault.file).read_text())
        if fault.file.endswith(".py"):
            ast.parse(text)
        assert mutation.tests_of(fault.file), fault.file


def test_a_fault_that_does_not_fit_is_refused():
    fault = Fault("some.py", "nothing", "a", "b")
    for text in ("", "a a"):
        with pytest.raises(ValueError, match=f"stands in it {text.count('a')} times"):
            mutation.changed(fault, text)


def test_the_record_is_good_enough():
    found = mutation.read()
    assert set(found) <= {label(fault) for fault in FAULTS}, "run make mutation"
    assert len(found) >= ENOUGH
    shares = mutation.shares(found)
    assert shares[QUICK] >= mutation.POWER[QUICK] and shares[FULL] >= mutation.POWER[FULL]


@pytest.fixture
def small_copy(tmp_path, monkeypatch):
    """A tree of one module, with a test in each tier and one that never ends where `n` is negative."""
    root = tmp_path / "tree"
    (root / "tests").mkdir(parents=True)
    (root / "pyproject.toml").write_text('[tool.pytest.ini_options]\nmarkers = ["full"]\npythonpath = ["."]\n')
    (root / "numbers_.py").write_text("n = 1\nm = 2\n")
    (root / "tests" / "test_small.py").write_text(
        "import pytest\nfrom numbers_ import m, n\n\n"
        "def test_n():\n    while n < 0:\n        pass\n    assert n == 1\n\n"
        "@pytest.mark.full\ndef test_m():\n    assert m == 2\n"
    )
    monkeypatch.setattr(mutation, "ROOT", root)
    monkeypatch.setattr(mutation, "TESTS", {"numbers_.py": ["test_small"]})
    return Copy(tmp_path / "copy", tmp_path / "cache", timeout=300)


@pytest.mark.full
@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("n = 1", "n = 3", Found(QUICK, "tests/test_small.py::test_n")),
        ("n = 1", "n = 1.0", Found(SURVIVED)),
        ("m = 2", "m = 3", Found(FULL, "tests/test_small.py::test_m")),
        ("n = 1", "n = 1 +", Found(QUICK, "tests/test_small.py")),
    ],
)
def test_who_notices(small_copy, old, new, expected):
    assert small_copy.judge(Fault("numbers_.py", "it", old, new), None) == expected
    assert (small_copy.root / "numbers_.py").read_text() == "n = 1\nm = 2\n"


@pytest.mark.full
def test_what_never_ends_is_noticed(small_copy):
    small_copy.timeout = 10
    found = small_copy.judge(Fault("numbers_.py", "it", "n = 1", "n = -1"), None)
    assert found.tier == QUICK and found.by.endswith("(hangs)")


@pytest.mark.full
def test_who_noticed_last_time_is_asked_first(small_copy):
    known = Found(FULL, "tests/test_small.py::test_m")
    assert small_copy.judge(Fault("numbers_.py", "it", "m = 2", "m = 3"), known) == known
    gone = Found(QUICK, "tests/test_small.py::test_that_is_gone")
    assert small_copy.judge(Fault("numbers_.py", "it", "n = 1", "n = 3"), gone).by.endswith("test_n")
