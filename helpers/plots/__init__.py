"""The pictures of the series, one function each, one module for a notebook or two.

A module's FIGURES maps file names in ``figures/`` to the functions that draw them:
``python -m helpers.plots.collect`` draws them all.
"""
