"""`optimizer.step` on one rank, beside torch's."""
