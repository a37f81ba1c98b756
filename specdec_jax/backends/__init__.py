"""Caches, matrix products and shardings, and the kernels of each kind of device; knows no model."""
