"""Benchmarks, the network lab, plots and records of results; run from the repository root."""
