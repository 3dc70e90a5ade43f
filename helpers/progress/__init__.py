"""The map of the series with what a learner has done, for notebook 00."""

from helpers.exercises import mine, record
from helpers.exercises.exercise import exercises_of
from helpers.plots import roadmap
from helpers.series import LESSONS, PATHS, exercises_on


def progress():
    """Print for each path what is solved and which exercise comes next, and return the map, a dot for each exercise."""
    exercises = {number: exercises_of(number) for number in LESSONS}
    titles = {exercise.number: exercise.title for each in exercises.values() for exercise in each}
    done = record.done()
    for path in PATHS:
        numbers = exercises_on(path, titles)
        solved = sum(done.get(number) == record.SOLVED for number in numbers)
        upcoming = _next(numbers, done)
        then = f"next {upcoming} · {titles[upcoming]}" if upcoming else "all of them"
        print(f"{path['name'] + ':':12} {solved:2} of {len(numbers):2} exercises solved, {then}")
    print("your mine.py:", "  ".join(f"{part} {'✓' if is_there else '·'}" for part, is_there in mine.parts().items()))
    if not record.in_a_workbook():
        print("Nothing is recorded here, only in your own copy, which `make lab` opens.")
    state = lambda exercise: done.get(exercise.number, "open")
    states = {number: tuple(map(state, each)) for number, each in exercises.items()}
    return roadmap.progress(states, following=upcoming and f"{int(upcoming.split('.')[0]):02d}")


def _next(numbers, done):
    """The first exercise that is not solved, from the one on that was worked on last; None if all are solved."""
    last = next((number for number in reversed(done) if number in numbers), numbers[0])
    place = numbers.index(last)
    ordered = numbers[place:] + numbers[:place]
    return next((number for number in ordered if done.get(number) != record.SOLVED), None)
