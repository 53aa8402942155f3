"""Names of array types. Letters in shapes: B requests, T fresh tokens, L layers, G kv heads, S slots, D head dim."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
