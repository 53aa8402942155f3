"""The prefix doctor: why a prompt was not found in the prefix cache, in words, with some text of both sides."""
