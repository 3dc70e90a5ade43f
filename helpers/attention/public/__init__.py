"""What users call, and the table of the kernels that serve a call."""
