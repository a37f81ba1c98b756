"""Runs inside other frameworks' programs, and with their data: T5X and seqio."""
