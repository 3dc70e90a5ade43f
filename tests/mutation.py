"""Put one fault after another into a copy of the code, and see which tests notice.

    python -m tests.mutation                     every fault of mutations.toml; records what was found
    python -m tests.mutation --sample 3 --seed 3 some that were noticed, without recording; fails where one is not
    python -m tests.mutation --only masking --jobs 2

For each fault it runs the test that noticed last time, then the tests of the file in the quick tier until one
fails, then those of the full tier. So "survived" means that no test of the file noticed; a test elsewhere might.
The record, mutation_results.json, says of each fault in which tier it was noticed and by which test.
"""

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from helpers.exercises.edits import changed

ROOT = Path(__file__).parents[1]
RESULTS = Path(__file__).with_name("mutation_results.json")
HANGS = 600  # seconds after which tests hang
NOT_COPIED = shutil.ignore_patterns(*".git .venv* .*_cache .hypothesis __pycache__ workbook *.egg-info".split())
QUICK, FULL, SURVIVED = "quick", "full", "survived"
POWER = {QUICK: 0.90, FULL: 0.97}  # of the faults, what the quick tier finds, and what both do


class Fault(NamedTuple):
    """`name` is wrong in a file, its path from the root, with `new` in the place of `old`."""

    file: str
    name: str
    old: str
    new: str


GROUPS = tomllib.loads(Path(__file__).with_name("mutations.toml").read_text())  # {file: its tests and faults}
FAULTS = [Fault(file, *fault) for file, group in GROUPS.items() for fault in group["faults"]]


class Found(NamedTuple):
    """tier: QUICK, FULL or SURVIVED. by: the id of the test that noticed, None if none did."""

    tier: str
    by: str | None = None


def label(fault):
    return f"{fault.file}: {fault.name}"


def tests_of(file):
    """Paths of the tests and notebooks of a file, in the order in which they should be tried."""
    found = []
    for name in GROUPS[file]["tests"].split():
        folder, suffix = (ROOT / "tests", ".py") if name.startswith("test_") else (ROOT / "notebooks", ".ipynb")
        found += sorted(str(path.relative_to(ROOT)) for path in folder.glob(name + suffix))
    return list(dict.fromkeys(found))


def runnable(test):
    """What to run for the id of a test: a cell needs those before it, and cases come and go."""
    return test.partition("::" if ".ipynb::" in test else "[")[0]


