"""Communication-compressed training: 1-bit Adam and 1-bit LAMB."""
