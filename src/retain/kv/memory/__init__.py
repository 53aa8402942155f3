"""Pages, block tables and slots. Does not depend on: policies, prefixes, requests."""
