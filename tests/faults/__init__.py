"""Faults, bad input and long runs: ranks that die, stop or are cut off; steps that are poisoned; bits that flip."""
