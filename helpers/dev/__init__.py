"""What maintainers run: the benchmark, random calls, and compilers for devices that are not here."""
