"""What the arrays of the control plane hold, as types of its signatures; comments beside them give the shapes."""

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]  # rows, columns, counts, lengths, and whatever indexes something else
Int32s = npt.NDArray[np.int32]
Blocks = npt.NDArray[np.int32]  # block ids
Tokens = npt.NDArray[np.int32]  # token ids
Flags = npt.NDArray[np.bool_]
Hashes = npt.NDArray[np.uint64]
