"""What every test shares."""

import os

os.environ.setdefault("PJRT_NPROC", "16")  # threads for Mosaic's interpreter, whose warpgroups wait for one another

import jax
import pytest


def pytest_configure(config):
    """Most of a run is the compiling of interpreted kernels that then run once: compile lightly, and keep the result."""
    if jax.default_backend() == "cpu":
        jax.config.update("jax_disable_most_optimizations", True)
        if hasattr(config, "cache"):
            jax.config.update("jax_compilation_cache_dir", str(config.cache.mkdir("compiled")))
            jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


@pytest.fixture(autouse=True)
def full_precision(request):
    """On a GPU a float32 product is TF32 unless asked otherwise; the tests want to see a kernel's own error."""
    if request.node.nodeid.endswith(".ipynb") or ".ipynb::" in request.node.nodeid:
        yield
        return
    with jax.default_matmul_precision("highest"):
        yield
