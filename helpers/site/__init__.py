"""Builds the site of the series: `build` checks and runs Sphinx, `pages` computes, `extension` teaches Sphinx."""
