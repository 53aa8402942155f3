"""Statistics of pages, requests and attention. Does not depend on: where they are shown."""
