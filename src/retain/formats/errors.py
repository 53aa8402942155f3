"""Errors that every file format raises."""


class UnsupportedError(ValueError):
    """A file is intact, but needs a feature that is not implemented."""
