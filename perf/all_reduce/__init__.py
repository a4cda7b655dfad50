"""The compressed all-reduce against torch.distributed's: time, and bytes on the wire."""
