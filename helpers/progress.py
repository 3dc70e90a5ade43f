"""The map of the series with what a learner has done, for notebook 00."""

import importlib

from helpers.exercises import record
from helpers.plots import roadmap


def progress():
    """Print how many exercises are solved and which comes next, and return the map, a dot for each exercise."""
    exercises = {
        number: importlib.import_module(f"helpers.exercises.notebook_{number}").EXERCISES for number, _ in roadmap.STEPS
    }
    done = record.done()
    upcoming = _next([exercise for each in exercises.values() for exercise in each], done)
    total = sum(map(len, exercises.values()))
    solved = sum(done.get(exercise.number) == record.SOLVED for each in exercises.values() for exercise in each)
    then = f"Next: {upcoming.number} · {upcoming.title}." if upcoming else "That is all of them."
    print(f"{solved} of {total} exercises solved. {then}")
    if not record.in_a_workbook():
        print("Nothing is recorded here, only in your own copy, which `make lab` opens.")
    states = {
        number: tuple(done.get(exercise.number, "open") for exercise in each) for number, each in exercises.items()
    }
    return roadmap.progress(states, following=upcoming and f"{int(upcoming.number.split('.')[0]):02d}")


def _next(exercises, done):
    """The first exercise that is not solved, from the one on that was worked on last; None if all are solved."""
    numbers = [exercise.number for exercise in exercises]
    last = next((number for number in reversed(done) if number in numbers), numbers[0])
    place = numbers.index(last)
    ordered = exercises[place:] + exercises[:place]
    return next((exercise for exercise in ordered if done.get(exercise.number) != record.SOLVED), None)
