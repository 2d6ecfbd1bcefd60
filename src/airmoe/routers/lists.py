"""The inverted index codeword -> M experts: how it is built, and its cache at a fixed address."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from airmoe.distributed import full_tensor
from airmoe.kernels.backend import use_triton
from airmoe.kernels.layout import ReverseIndex, make_reverse
from airmoe.kernels.noise import Noise
from airmoe.kernels.norms import inverse_norms
from airmoe.kernels.shortlist import top_m
from airmoe.routers.codebook import Float32State

# What of cached lists is out of date: all of them, the norms only, or nothing, but other tensors
# than those they were built from are in place for a while (`functional_call`, an edit by hand).
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
    norms = norms_of(centroids) if normalize else None
    centroids = full_tensor(centroids.detach())
    experts = top_m(codewords, centroids, size, inverse_norms=norms, noise=noise)
    return Lists(experts, norms, reverse_of(experts, centroids.shape[0]))


@torch.no_grad()
def norms_of(centroids: Tensor) -> Tensor:
    """[E] 1/|w_e|."""
    return inverse_norms(full_tensor(centroids.detach()))


def reverse_of(experts: Tensor, num_experts: int) -> ReverseIndex | None:
    """The reverse index of shortlists where kernels want it."""
    return make_reverse(experts, num_experts) if use_triton(experts) else None


class TensorIdentity:
    """Which tensor it was, and in which version.

    Another tensor in its place (`functional_call`, a new parameter, `.data = other`) is not equal,
    nor is the same one after an edit by hand. Fused optimizers and writes into `.data` leave no
    trace.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._version = 0 if tensor.is_inference() else tensor._version
        self._place = tensor.storage_offset()
        # Not an address, which a tensor that is gone leaves to the next; and no reference to the
        # tensor itself, with which torch refuses to swap it. What a shard stores says nothing.
        sharded = hasattr(tensor, "full_tensor")
        self._storage = None if sharded else StorageWeakRef(tensor.untyped_storage())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorIdentity) and vars(self) == vars(other)

    __hash__ = None  # pyright: ignore[reportAssignmentType]

    def __deepcopy__(self, _memo: object) -> None:
        """A copy of a module has tensors of its own."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # pickled with a module: the same


@dataclass(frozen=True)
class Key:
    """What lists are derived from, as it was when they were."""

    parameters: int  # optimizer steps, and changes by hand
    codebook: tuple[int, ...]  # how often the codebook was set anew, or also how often it learned
    tensors: tuple[TensorIdentity, ...]


class ListCache(Float32State):
    """The lists of one mode, rewritten in place so that captured CUDA graphs stay true.

    Shortlists live `lifetime` optimizer steps, norms one. Lists that live several steps are part of
    the state dict, because what they were built from is gone when a run is resumed.
    """

    experts: Tensor  # [G, M] ascending ids
    inverse_norms: Tensor  # [E]
    entries: Tensor  # [G * M], and
    starts: Tensor  # [E + 1]: the reverse index
    built_at: Tensor  # int64 scalar, the micro-batch in which the lists were built
    saved_age: Tensor  # int64 scalar, `age` for a checkpoint

    def __init__(
        self, num_codewords: int, size: int, num_experts: int, *, normalize: bool, lifetime: int = 1
    ) -> None:
        super().__init__()
        self.normalize, self.lifetime = normalize, lifetime
        lasts = lifetime > 1
        shape, index = (num_codewords, size), torch.int32
        self.register_buffer("experts", torch.empty(shape, dtype=torch.int64), persistent=lasts)
        norms = torch.empty(num_experts, dtype=torch.float32)
        self.register_buffer("inverse_norms", norms, persistent=False)
        entries = torch.empty(num_codewords * size, dtype=index)
        self.register_buffer("entries", entries, persistent=False)
        starts = torch.empty(num_experts + 1, dtype=index)
        self.register_buffer("starts", starts, persistent=False)
        for name in ("built_at", "saved_age"):
            self.register_buffer(name, torch.empty((), dtype=torch.int64), persistent=lasts)
        self._has_reverse = False
        self.lock = threading.Lock()  # one of several threads builds, the others wait for it
        self.reset_parameters()
        self.register_load_state_dict_pre_hook(_before_load)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        for buffer in self.buffers():
            buffer.zero_()
        self.expire()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "lock": None, "key": None}  # a copy has tensors of its own

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.lock = threading.Lock()

    def due(self, now: Key) -> Due:
        """What must be derived again: the only place that decides it."""
        built = self.key
        if built is None or built.codebook != now.codebook or self.age >= self.lifetime:
            return "lists"
        if built.parameters != now.parameters:
            return "norms"
        return "nothing" if built.tensors == now.tensors else "replaced"

    def expire(self) -> None:
        """Nothing of it can be used: parameters were loaded, or changed by hand."""
        self.key: Key | None = None
        self._set_age(self.lifetime)

    def optimizer_stepped(self) -> None:
        self._set_age(self.age + 1)

    def _set_age(self, age: int) -> None:
        self.age = age  # optimizer steps since the lists were built
        if self.lifetime > 1:
            self.saved_age.fill_(age)

    def view(self) -> Lists:
        """The cached lists themselves, not a copy."""
        norms = self.inverse_norms if self.normalize else None
        reverse = ReverseIndex(self.entries, self.starts) if self._has_reverse else None
        return Lists(self.experts, norms, reverse)

    @torch.no_grad()
    def store(self, lists: Lists, key: Key, micro_batch: Tensor) -> None:
        self.experts.copy_(lists.experts)
        self._store_norms(lists.inverse_norms)
        self._store_reverse(lists.reverse)
        self.built_at.copy_(micro_batch)
        self.key = key
        self._set_age(0)

    @torch.no_grad()
    def renew_norms(self, centroids: Tensor, key: Key) -> None:
        """Scores are exact whatever the age of the lists; costs no product with codewords."""
        self._store_norms(norms_of(centroids) if self.normalize else None)
        if not self._has_reverse:  # lists of a checkpoint
            self._store_reverse(reverse_of(self.experts, self.inverse_norms.shape[0]))
        self.key = key

    def _store_norms(self, norms: Tensor | None) -> None:
        if norms is not None:
            self.inverse_norms.copy_(norms)

    def _store_reverse(self, reverse: ReverseIndex | None) -> None:
        self._has_reverse = reverse is not None
        if reverse is not None:
            self.entries.copy_(reverse.entries)
            self.starts.copy_(reverse.starts)

    def renewed(self, due: Due, key: Key) -> None:
        """A captured CUDA graph has derived what was due."""
        self.key = key
        if due == "lists":
            self.age = 0  # the graph has written `saved_age`

    def loaded(self, codebook: tuple[int, ...], device: torch.device) -> None:
        """After a load: go on with the lists of a checkpoint, if it has any that are not due."""
        for name, buffer in self._buffers.items():
            if buffer is not None and buffer.is_meta and device.type != "meta":
                # `load_state_dict(assign=True)` leaves there what is not saved.
                self._buffers[name] = torch.zeros_like(buffer, device=device)
        if self.lifetime > 1 and not self.saved_age.is_meta:
            self.age = int(self.saved_age)
            if self.age < self.lifetime:
                self._has_reverse = False
                self.key = Key(-1, codebook, ())  # norms are not saved


def _before_load(module: torch.nn.Module, *_: Any) -> None:
    assert isinstance(module, ListCache)
    module.expire()  # a checkpoint without lists leaves none