class Copy:
    """A copy of the tree, in which faults can do no harm. What was compiled for the tree is at hand."""

    def __init__(self, folder):
        self.root = folder
        shutil.copytree(ROOT, folder, ignore=NOT_COPIED)

    def first_failure(self, tests, *selected):
        """The id of the first test that fails, or None. One that takes for ever has failed."""
        cached = "-o", f"cache_dir={ROOT / '.pytest_cache'}"
        command = [sys.executable, *"-m pytest -x -v --tb=no --no-header".split(), *cached]
        # The path is for kernels. Byte code is not kept: Python would take it for that of a file as old and as long.
        environment = os.environ | {"PYTHONPATH": str(self.root), "PYTHONDONTWRITEBYTECODE": "1"}
        options = {"cwd": self.root, "env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        try:
            ended = subprocess.run([*command, *selected, *tests], text=True, timeout=HANGS, check=False, **options)
        except subprocess.TimeoutExpired:
            return f"{tests[0]} (hangs)"
        if failed := re.search(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", ended.stdout, re.MULTILINE):
            return failed[1]
        if ended.returncode not in (0, 4, 5):  # all passed; no such test; none selected
            raise RuntimeError(ended.stdout[-2000:])
        return None

    def judge(self, fault, known):
        """Which test notices a fault, `Found`. known: what was found last time, or None."""
        sound = (self.root / fault.file).read_text()
        (self.root / fault.file).write_text(changed(sound, (fault.old, fault.new), once=True))
        try:
            expressions = {QUICK: "not full", FULL: "full"}
            if known and known.by and "(hangs)" not in known.by:
                if by := self.first_failure([runnable(known.by)], "-m", expressions[known.tier]):
                    return Found(known.tier, by)
            for tier, expression in expressions.items():
                if by := self.first_failure(tests_of(fault.file), "-m", expression):
                    return Found(tier, by)
            return Found(SURVIVED)
        finally:
            (self.root / fault.file).write_text(sound)


def judge_all(faults, known, jobs, note=None):
    """{label: `Found`}, printed and noted as they are found. Of what is noted, tests that fail in a sound copy count for nothing."""
    found = {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        copies = [Copy(Path(folder) / str(number)) for number in range(jobs)]

        def one(fault):
            copy, began = copies.pop(), time.monotonic()
            try:
                found[label(fault)] = judged = copy.judge(fault, known.get(label(fault)))
            finally:
                copies.append(copy)
            if note:
                note(found)
            seconds = time.monotonic() - began
            print(f"{judged.tier:9}{seconds:5.0f} s  {label(fault)}\n{judged.by or '':>17}", flush=True)

        list(pool.map(one, faults))
        noticed = {runnable(it.by) for it in found.values() if note and it.by and "(hangs)" not in it.by}
        while noticed and (unsound := copies[0].first_failure(sorted(noticed))):
            print(f"fails without a fault: {unsound}", flush=True)
            noticed.remove(runnable(unsound))
            for name, it in found.items():
                if it.by and runnable(it.by) == runnable(unsound):
                    found[name] = Found(SURVIVED)
    if note:
        note(found)
    return found


def read():
    """{label: `Found`} of the record."""
    return {name: Found(*entry) for name, entry in json.loads(RESULTS.read_text()).items()} if RESULTS.exists() else {}


def record(found):
    """Write a record, {label: [tier, test]}, in the order of the faults."""
    ordered = {label(fault): found[label(fault)] for fault in FAULTS if label(fault) in found}
    lines = [f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in ordered.items()]
    RESULTS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def shares(found):
    """{tier: share of the faults that it finds}; "full" is both tiers together."""
    counted = [found[label(fault)] for fault in FAULTS if label(fault) in found]
    of = lambda *tiers: sum(it.tier in tiers for it in counted) / len(counted)
    return {QUICK: of(QUICK), FULL: of(QUICK, FULL)}


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__.splitlines()[0])
    parser.add_argument("--sample", type=int, help="only so many faults, drawn at random; nothing is recorded")
    parser.add_argument("--seed", type=int, default=0, help="of that draw")
    parser.add_argument("--only", default="", help="only faults whose file and name hold this text")
    parser.add_argument("--jobs", type=int, default=max(1, len(os.sched_getaffinity(0)) // 2), help="at the same time")
    options = parser.parse_args(arguments)
    os.environ |= {"JAX_PLATFORMS": "cpu", "OPENBLAS_NUM_THREADS": "1"}
    known = read()
    faults = [fault for fault in FAULTS if options.only in label(fault)]
    if options.sample is not None:
        noticed = [fault for fault in faults if known.get(label(fault), Found(SURVIVED)).tier != SURVIVED]
        faults = random.Random(options.seed).sample(noticed, min(options.sample, len(noticed)))
    note = None if options.sample is not None else lambda found: record(known | dict(found))
    found = judge_all(faults, known, options.jobs, note)
    survived = [name for name, it in found.items() if it.tier == SURVIVED]
    counts = {tier: sum(it.tier == tier for it in found.values()) for tier in (QUICK, FULL)}
    print(f"{len(found)} faults: quick tier {counts[QUICK]}, full tier {counts[FULL]}, survived {len(survived)}")
    if options.sample is not None:
        return int(bool(survived))
    of_all = shares(known | found)
    print(f"of all: quick tier {of_all[QUICK]:.1%}, both {of_all[FULL]:.1%}")
    return int(any(of_all[tier] < POWER[tier] for tier in POWER))


if __name__ == "__main__":
    sys.exit(main())
