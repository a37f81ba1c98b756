"""The stages of `results.py`, a file for each group of questions."""
