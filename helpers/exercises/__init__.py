"""The exercises of the notebooks. A check cell says ``check(update)``; ``yours`` is what the learner has made."""

from helpers.exercises.checking import check
from helpers.exercises.mine import yours

__all__ = ["check", "yours"]
