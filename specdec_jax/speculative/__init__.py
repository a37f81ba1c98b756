"""One iteration of speculative decoding: distributions, verifiers, and policies of γ."""
