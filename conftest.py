"""What every test and every notebook under test shares."""

import os

os.environ.setdefault("PJRT_NPROC", "16")  # threads for Mosaic's interpreter, whose warpgroups wait for one another
os.environ["FLASH_ATTENTION_NO_CLOCK"] = "1"  # helpers.clock.OFF, for the notebooks under test

import jax
import pytest
from lessons import lessons
from nbformat import NotebookNode
from nbval.plugin import IPyNbCell, IPyNbFile
from xdist.scheduler import LoadScopeScheduling

jax.config.update("jax_num_cpu_devices", 8)  # for the tests with arrays on several devices

# What these would find, tests of the quick tier find as well, and for much less: `test_portable`, `test_training`,
# `test_decode`, `test_ring`, `test_masks`, those of Hopper and TPU and the mistakes in `test_exercises`. 09 and 17 read
# files beside the code, which only the wheel of `.ci/run` can lack.
NOTEBOOKS_OF_THE_FULL_TIER = ("07", "08", "09", "10", "11", "12", "13", "14", "15", "17", "18")

# In a kernel, after a check: the solution passes it, in a namespace of its own, so that nothing later can need it.
SOLVED = """
def _solved():
    from helpers.exercises.checking import verdict
    from helpers.exercises.exercise import exercise
    scope = dict(globals())
    exec({solution!r}, scope)
    judged = verdict(exercise({number!r}), scope[{name!r}])
    assert judged.status == "correct", judged.text
_solved()
del _solved
"""


def pytest_configure(config):
    """Most of a run is the compiling of interpreted kernels that then run once: compile lightly, and keep the result.

    In the environment, so that the kernels of the notebooks do the same, and share what they compile.
    """
    if jax.default_backend() != "cpu":
        return
    options = {"jax_disable_most_optimizations": 1}
    if hasattr(config, "cache"):
        options["jax_compilation_cache_dir"] = str(config.cache.mkdir("compiled"))
        options["jax_persistent_cache_min_compile_time_secs"] = 0
    for name, value in options.items():
        os.environ[name.upper()] = str(value)
        jax.config.update(name, bool(value) if "disable" in name else value)


@pytest.fixture(autouse=True)
def full_precision(request):
    """On a GPU a float32 product is TF32 unless asked otherwise; the tests want to see a kernel's own error."""
    if ".ipynb::" in request.node.nodeid:
        yield
        return
    with jax.default_matmul_precision("highest"):
        yield


# Notebooks


class Lesson(IPyNbFile):
    """A notebook, re-executed and compared cell by cell by nbval; after each check, its solution must pass it."""

    def collect(self):
        """One kernel serves the unsolved and the solved notebook."""
        if self.path.stem.startswith(NOTEBOOKS_OF_THE_FULL_TIER):
            self.add_marker("full")
        of_check = {f"check({lesson.answer_name})": lesson for lesson in lessons(self.path)}
        for cell in super().collect():
            yield cell
            if lesson := of_check.get(cell.cell.source):
                source = SOLVED.format(solution=lesson.solution, number=lesson.number, name=lesson.answer_name)
                solved = NotebookNode(cell_type="code", source=source, outputs=[], execution_count=1, metadata={})
                name = f"{cell.name} solved"
                yield IPyNbCell.from_parent(self, name=name, cell_num=cell.cell_num, cell=solved, options=cell.options)


def pytest_collect_file(file_path, parent):
    if file_path.suffix == ".ipynb":
        return Lesson.from_parent(parent, path=file_path)


# Which tests stay together (what `--dist loadgroup` is for; with pytest 9.2 its groups come apart)

# These keep what the next of them needs, or would compute again.
TOGETHER = (".ipynb", "test_site.py", "test_training.py")


class InSmallParts(LoadScopeScheduling):
    """Test by test to the next free worker, but these files whole."""

    def _split_scope(self, nodeid):
        path = nodeid.partition("::")[0]
        return path if path.endswith(TOGETHER) else nodeid


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    return InSmallParts(config, log)


# The two tiers, and one case of each test for another JAX


def pytest_addoption(parser):
    parser.addoption("--one-case", action="store_true", help="run each test with the first of its parameters only")


@pytest.hookimpl(trylast=True)  # of those that -m leaves
def pytest_collection_modifyitems(config, items):
    if config.option.one_case:
        first = {}
        items[:] = [item for item in items if first.setdefault(item.nodeid.partition("[")[0], item) is item]


def pytest_terminal_summary(terminalreporter, config):
    if config.option.markexpr:
        terminalreporter.write_line("These were tests of one tier. All of them: make test-all")
    if skipped := len(terminalreporter.stats.get("skipped", [])):
        terminalreporter.write_line(f"Skipped: {skipped} tests that want what this machine lacks; ARGS=-rs names it")
