"""The tool that `llm` runs."""


def read_note(path: str) -> str:
    """Read a note."""
    from pathlib import Path

    return Path(path).read_text()
