"""Reads other people's files and writes files that must not be lost; knows nothing about models."""
