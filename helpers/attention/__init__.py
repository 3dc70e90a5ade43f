"""Flash attention, from the definition to the kernels. Start reading at `api.py`."""
