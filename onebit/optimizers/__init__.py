"""What users build: each algorithm as a torch.optim.Optimizer."""
