"""eagle3: draft with a head that was trained for the target, and reads states between its layers (models/eagle3.py).

The head's layer is a cache of the target, so it drafts as the layer of a target's own file does (mtp.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from retain.engine.drafters import DrafterNeeds, TargetModel, mtp


@dataclass
class Drafter(mtp.Drafter):
    """`model`: the folder of the head, or its .gguf file; `weights`: bf16, int8, int4, or auto as in its file."""

    model: str | None = None
    weights: str = "auto"

    @property
    def needs(self) -> DrafterNeeds:  # type: ignore[override]  # the class of a layer has no options
        """The hidden states of the target, and the head of this name."""
        return DrafterNeeds(hidden_states=True, head=self.model, weights=self.weights)

    def attach(self, target: TargetModel) -> None:
        """Take the head that was loaded with the target. Raises ValueError where there is none."""
        if self.model is None:
            raise ValueError("eagle3: say which model= drafts: a folder or a .gguf file")
        super().attach(target)
