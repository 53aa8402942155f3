"""The inspector: what running requests keep in their cache. Does not depend on: the OpenAI API."""
