"""Two turns with aider, which edits a note; $OPENAI_API_BASE is the server's address."""

from pathlib import Path

from aider.coders import Coder
from aider.io import InputOutput
from aider.models import Model

io = InputOutput(yes=True, pretty=False, fancy_input=False)
options = {"edit_format": "whole", "auto_commits": False, "dirty_commits": False}
coder = Coder.create(main_model=Model("openai/local"), fnames=["note.txt"], io=io, **options)
coder.run("Bread, too.")
coder.run("And say it in one line.")
print("The file:", Path("note.txt").read_text())
