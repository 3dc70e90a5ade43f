"""What Pallas's interpreter for TPUs complains of, in a line that fits a lesson."""

import contextlib
import io
import logging
import re

import jax
from jax.experimental.pallas import tpu as pltpu

_RACE = re.compile(r"RACE DETECTED\s+(read|write) of .*?(read|write) of ", re.DOTALL)
_REVISIT = re.compile(r"Revisited block .*? of (output \d+) in iteration \(?([\d, ]+)\)?\.")


def complaint(run):
    """Call run(), which runs kernels in the interpreter. Returns what it complains of, or None.

    JAX 0.11 prints races and goes on, later versions raise.
    """
    log = logging.getLogger("jax._src.callback")
    printed, was_disabled, error = io.StringIO(), log.disabled, ""
    log.disabled = True  # the same text, with its trace
    try:
        with contextlib.redirect_stdout(printed):
            jax.block_until_ready(run())
    except Exception as raised:
        error = str(raised).strip()
        with contextlib.suppress(Exception):
            jax.effects_barrier()  # or the next kernel might raise this error once more
    finally:
        log.disabled = was_disabled
        pltpu.reset_tpu_interpret_mode_state()  # it remembers what was going on
    text = printed.getvalue() + error
    if race := _RACE.search(text):
        return f"a race: nothing puts a {race[1]} of one core and a {race[2]} of the other in order"
    if revisit := _REVISIT.search(text):
        return f"a block of {revisit[1]} is visited again in program ({revisit[2]}), after others"
    return error.splitlines()[-1] if error else None
