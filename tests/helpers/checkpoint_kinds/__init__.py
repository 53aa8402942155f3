"""Kinds of checkpoints that live in tests only."""

from tests.helpers.checkpoint_kinds import counter as counter
