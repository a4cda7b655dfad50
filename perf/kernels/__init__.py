"""Every pass against a plain copy, and what a kernel is made of."""
