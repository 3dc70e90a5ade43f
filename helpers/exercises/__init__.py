"""The exercises of the notebooks. A check cell says ``check(update)``."""

from helpers.exercises.checking import check

__all__ = ["check"]
