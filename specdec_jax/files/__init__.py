"""Reads what others wrote and writes what nobody may lose: the operating system's files, and nothing about models."""
