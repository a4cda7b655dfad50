"""What one device does to one buffer: the passes, the layout they run over and the bytes of the messages."""

from onebit.kernels.backends import Backend, backend

__all__ = ["Backend", "backend"]
