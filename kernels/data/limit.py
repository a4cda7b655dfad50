"""How long a step by m may be: what both backends go by."""

LANES = 512  # in which the blocks of a parameter are added up: a power of two
