"""Ranks that leave and join a run without a restart."""
