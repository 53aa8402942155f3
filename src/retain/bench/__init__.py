"""Benches of `retain bench`, one file each. They measure and assert nothing. Does not depend on: the command line."""
