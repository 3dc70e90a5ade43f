"""Kernels for NVIDIA Hopper in Pallas Mosaic GPU: TMA, wgmma and specialised warpgroups."""
