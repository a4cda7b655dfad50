"""`onebit demo`: an optimizer and its 1-bit forms, side by side on ranks of this machine."""
