"""Run a function many times in several processes, of which any may hang or die.

A process that hangs, dies, raises or has worked for long is replaced. With several GPUs the processes are spread
over them, and those of one GPU share its memory.
"""

import contextlib
import itertools
import multiprocessing
import os
import subprocess
import time
from multiprocessing import connection
from typing import Any, NamedTuple

SPAWN = multiprocessing.get_context("spawn")  # a fork would share the threads of JAX
STARTING = 120  # seconds that the imports of a process may take, before its first task
LIFE = 200  # tasks of one process: JAX keeps every kernel that it compiled


class Outcome(NamedTuple):
    """What became of a task.

    kind: "returned", "raised", "hung" or "died". value: what the function returned, or the text of the failure.
    """

    task: Any
    kind: str
    value: Any


class Workers:
    """So many processes that call function(task), importable by its name; to be used in a `with` block."""

    def __init__(self, function, count):
        os.environ["OPENBLAS_NUM_THREADS"] = "1"  # which a process reads when it begins
        devices = visible_gpus()
        self._all = [_Worker(function, i, devices[i % len(devices)] if devices else None) for i in range(count)]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for worker in self._all:
            worker.stop()

    def outcomes(self, tasks, patience):
        """Yield the `Outcome` of every task, as they come.

        tasks: an iterable, of which one is taken whenever a process has nothing to do. patience: seconds
        after which a process hangs.
        """
        tasks = iter(tasks)
        try:
            for worker, task in zip(self._all, tasks):  # noqa: B905 (there may be fewer tasks, or no end of them)
                worker.begin(task)
            while busy := [worker for worker in self._all if worker.busy]:
                connection.wait([worker.pipe for worker in busy], timeout=0.5)
                for worker in busy:
                    if outcome := worker.outcome(patience):
                        if outcome.kind != "returned" or worker.done == LIFE:
                            worker.stop()
                        for task in itertools.islice(tasks, 1):
                            worker.begin(task)
                        yield outcome
        finally:
            for worker in self._all:
                if worker.busy:
                    worker.stop()


def visible_gpus():
    """The values of CUDA_VISIBLE_DEVICES that name one GPU each; no JAX is started to find out."""
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        return []
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return [name for name in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if name]
    try:
        listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=True).stdout
    except (FileNotFoundError, subprocess.CalledProcessError):
        return []
    return [str(number) for number in range(len(listed.splitlines()))]


class _Worker:
    """A process, from its first task on."""

    def __init__(self, function, number, device):
        self.function, self.number, self.device = function, number, device
        self.process, self.busy = None, False

    def begin(self, task):
        if self.process is None:
            self._start()
        self.task, self.busy, self.since = task, True, time.monotonic()
        with contextlib.suppress(BrokenPipeError):  # `outcome` will find it dead
            self.pipe.send(task)

    def _start(self):
        self.pipe, theirs = SPAWN.Pipe()
        arguments = self.function, theirs, self.number, self.device
        self.process, self.done = SPAWN.Process(target=_serve, args=arguments, daemon=True), 0
        self.process.start()
        theirs.close()  # so that the pipe breaks when the process dies

    def outcome(self, patience):
        """The Outcome of the task, or None while it is at work."""
        seconds = time.monotonic() - self.since
        if self.pipe.poll():
            try:
                kind, value = self.pipe.recv()
            except (EOFError, ConnectionResetError):
                self.process.join()
                kind, value = "died", f"the process ended with exit code {self.process.exitcode}"
        elif seconds > (patience if self.done else patience + STARTING):
            kind, value = "hung", f"no answer after {seconds:.0f} s"
        else:
            return None
        self.busy, self.done = False, self.done + 1
        return Outcome(self.task, kind, value)

    def stop(self):
        if self.process is not None:
            self.process.kill()
            self.process.join(timeout=10)  # a process that waits for a driver may not end at once
            self.pipe.close()
        self.process, self.busy = None, False


def _serve(function, pipe, number, device):
    """What a process does: answer tasks, on one GPU and four cores. On all cores it would keep a thread for each."""
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # which JAX reads when it is first used
    if device is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = device
    if hasattr(os, "sched_setaffinity"):  # it is Linux that has it
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[(number + i) % len(cores)] for i in range(4)})
    with contextlib.suppress(EOFError, KeyboardInterrupt):
        while True:
            task = pipe.recv()
            try:
                answer = "returned", function(task)
            except Exception as error:
                answer = "raised", f"{type(error).__name__}: {str(error).strip()}"
            pipe.send(answer)
