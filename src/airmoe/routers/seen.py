"""What a cache needs: whether a tensor is still that which it was derived from, and a lock."""

from __future__ import annotations

import threading
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


class Seen:
    """A tensor as it is now.

    Another that has taken its place (`functional_call`, a new parameter, `.data = other`) is not
    equal to it, nor is the same one after edits by hand. But not all is noticed: fused optimizers
    and writes into `.data` leave no trace.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._version = 0 if tensor.is_inference() else tensor._version
        self._place = tensor.storage_offset()
        # Not an address, which a tensor that is gone leaves to the next; and no reference to the
        # tensor itself, with which torch refuses to swap it. What a shard stores says nothing.
        sharded = hasattr(tensor, "full_tensor")
        self._storage = None if sharded else StorageWeakRef(tensor.untyped_storage())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Seen) and vars(self) == vars(other)

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __deepcopy__(self, _memo: object) -> None:
        """A copy of a module has tensors of its own."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # pickled with a module: the same


class OwnLock:
    """A lock of a module's own: its copies, pickled or deep, have others."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: Any) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[type[OwnLock], tuple[()]]:
        return OwnLock, ()
