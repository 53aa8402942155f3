"""One family of models, one file: the name is its Hugging Face `model_type`. Two functions: `spec` and `build`."""
