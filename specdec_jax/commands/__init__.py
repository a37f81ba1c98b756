"""Runs the command line `specdec`: one file for every command; the only room that knows flags and
gin."""
