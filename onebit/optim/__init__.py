"""Optimizers: the algorithms, and what they share."""
