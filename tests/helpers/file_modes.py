"""What other users of a machine reach of a folder."""

from pathlib import Path


def open_to_others(folder: Path) -> list[str]:
    """Return what others can enter, read or write below a folder that they can enter themselves."""
    found = []
    for path in folder.iterdir():
        mode = path.lstat().st_mode
        if mode & 0o077 and not path.is_symlink():
            found.append(f"{path} {mode:o}")
            found += open_to_others(path) if path.is_dir() else []
    return found
