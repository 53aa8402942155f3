"""Processing of text: prompts become requests, and sampled tokens become text.

Has the tokenizer, the chat template, the detokenizer, grammars, and the processors of input and output.
Does not depend on: models, HTTP.
"""
