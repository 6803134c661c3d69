"""Measurements of single kernels on the machine at hand."""
