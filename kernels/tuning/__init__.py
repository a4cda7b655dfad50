"""Measuring how fast a pass runs on this machine: kernel shapes and their cache, workloads, timing."""
