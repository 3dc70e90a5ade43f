"""The learner's own module: written by checks, only where it may be, whole or not at all, and read with caution."""

import functools
import importlib
import linecache
import multiprocessing
import os
import re
import sys
import types
from dataclasses import replace

import jax
import jax.numpy as jnp
import lessons
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from helpers import clock, environment
from helpers.attention.reference import oracle, oracle_gradients
from helpers.exercises import mine, whole_mosaic, yours
from helpers.exercises.exercise import exercise
from helpers.exercises.running import limited
from helpers.workbook import RECORD

IMPORTS = "import numpy as np\nimport jax, functools\nfrom math import sqrt as root, pi"
HELPERS = "HALF = 1 / 2\n\n\ndef scaled(x):\n    return HALF * x * root(4)"
ANSWER = "@functools.cache\ndef double(x):\n    return np.float64(scaled(2 * x)) + 0 * unused(x)\n\n\ndef unused(x):\n    return x"


def block(number="2.1", name="double"):
    """An exercise whose answer is a building block."""

    def solution(x):
        return 2 * x

    solution.__name__ = name
    return replace(exercise("2.1"), solution=solution, number=number, building_block="forward")


def notebook(*cells, names=()):
    """The variables of a notebook in which cells were run."""
    names = {"In": ["", *cells], **dict(names)}
    for place, cell in enumerate(cells):
        file = f"/cells/{abs(hash(cell))}-{place}.py"
        linecache.cache[file] = len(cell), None, cell.splitlines(keepends=True), file
        exec(compile(cell, file, "exec"), names)
    return names


def keep(*cells, number="2.1", name="double"):
    return mine.keep(block(number, name), notebook(*cells))


def text():
    return open(mine.FILE, encoding="utf-8", newline="").read()


