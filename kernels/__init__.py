"""What one device does to one buffer: the fused passes, the layout they run over and the bytes they exchange."""

from onebit.kernels.passes import Passes, backend

__all__ = ["Passes", "backend"]
