"""Moves messages between ranks."""
