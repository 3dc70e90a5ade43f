"""The exercises of the notebooks. A check cell says ``check("2.1", update)``."""

from helpers.exercises.checking import check

__all__ = ["check"]
