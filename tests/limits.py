"""How long a test waits for a process before it takes it for hung: no judgement of speed, on no machine."""

HUNG = 600.0  # seconds; pytest ends a test a minute later
