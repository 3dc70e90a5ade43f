"""Builds the site of the series: `build` checks, lays out and runs Sphinx; `pages` computes; `mathml` sets equations."""
