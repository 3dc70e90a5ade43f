"""A line under a cell that takes long: it still runs, and for so many seconds."""

import os
import threading
import time

from IPython import get_ipython
from IPython.display import Pretty, display

PATIENCE_S = 3
OFF = "FLASH_ATTENTION_NO_CLOCK"  # set where notebooks are executed for their outputs, in which the line would stay


class Clock:
    """Watches the cells of a notebook, from `watch` on."""

    def __init__(self, patience_s=PATIENCE_S, period_s=1):
        self.patience_s, self.period_s = patience_s, period_s
        self.done, self.thread = threading.Event(), None

    def start(self, _):
        self.done = threading.Event()
        self.thread = threading.Thread(target=self.show, args=(self.done, time.perf_counter()), daemon=True)
        self.thread.start()

    def show(self, done, began):
        line = None
        while not done.wait(self.period_s if line else self.patience_s):
            now = Pretty(f"still running, {time.perf_counter() - began:.0f} s")
            if line:
                line.update(now)
            else:
                line = display(now, display_id=True)
        if line:
            line.update(Pretty(""))

    def stop(self, _):
        self.done.set()
        if self.thread:
            self.thread.join()


def watch():
    """Show the line under each cell of this notebook that runs longer than PATIENCE_S, and take it away at its end."""
    shell = get_ipython()
    if shell is None or OFF in os.environ or getattr(shell, "_cells_have_a_clock", False):
        return
    shell._cells_have_a_clock = True
    clock = Clock()
    shell.events.register("pre_run_cell", clock.start)
    shell.events.register("post_run_cell", clock.stop)
