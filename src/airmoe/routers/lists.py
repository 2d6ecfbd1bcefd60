"""The inverted index codeword -> M experts: how it is built, and its cache at a fixed address."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from airmoe.distributed import full_tensor
from airmoe.kernels.backend import use_triton
from airmoe.kernels.best_experts import top_m
from airmoe.kernels.cells import ReverseIndex, make_reverse
from airmoe.kernels.noise import Noise
from airmoe.kernels.norms import inverse_norms
from airmoe.routers.codebook import Codebook, Float32State

# Which part of the cached lists is out of date: all of it, only the inverse norms, or nothing.
# "replaced": the cache is good, but other tensors stand in for the centroids it was built from
# (`functional_call`, an edit by hand), perhaps only for a while.
Due = Literal["nothing", "replaced", "norms", "lists"]


@dataclass(frozen=True)
class Lists:
    """Everything that routing derives from codewords and centroids."""

    experts: Tensor  # [G, M] ascending ids
    inverse_norms: Tensor | None  # [E] 1/|w_e| where centroids are projected
    reverse: ReverseIndex | None  # expert -> its shortlists, for Triton's weight gradients only


@torch.no_grad()
def build_lists(
    codewords: Tensor, centroids: Tensor, noise: Noise | None, size: int, *, normalize: bool
) -> Lists:
    """Alg. 1, lines 1 and 4-7: the `size` best experts of every codeword."""
    centroids = full_tensor(centroids.detach())
    scales = inverse_norms(centroids) if normalize else None  # [E]
    experts = top_m(codewords, centroids, size, inverse_norms=scales, noise=noise)  # [G, M]
    reverse = make_reverse(experts, centroids.shape[0]) if use_triton(experts) else None
    return Lists(experts, scales, reverse)


@torch.no_grad()
def inverse_norms_of(centroids: Tensor) -> Tensor:
    """[E] 1/|w_e|."""
    return inverse_norms(full_tensor(centroids.detach()))


class TensorIdentity(tuple[int, int, Any]):
    """Which tensor it was, and in which version.

    Another tensor in its place (`functional_call`, a new parameter, `.data = other`) is not equal,
    nor is the same one after an edit by hand. Fused optimizers and writes into `.data` leave no
    trace.
    """

    def __new__(cls, tensor: Tensor) -> Self:
        version = 0 if tensor.is_inference() else tensor._version
        # Not an address, which another tensor may get later; and no reference to the tensor, with
        # which torch refuses to swap it. The storage of a shard says nothing.
        sharded = hasattr(tensor, "full_tensor")
        storage = None if sharded else StorageWeakRef(tensor.untyped_storage())
        return super().__new__(cls, (version, tensor.storage_offset(), storage))

    def __deepcopy__(self, _memo: object) -> None:
        """A copy of a module has tensors of its own."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # the same for a pickled module


@dataclass(frozen=True)
class Key:
    """What lists were derived from."""

    changes: int  # of the parameters: optimizer steps, loads, edits by hand
    codebook: tuple[int, ...]  # `Codebook.version`; in training only its first number
    tensors: tuple[TensorIdentity, ...]


