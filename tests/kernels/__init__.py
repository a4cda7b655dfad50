"""Tests of onebit.kernels."""
