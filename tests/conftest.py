"""What every test shares."""

import jax
import pytest


@pytest.fixture(autouse=True)
def full_precision(request):
    """On a GPU a float32 product is TF32 unless asked otherwise; the tests want to see a kernel's own error."""
    if request.node.nodeid.endswith(".ipynb") or ".ipynb::" in request.node.nodeid:
        yield
        return
    with jax.default_matmul_precision("highest"):
        yield
