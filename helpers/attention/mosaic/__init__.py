"""Kernels by warp-level products in Pallas Mosaic GPU: every NVIDIA GPU from Ampere on, interpreted on a CPU."""
