"""Compute requests: the scheduler chooses fresh tokens, the runner computes them, the sampler picks the next ones.

`engine.py` has the step that connects these parts. Does not depend on: text, files, HTTP, the content of K and V.
"""
