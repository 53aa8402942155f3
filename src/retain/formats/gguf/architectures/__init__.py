"""One file for each architecture of llama.cpp, named like it: its metadata, tensor names and layouts."""
