"""The inverted index, codeword -> M experts, and how it is cached."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from airmoe.kernels.backend import use_triton
from airmoe.kernels.best_experts import top_m
from airmoe.kernels.cells import ReverseIndex, make_reverse
from airmoe.kernels.noise import Noise
from airmoe.kernels.norms import inverse_norms
from airmoe.routers.codebook import Codebook, Float32State

# What must be rebuilt, and why.
Due = Literal[
    "nothing",
    # The centroids are other tensors (`functional_call`, `.data = other`): lists are built for
    # this forward, and in training they are not kept.
    "other_tensors",
    "norms",  # only the inverse norms, because shortlists may be older than one step
    "lists",  # the shortlists, and with them the norms and the reverse index
]
NORMS_UNKNOWN = -1  # in a key: whatever happens next, norms are due


@dataclass(frozen=True, kw_only=True)
class Lists:
    """Everything that routing derives from codewords and centroids."""

    experts: Tensor  # [G, M] ascending ids
    inverse_norms: Tensor | None = None  # [E] 1/|w_e| where centroids are projected
    # Where Triton computes, for sums by expert, the reverse index: expert -> its shortlists.
    entries: Tensor | None = None  # [G * M]
    starts: Tensor | None = None  # [E + 1]
    dtype: torch.dtype = torch.float32  # of the operands of the products

    @property
    def reverse(self) -> ReverseIndex | None:
        entries, starts = self.entries, self.starts
        return None if entries is None or starts is None else ReverseIndex(entries, starts)


@torch.no_grad()
def build_lists(
    codewords: Tensor,
    centroids: Tensor,
    noise: Noise | None,
    size: int,
    *,
    normalize: bool,
    dtype: torch.dtype = torch.float32,
) -> Lists:
    """Alg. 1, lines 1 and 4-7: the `size` best experts of every codeword.

    On a GPU the operands of the products are rounded to a 16-bit `dtype`, which moves a score a
    hundredth as far as jitter does.
    """
    norms = inverse_norms(centroids) if normalize else None  # [E]
    if centroids.is_cuda and dtype.itemsize == 2:
        codewords, centroids = codewords.to(dtype), centroids.to(dtype)
    experts = top_m(codewords, centroids, size, inverse_norms=norms, noise=noise)  # [G, M]
    return indexed(Lists(experts=experts, inverse_norms=norms, dtype=dtype), centroids.shape[0])


def indexed(lists: Lists, num_experts: int) -> Lists:
    """With the reverse index, if Triton computes; plain PyTorch needs none."""
    if lists.entries is not None or not use_triton(lists.experts):
        return lists
    reverse = make_reverse(lists.experts, num_experts)
    return replace(lists, entries=reverse.entries, starts=reverse.starts)


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
        """A copied module has tensors of its own."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # the same for a pickled module


@dataclass(frozen=True)
class Key:
    """What lists were derived from."""

    changes: int  # of the parameters: optimizer steps, loads, edits by hand
    triton: bool  # whether it computes, and wants the reverse index
    codebook: tuple[int, ...]  # `Codebook.version`; in training only its first number
    tensors: tuple[TensorIdentity, ...]


class ListCache(Float32State):
    """The lists of one mode, rewritten in place so that captured CUDA graphs stay valid.

    Shortlists live `lifetime` optimizer steps, norms one. Lists that live several steps are in the
    state dict, because what they were built from is gone when a run is resumed.
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
        # Also if the checkpoint has no lists.
        self.register_load_state_dict_pre_hook(ListCache.expire)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        for buffer in self.buffers():
            buffer.zero_()
        self.dtype = torch.float32
        self.expire()

    def expire(self, *_: object) -> None:
        """Make the lists out of date: parameters were loaded, or changed by hand."""
        self.key: Key | None = None
        self.built = 0  # `Key.changes` when the shortlists were built; norms may be newer
        if self.lifetime > 1:
            self.age.fill_(self.lifetime)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "lock": None, "key": None}  # a copy has tensors of its own

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.lock = threading.Lock()

    def due(self, now: Key) -> Due:
        """What must be rebuilt. Nothing else decides it."""
        key = self.key
        if key is None or key.codebook != now.codebook or now.changes - self.built >= self.lifetime:
            return "lists"
        if (key.changes, key.triton) != (now.changes, now.triton):
            return "norms"
        return "nothing" if key.tensors == now.tensors else "other_tensors"

    def view(self) -> Lists:
        """The cached lists themselves, not a copy."""
        norms = self.inverse_norms if self.normalize else None
        lists = Lists(experts=self.experts, inverse_norms=norms, dtype=self.dtype)
        has_reverse = self.key is not None and self.key.triton
        return replace(lists, entries=self.entries, starts=self.starts) if has_reverse else lists

    @torch.no_grad()
    def store(self, lists: Lists | None, due: Due, now: Key, micro_batch: Tensor) -> None:
        """Keep what was built because of `due`; None if a CUDA graph has written it already."""
        self.key = now
        if due != "norms":
            self.built = now.changes
        if lists is None:
            return
        self.dtype = lists.dtype
        for name in ("inverse_norms", "entries", "starts"):
            if getattr(lists, name) is not None:
                getattr(self, name).copy_(getattr(lists, name))
        if due != "norms":
            self.experts.copy_(lists.experts)
            self.built_at.copy_(micro_batch)
            self.age.zero_()

    def loaded(self, changes: int, codebook: Codebook) -> None:
        """Go on with the lists of a checkpoint, if it has any that are not due."""
        device = codebook.codewords.device
        for name, buffer in self._buffers.items():
            if buffer is not None and buffer.is_meta and device.type != "meta":
                # `load_state_dict(assign=True)` leaves what is not saved on the meta device. Only
                # `age` needs a value: it makes the lists due.
                self._buffers[name] = torch.full_like(buffer, self.lifetime, device=device)
        if self.lifetime > 1 and not self.age.is_meta and int(self.age) < self.lifetime:
            # Norms and reverse index are not saved, so they are rebuilt.
            self.key = Key(NORMS_UNKNOWN, False, codebook.version[:1], ())
            self.built = changes - int(self.age)
