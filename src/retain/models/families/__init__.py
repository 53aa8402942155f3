"""Model families: one file each, named like its Hugging Face `model_type`, with `spec_from_config` and `build`.

A family may name tensors that it leaves out, as regular expressions (`IGNORED_TENSORS`), and say that its files may
have an MTP layer (`MTP_LAYER`).
"""