@pytest.fixture(autouse=True)
def workbook(tmp_path, monkeypatch):
    """This process in an empty workbook, as a kernel is."""
    (tmp_path / RECORD).write_text("{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(clock.OFF)
    sys.modules.pop("mine", None)
    yield tmp_path
    sys.modules.pop("mine", None)


def test_an_answer_takes_along_what_it_needs_and_nothing_else():
    assert keep(IMPORTS, "x = 3\n" + HELPERS, ANSWER) == "  Kept: `double` is in your mine.py."
    code = re.sub(r", digest \w{8}", "", text().removeprefix(mine.HEADER))
    assert code == (
        "\nimport functools\nimport numpy as np\nfrom math import sqrt as root\n\n\n"
        "# Exercise 2.1\nHALF = 1 / 2\n\n\n"
        "# Exercise 2.1\ndef scaled(x):\n    return HALF * x * root(4)\n\n\n"
        "# Exercise 2.1\ndef unused(x):\n    return x\n\n\n"
        "# Exercise 2.1\n@functools.cache\ndef double(x):\n    return np.float64(scaled(2 * x)) + 0 * unused(x)\n"
    )
    assert importlib.import_module("mine").double(3) == 6


def test_what_is_missing_is_named_and_nothing_written():
    assert "`table`" in keep("import numpy as np\ntable = np.ones(3)\ndef double(x):\n    return table * x")
    assert "`later`" in keep("def double(x):\n    return later(x) if x < 0 else 2 * x")
    assert "`double`" in mine.keep(block(), {"double": eval("lambda x: 2 * x")})
    assert not os.path.exists(mine.FILE)


def test_only_what_a_check_wrote_is_replaced():
    keep("def helper(x):\n    return x", "def double(x):\n    return 2 * helper(x)")
    by_hand = "\n\n# by hand\r\nimport math\ndef other(x):\n    return -x * len('\x0c')\n"
    open(mine.FILE, "a", newline="").write(by_hand)
    more = "import numpy as np\na, b = 1, 1\ndef more(x):\n    return a * b * np.add(x, 0)"
    keep(more, "def double(x):\n    return 2 * more(x)")
    assert by_hand in text() and "return 2 * more(x)" in text() and "return 2 * helper(x)" not in text()
    assert text().index("import numpy") < text().index("def more") < text().index("def double") < text().index("other")
    assert text().count("a, b = 1, 1") == 1
    before = text()
    assert "Kept" in keep(more, "def double(x):\n    return 2 * more(x)")
    assert text() == before, "the same answer changes nothing"
    assert "a `other` that you wrote" in keep("def other(x):\n    return 0", "def double(x):\n    return other(x)")
    assert text() == before
    open(mine.FILE, "w").write(before.replace("2 * more(x)", "more(x) * 2"))
    edited = text()
    assert "edited" in keep("def double(x):\n    return x + x") and text() == edited


def test_names_of_one_module_are_imported_on_one_line():
    by_hand = "from math import *\nfrom math import (\n    e,\n)\nfrom math import pi  # by hand\nfrom math import tau"
    open(mine.FILE, "w").write(by_hand + "\nafter = tau\n")
    keep("from math import sqrt as root, cos\nfrom cmath import exp\ndef double(x):\n    return root, cos, exp")
    assert text().startswith(by_hand + ", cos, sqrt as root\nfrom cmath import exp\nafter = tau\n")


@pytest.mark.parametrize("content", [b"def double(x:\n", b"\xff\xfe\x00", b"while True: pass\n"])
def test_a_module_that_cannot_be_imported_is_left_alone(content, monkeypatch):
    monkeypatch.setattr(mine, "SECONDS", 0.5)
    open(mine.FILE, "wb").write(content)
    assert "Not kept" in keep("def double(x):\n    return x + x")
    assert open(mine.FILE, "rb").read() == content


def test_outside_a_workbook_nothing_is_kept(workbook):
    (workbook / RECORD).unlink()
    assert keep("def double(x):\n    return x + x") == "" and list(workbook.iterdir()) == []


def _write(number):
    name = f"function_{number}"
    return keep(f"def {name}(x):\n    return {number}", number=f"2.{number}", name=name)


@pytest.mark.full
def test_two_processes_at_once_lose_nothing():
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        assert all(said.startswith("  Kept") for said in pool.map(_write, range(12), chunksize=1))
    assert len(re.findall(r"^def function_\d+", text(), re.MULTILINE)) == 12


def test_a_running_kernel_sees_a_new_version():
    keep("def double(x):\n    return x + x")
    module = importlib.import_module("mine")
    new = text().replace("x + x", "x + 7")
    open(mine.FILE, "w").write(new)
    mine.refresh()
    assert module.double(1) == 8
    open(mine.FILE, "w").write("def double(x:")
    mine.refresh()
    assert module.double(1) == 8, "a broken version leaves the old one"


def test_a_check_keeps_only_right_answers(capsys, monkeypatch):
    from helpers.exercises import checking

    source = "def one_query(x):\n    return x"
    found = replace(block(name="one_query"), run=lambda answer: answer(1.0), expected=lambda: 1.0, cases=lambda: [])
    names = notebook(source)
    monkeypatch.setattr(checking, "exercise", lambda number: found)
    wrong = checking.Verdict("wrong", "✗ no")
    monkeypatch.setattr(checking, "verdict", lambda *_: wrong)
    names["check"] = checking.check
    exec("check('2.1', one_query)", names)
    assert not os.path.exists(mine.FILE)
    monkeypatch.setattr(checking, "verdict", lambda *_: checking.Verdict("correct", "✓ yes"))
    exec("check('2.1', one_query)", names)
    assert capsys.readouterr().out == "✗ no\n✓ yes\n  Kept: `one_query` is in your mine.py.\n"


MODULES = {
    "right": ("def attention(q, k, v):\n    import numpy as np\n    w = np.exp(k @ q / len(q) ** 0.5)\n    return w @ v / w.sum()", "yours"),
    "wrong": ("def attention(q, k, v):\n    return q", "the series' own, for yours gives something else"),
    "endless": ("def attention(q, k, v):\n    while True: pass", "the series' own, for yours raises TooSlow"),
    "of an older edition": ("def attention_of_old(q): ...", "the series' own, for mine.py has none"),
    "none": (None, "the series' own, for exercise 0.1 has not put one into mine.py"),
}  # fmt: skip


@pytest.mark.parametrize(("source", "said"), MODULES.values(), ids=MODULES)
def test_notebooks_run_what_works_and_say_what_they_run(source, said, capsys, monkeypatch):
    monkeypatch.setattr(mine, "SECONDS", 0.5)
    monkeypatch.setattr(mine, "TRIAL_S", 0.5)
    name = exercise("0.1").solution.__name__
    if source:
        open(mine.FILE, "w").write(source.replace("def attention(", f"def {name}("))
    draw = np.random.default_rng(0).standard_normal
    q, k, v = draw(4), draw((5, 4)), draw((5, 3))
    function = yours(name, lambda function: function(q, k, v))
    assert said in capsys.readouterr().out
    assert (function.__module__ == "mine") == (said == "yours")


def test_parts_are_what_was_reached_and_is_still_there():
    assert not any(mine.parts().values())
    keep("def forward(q):\n    return q", name="forward")
    assert {part for part, is_there in mine.parts().items() if is_there} == {"forward", "causal"}
    keep("def flash_attention(q):\n    return q", name="flash_attention")
    mine.reach("trains", keep)  # the series' own
    assert not mine.parts()["trains"]
    mine.reach("trains", importlib.import_module("mine").flash_attention)
    assert mine.parts()["trains"]
    open(mine.FILE, "w").write("x = 1")
    assert not any(mine.parts().values())


def test_what_stood_in_for_a_kernel_goes_when_the_learner_has_one():
    series = exercise("0.1").solution
    mine.keep(block(), notebook("def double(x):\n    return 2 * attend(x)", names={"attend": series}))
    assert "\nfrom helpers.exercises.notebook_00 import attend\n" in text()
    keep("def attend(x):\n    return 21 * x", number="0.1", name="attend")
    assert "import attend" not in text() and importlib.import_module("mine").double(1) == 42


def keep_on_gpu(name):
    """Keep an answer that runs in place of `attend`, exercise 0.1, on a GPU."""
    found = replace(block(number="2.2", name=name), in_place=("on_gpu", "attend"))
    return mine.keep(found, notebook(f"def {name}(*arguments):\n    return {name!r}, *arguments"))


def test_a_kernel_runs_in_place_of_another_on_a_gpu(monkeypatch):
    keep_on_gpu("by_mma")
    assert text().endswith("Without its line, it does not.\nattend = on_gpu(by_mma, attend)\n")
    assert not mine.parts()["forward"] and "import attend" in text()
    open(mine.FILE, "a").write("added = 7\n")
    keep("def attend(*arguments):\n    return arguments", number="0.1", name="attend")
    assert "import attend" not in text()
    assert "added = 7\n" in text() and text().endswith("\nattend = on_gpu(by_mma, attend)\n")
    before = text()
    assert "Kept" in keep_on_gpu("by_mma") and text() == before
    module, x = importlib.import_module("mine"), np.zeros((1, 1, 1, 64), np.float16)
    assert module.attend(x, x, x, True, 8) == (x, x, x, True, 8)
    monkeypatch.setattr(environment, "default_device", lambda: types.SimpleNamespace(platform="gpu"))
    monkeypatch.setattr(environment, "interprets", lambda: False)
    capability = [8, 0]
    monkeypatch.setattr(environment, "compute_capability", lambda _: tuple(capability))
    assert module.attend(x, x, x, True, 8)[0] == "by_mma" == module.attend(x, x, x)[0]
    capability[:] = [7, 5]
    assert module.attend(x, x, x) == (x, x, x, False)
    on_hopper = environment.on_hopper(lambda *_: "by wgmma", module.attend)
    for capability[:], one in ([8, 0], "by_mma"), ([9, 0], "by wgmma"), ([10, 0], "by_mma"):
        assert one in (found := on_hopper(x, x, x), found[0])
    assert on_hopper.plain is module.attend.plain
    open(mine.FILE, "w").write(before.replace("attend = on_gpu(by_mma, attend)\n", ""))
    keep("def attend(*arguments):\n    return arguments, 1", number="0.1", name="attend")
    assert "= on_gpu" not in text(), "what the learner took out stays out"


# A learner who solved everything


BLOCKS = [lesson for lesson in lessons.ALL if exercise(lesson.number).building_block]


def solve(lesson):
    """Paste the solution of an exercise, and check it."""
    found = exercise(lesson.number)
    source = lesson.solution
    names = {**found.solution.__globals__, "__name__": "__main__"}
    names["In"] = [cell.source for cell in lessons.read(lesson.path).cells if cell.cell_type == "code"] + [source]
    exec(source, names)
    return mine.keep(found, names)


@pytest.mark.parametrize("dtype", [jnp.float32, pytest.param(jnp.bfloat16, marks=pytest.mark.full)])
def test_the_module_of_all_solutions_is_short_and_right(dtype, monkeypatch):
    for lesson in BLOCKS:
        assert "Kept" in solve(lesson), lesson.number
        if lesson.number.startswith("7."):
            assert len(text().splitlines()) <= 200
    assert len(text().splitlines()) <= 400
    last_lines = ["forward = on_gpu(mma_forward, forward)", "forward = on_hopper(hopper_forward, forward)"]
    assert text().splitlines()[-2:] == last_lines
    assert "helpers.exercises" not in text()
    module, draw = importlib.import_module("mine"), np.random.default_rng(40).standard_normal
    assert module.forward.plain.__module__ == module.mma_forward.__module__ == "mine"
    if dtype == jnp.bfloat16:  # the gradients of 07 are to be right with the forward kernel of a GPU, too
        interpreted = functools.partial(module.mma_forward, interpret=plgpu.InterpretGPUParams())
        monkeypatch.setattr(module, "forward", lambda q, k, v, is_causal, *_: interpreted(q, k, v, is_causal))
    calls = ((2, 70, 90, 4, 2, 20), False), ((1, 130, 65, 2, 2, 64), True), ((1, 40, 100, 4, 1, 16), True)
    for (B, T, S, N, K, H), is_causal in calls:
        shapes = (B, T, N, H), (B, S, K, H), (B, S, K, H), (B, T, N, H)
        *arrays, dout = (jnp.asarray(draw(shape), dtype) for shape in shapes)
        out, pull_back = jax.vjp(functools.partial(module.flash_attention, is_causal=is_causal), *arrays)
        right = oracle(*arrays, is_causal=is_causal)[0]
        rights = right, *oracle_gradients(*arrays, dout, is_causal=is_causal)
        for found, expected in zip((out, *pull_back(dout)), rights, strict=True):
            assert is_right(found, expected, dtype)
    query, key, value = (jnp.asarray(draw(shape), dtype) for shape in ((2, 1, 4, 20), (2, 90, 2, 20), (2, 90, 2, 20)))
    lengths = jnp.array([90, 33])
    right, _ = oracle(query, key, value, key_value_seq_lengths=lengths)
    assert is_right(module.decode_attention(query[:, 0], key, value, lengths), right[:, 0], dtype)
    prefix = lambda b, n, i, j: (j < 33) | (j <= i)
    right, _ = oracle(query, key, value, mask_mod=prefix)
    assert is_right(module.masked_forward(query, key, value, prefix)[0], right, dtype)


def is_right(found, expected, dtype):
    error = np.linalg.norm(np.float64(found) - expected) / np.linalg.norm(expected)
    return found.dtype == dtype and error < (1e-5 if dtype == jnp.float32 else 1.5e-2)


def test_kernels_for_a_gpu_lower_where_no_tile_has_a_mask():
    """Mosaic looks for layouts of what nobody reads, too: a bound that no mask wanted once kept it busy for minutes."""
    array = np.zeros((1, 128, 2, 64), jnp.bfloat16)
    for solution in (whole_mosaic.mma_forward, whole_mosaic.hopper_forward):
        with limited(60):
            lowered = whole_mosaic._lowered(solution, (whole_mosaic.HOPPER,), array, array, array, False)
        assert lowered == whole_mosaic.AS_ASKED
