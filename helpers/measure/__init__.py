"""What kernels cost, by formula, by counting and by the clock; whether they are right; and the records of it."""
