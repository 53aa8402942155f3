"""The `retain` command: one file a command, named as the command. Does not depend on: how requests run."""
