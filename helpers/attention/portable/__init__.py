"""Kernels in plain Pallas: interpreted on a CPU, compiled by Triton on an NVIDIA GPU from Ampere on."""
