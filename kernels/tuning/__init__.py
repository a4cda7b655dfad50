"""How fast a pass runs here: kernel shapes measured and remembered, workloads, timing."""
