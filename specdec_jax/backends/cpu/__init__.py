"""The CPU's own kernels in C++, and the weights as they read them."""
