"""Moves messages between ranks."""

from onebit.collectives.all_reduce import CompressedAllReduce
from onebit.collectives.transport.protocol import CollectiveError

__all__ = ["CollectiveError", "CompressedAllReduce"]
