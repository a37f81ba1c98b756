"""Checkpoint formats: each module turns a folder into a `Checkpoint`, whose parameters are read one at a time."""
