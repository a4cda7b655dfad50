"""One device's training step: time, memory and traces."""
