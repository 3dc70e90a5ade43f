"""The same kernels in other languages than Pallas. Nothing of the series needs them but the notebooks about them."""
