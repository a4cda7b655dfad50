"""The convergence study: 1-bit optimizers against their originals, on real data."""
