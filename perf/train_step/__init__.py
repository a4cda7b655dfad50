"""The parts of a training step, compressed and not."""
