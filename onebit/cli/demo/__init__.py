"""`onebit demo`: an optimizer and its 1-bit twin, side by side on ranks of this machine."""
