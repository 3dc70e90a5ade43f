"""Kernels in plain Pallas, for readers: interpreted on a CPU, and for `triton` compiled by Triton for a GPU."""
