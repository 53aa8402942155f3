"""The `retain` command: one file a command. Does not depend on: how requests run."""
