"""Random and mutated input: only documented errors, never a crash, a hang or silent damage. `python -m tests.fuzz`."""
