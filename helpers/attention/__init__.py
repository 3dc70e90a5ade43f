"""Flash attention, from the definition to the kernels. Start reading at `public/api.py`."""
