"""Algorithm 1: one iteration of speculative decoding, the laws it keeps, verifiers, and policies of γ."""
