"""Defines the errors that only commands raise."""


class CheckFailed(RuntimeError):
    """A measurement contradicts what must hold; the record is written all the same."""
