"""Text: a model's own tokenizer and chat template, whatever file they lie in, and the streaming of an answer.

What is not known here: models, requests, the cache.
"""

from retain.processing.detokenizer import IncrementalDetokenizer
from retain.processing.tokenizer import Tokenizer

__all__ = ["IncrementalDetokenizer", "Tokenizer"]
