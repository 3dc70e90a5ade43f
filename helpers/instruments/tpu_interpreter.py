"""What Pallas's interpreter for TPUs complains of, in a line that fits a lesson."""

import re

from jax.experimental.pallas import tpu as pltpu

from helpers.instruments.overheard import overheard

_RACE = re.compile(r"RACE DETECTED\s+(read|write) of .*?(read|write) of ", re.DOTALL)
_REVISIT = re.compile(r"Revisited block .*? of (output \d+) in iteration \(?([\d, ]+)\)?\.")


def complaint(run):
    """Call run(), which runs kernels in the interpreter. Returns what it complains of, or None."""
    text, error = overheard(run)
    pltpu.reset_tpu_interpret_mode_state()  # it remembers what was going on
    error = str(error or "").strip()
    text += error
    if race := _RACE.search(text):
        return f"a race: nothing puts a {race[1]} of one core and a {race[2]} of the other in order"
    if revisit := _REVISIT.search(text):
        return f"a block of {revisit[1]} is visited again in program ({revisit[2]}), after others"
    return error.splitlines()[-1] if error else None
