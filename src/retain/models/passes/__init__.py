"""Passes: functions of a stream of operations to another one, a file each. See docs/design/programs.md."""
