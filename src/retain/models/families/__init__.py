"""Model families: one file each, named like its Hugging Face `model_type`, with `spec_from_config` and `build`.

A family may name tensors that it leaves out, as regular expressions (`IGNORED_TENSORS`, or of a config:
`ignored_tensors`).
"""