class ListCache(Float32State):
    """The lists of one mode, rewritten in place so that captured CUDA graphs stay valid.

    Shortlists live `lifetime` optimizer steps, norms one. Lists that live several steps are part of
    the state dict, because what they were built from is gone when a run is resumed.
    """

    experts: Tensor  # [G, M] ascending ids
    inverse_norms: Tensor  # [E]
    entries: Tensor  # [G * M], and
    starts: Tensor  # [E + 1]: the reverse index
    built_at: Tensor  # int64 scalar, the micro-batch in which the lists were built
    age: Tensor  # int64 scalar, optimizer steps since then: for checkpoints

    def __init__(
        self, num_codewords: int, size: int, num_experts: int, *, normalize: bool, lifetime: int = 1
    ) -> None:
        super().__init__()
        self.normalize, self.lifetime = normalize, lifetime
        saved = {
            "experts": torch.empty(num_codewords, size, dtype=torch.int64),
            "built_at": torch.empty((), dtype=torch.int64),
            "age": torch.empty((), dtype=torch.int64),
        }
        derived = {
            "inverse_norms": torch.empty(num_experts, dtype=torch.float32),
            "entries": torch.empty(num_codewords * size, dtype=torch.int32),
            "starts": torch.empty(num_experts + 1, dtype=torch.int32),
        }
        for name, buffer in {**saved, **derived}.items():
            self.register_buffer(name, buffer, persistent=name in saved and lifetime > 1)
        self.lock = threading.Lock()  # one of several threads builds, the others wait for it
        self.reset_parameters()
        self.register_load_state_dict_pre_hook(_before_load)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        for buffer in self.buffers():
            buffer.zero_()
        self._has_reverse = False
        self.expire()

    def expire(self) -> None:
        """Make the lists out of date: parameters were loaded, or changed by hand."""
        self.key: Key | None = None
        self.changes_when_built = 0  # of the shortlists; norms may be newer
        if self.lifetime > 1:
            self.age.fill_(self.lifetime)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "lock": None, "key": None}  # a copy has tensors of its own

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.lock = threading.Lock()

    def due(self, now: Key) -> Due:
        """What is out of date. Nothing else decides it."""
        key = self.key
        if key is None or key.codebook != now.codebook:
            return "lists"
        if now.changes - self.changes_when_built >= self.lifetime:
            return "lists"
        if key.changes != now.changes:
            return "norms"
        return "nothing" if key.tensors == now.tensors else "replaced"

    def view(self) -> Lists:
        """The cached lists themselves, not a copy."""
        norms = self.inverse_norms if self.normalize else None
        reverse = ReverseIndex(self.entries, self.starts) if self._has_reverse else None
        return Lists(self.experts, norms, reverse)

    @torch.no_grad()
    def store(self, lists: Lists, key: Key, micro_batch: Tensor) -> None:
        self.experts.copy_(lists.experts)
        if lists.inverse_norms is not None:
            self.inverse_norms.copy_(lists.inverse_norms)
        self._has_reverse = lists.reverse is not None
        if lists.reverse is not None:
            self.entries.copy_(lists.reverse.entries)
            self.starts.copy_(lists.reverse.starts)
        self.built_at.copy_(micro_batch)
        self.age.zero_()
        self.key, self.changes_when_built = key, key.changes

    @torch.no_grad()
    def renew_norms(self, centroids: Tensor, key: Key) -> None:
        """Keep scores exact under older lists, at the cost of one pass over the centroids."""
        if self.normalize:
            self.inverse_norms.copy_(inverse_norms_of(centroids))
        if not self._has_reverse and use_triton(self.experts):  # lists of a checkpoint
            reverse = make_reverse(self.experts, self.inverse_norms.shape[0])
            self.entries.copy_(reverse.entries)
            self.starts.copy_(reverse.starts)
            self._has_reverse = True
        self.key = key

    def renewed(self, due: Due, key: Key) -> None:
        """Note that a CUDA graph has written what was due into the buffers."""
        self.key = key
        if due == "lists":
            self.changes_when_built = key.changes

    def loaded(self, changes: int, codebook: Codebook) -> None:
        """Go on with the lists of a checkpoint, if it has any that are not due."""
        device = codebook.codewords.device
        for name, buffer in self._buffers.items():
            if buffer is not None and buffer.is_meta and device.type != "meta":
                # `load_state_dict(assign=True)` leaves unsaved buffers there.
                self._buffers[name] = torch.full_like(buffer, self.lifetime, device=device)
        if self.lifetime > 1 and not self.age.is_meta and int(self.age) < self.lifetime:
            self.key = Key(-1, codebook.version[:1], ())  # norms and reverse index are not saved
            self.changes_when_built = changes - int(self.age)
            self._has_reverse = False


def _before_load(module: torch.nn.Module, *_: Any) -> None:
    assert isinstance(module, ListCache)
    module.expire()  # also if the checkpoint has no lists
