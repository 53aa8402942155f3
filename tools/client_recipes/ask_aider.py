"""Turns with aider, which edits a note; $OPENAI_API_BASE is the server's address. An argument says how many turns."""

import sys
from pathlib import Path

from aider.coders import Coder
from aider.io import InputOutput
from aider.models import Model

io = InputOutput(yes=True, pretty=False, fancy_input=False)
options = {"edit_format": "whole", "auto_commits": False, "dirty_commits": False}
model = Model("openai/local")
questions = ["Bread, too.", "And say it in one line."]
if len(sys.argv) > 1:
    model.max_chat_history_tokens = 200  # older turns are summarized
    questions += ["Is that all?"] * (int(sys.argv[1]) - len(questions))
coder = Coder.create(main_model=model, fnames=["note.txt"], io=io, **options)
for question in questions:
    coder.run(question)
print("The file:", Path("note.txt").read_text())
