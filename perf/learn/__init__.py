"""GPT-2 small learns from scratch: each optimizer on 8 ranks that share a GPU."""
