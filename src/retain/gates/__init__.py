"""The gates that come with the package, and the loader of gates."""
