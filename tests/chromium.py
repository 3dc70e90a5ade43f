"""The browser of the tests that look at pages, and JupyterLab as `make lab` starts it."""

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import time

from lessons import ROOT

from helpers import clock

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@contextlib.contextmanager
def started_chromium():
    from playwright.sync_api import sync_playwright  # most who import this look at no page

    with sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--disable-dev-shm-usage", "--disable-background-networking"]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield browser
        browser.close()


@contextlib.contextmanager
def started_lab(root, folder, *options):
    """What JupyterLab says of itself once it shows the folder `root`; `folder` is for its settings."""
    make = ["make", "--dry-run", "--no-print-directory", "lab", "ARGS=--no-browser"]
    quiet = {**os.environ, "MAKEFLAGS": ""}
    lab = subprocess.run(make, cwd=ROOT, env=quiet, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
    command = [sys.executable, *shlex.split(lab)[1:], f"--ServerApp.root_dir={root}", *options]
    environment = {name: value for name, value in os.environ.items() if name != clock.OFF}  # as for a learner
    environment |= {f"JUPYTER_{name}_DIR": str(folder / name) for name in ("CONFIG", "DATA", "RUNTIME")}
    said = folder / "said"
    with open(said, "w") as file:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=file)
    try:
        deadline = time.monotonic() + 120
        while "To stop" not in said.read_text():
            assert process.poll() is None and time.monotonic() < deadline, said.read_text()
            time.sleep(0.2)
        yield said.read_text()
    finally:
        process.terminate()
        process.wait(timeout=20)
