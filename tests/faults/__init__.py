"""Faults, bad input and long runs: ranks that die, stop or are cut off; bits that flip."""
