"""A training step taken apart, compressed and not."""
