"""What one device does to one buffer: the passes, the layout they run over and the bytes of the messages."""

from onebit.kernels.passes import Backend, Passes, backend

__all__ = ["Backend", "Passes", "backend"]
