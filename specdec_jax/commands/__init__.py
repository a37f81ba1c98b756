"""Runs the command line `specdec`: one file for every command; the only package that knows flags
and gin."""
