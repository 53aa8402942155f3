"""Hook of mkdocs: documents at the root of the repository become pages, with links as the site has them.

`mkdocs.yml` names this file.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace a line `--8<-- "CHANGELOG.md"` by that document, whose links begin at the root."""
    return re.sub(r'^--8<-- "(\w+\.md)"$', lambda m: read_document(m[1]), markdown, flags=re.M)


def read_document(name: str) -> str:
    """Return a document of the root with links from `docs/` on."""
    return (ROOT / name).read_text(encoding="utf-8").replace("](docs/", "](")
