"""How long a step by m may be: what both backends go by."""

LEAST = 1.0  # limit_p, at least
TIMES = 3.0  # R_p
LANES = 512  # in which the blocks of a parameter are added up: a power of two
