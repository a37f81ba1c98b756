"""Reads and writes files, and shows the progress of long tasks; knows nothing about models."""
