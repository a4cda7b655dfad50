"""Ranks that train together: DDP, checks that they agree, exchanges that overlap with backward."""
