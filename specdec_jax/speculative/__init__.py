"""Algorithm 1: one iteration of speculative decoding, the distributions it keeps, verifiers, and
policies of γ."""
