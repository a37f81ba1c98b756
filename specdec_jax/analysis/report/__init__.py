"""Draws records as text, plots and one HTML page, beside what the paper printed."""
