"""Runs the command line `specdec`: one file for every command.

The only package that knows flags and gin.
"""
