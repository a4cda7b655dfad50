"""Streams and events on a simulated device: what a recorder sees, and ranks that mirror one."""
