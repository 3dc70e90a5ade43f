"""What maintainers run: the benchmark, the tuner, random calls, and compilers for devices that are not here."""
