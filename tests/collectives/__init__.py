"""Tests of the collectives over real ranks."""
