"""Proposes the tokens that the target verifies: models, n-grams, copies, heads, cascades."""
