"""The parts of `calibrate`: hidden states of routers, codebooks fitted to them, and what they keep.

All of it runs in evaluation mode and without gradients, which `calibrate` sees to.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from airmoe.adapt.shortlist_router import ScaledCodebook, ShortlistRouter
from airmoe.distributed import all_reduce_sum, full_tensor
from airmoe.errors import ConfigError
from airmoe.kernels.norms import unit_rows
from airmoe.routers.air import AirRouter
from airmoe.routers.codebook import Codebook
from airmoe.routers.routing import read_tokens

Batch = Tensor | Mapping[str, Any]
HELD_OUT = 4  # one batch of so many is kept for measuring
CHUNK_ELEMENTS = 1 << 23  # of the exact logits held at a time
FEW_EXPERTS = 64  # up to here every size of shortlist is tried


@dataclass(frozen=True)
class Trial:
    """One pair of sizes: means over tokens that the codebook had not seen."""

    num_codewords: int
    shortlist_size: int
    overlap: float  # share of the exact top-K that is still chosen
    mass_recall: float  # share of the exact distribution on the candidates
    bound: float  # what Prop. 1 guarantees of the mass recall
    scored: int  # products per token: with the codewords, then with the candidates


# -- routers with a codebook ----------------------------------------------------------------------


class AirLayer:
    """An AirRouter under the names that calibration uses of a swapped router."""

    keeps_candidates = True

    def __init__(self, router: AirRouter) -> None:
        config = router.config
        self.router, self.codebook, self.full_logits = router, router.codebook, router.full_logits
        self.hidden_dim, self.num_experts, self.top_k = config.dim, config.num_experts, config.top_k
        self.shortlist_size = config.shortlist_size
        self.register_forward_pre_hook = router.register_forward_pre_hook

    @property
    def weight(self) -> Tensor:
        centroids = self.router.centroids
        return unit_rows(centroids) if self.router.config.normalize_centroids else centroids

    def ranking(self, representatives: Tensor) -> Tensor:
        return self.full_logits(representatives).argsort(dim=-1, descending=True, stable=True)

    def masses(self, logits: Tensor) -> Tensor:
        return logits.softmax(-1)

    def select(self, logits: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        best, expert_ids = logits.topk(self.top_k, dim=-1)
        return best.softmax(-1).to(dtype), expert_ids

    def least_shortlist(self, _router: Any) -> int:
        return self.top_k


def find_layers(model: nn.Module) -> dict[str, Any]:
    """Every router of a model that has a codebook, by name."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        if not isinstance(module, ShortlistRouter | AirRouter):
            continue
        if any(tensor.is_meta for tensor in module.state_dict().values()):
            rule = "must have the weights of its routers in memory"
            remedy = "Load the model without offloading it to CPU or disk, then calibrate."
            raise ConfigError("calibrate.model", f"{name!r} on the meta device", rule, remedy)
        found[name] = AirLayer(module) if isinstance(module, AirRouter) else module
    if not found:
        rule = "must have routers with a codebook"
        remedy = "Call airmoe.swap_routers or airmoe.swap_ffn first."
        raise ConfigError("calibrate.model", type(model).__name__, rule, remedy)
    return found


# -- running the model ----------------------------------------------------------------------------


def hold_out(batches: Iterable[Batch]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(batches to learn from, batches to measure on), as inputs of the model.

    Every fourth batch is held out, of fewer the last; a single batch is split by its sequences.
    Whole texts, because tokens of a text that was learned from would flatter the measure.
    """
    # One batch is easily taken for many: a dict would give its keys, a tensor its rows.
    single = isinstance(batches, Mapping | str) or (
        isinstance(batches, Tensor) and batches.ndim < 3
    )
    if single or not (hasattr(batches, "__iter__") or hasattr(batches, "__getitem__")):
        rule = "must be a list (or other iterable) of batches"
        remedy = "For a single batch pass [batch]."
        raise ConfigError("calibrate.batches", type(batches).__name__, rule, remedy)
    given = [_inputs(batch) for batch in batches]
    if len(given) == 1:
        tensors = [v for v in given[0].values() if isinstance(v, Tensor) and v.ndim >= 2]
        count = len(given[0].get("input_ids", tensors[0])) if tensors else 0
        given = [
            {name: v[row : row + 1] if _has_rows(v, count) else v for name, v in given[0].items()}
            for row in range(count)
        ]
    places = range(len(given))
    held_out = places[HELD_OUT - 1 :: HELD_OUT] or places[-1:]
    return [given[n] for n in places if n not in held_out], [given[n] for n in held_out]


def _has_rows(value: Any, count: int) -> bool:
    return isinstance(value, Tensor) and value.ndim >= 2 and len(value) == count


def _inputs(batch: Any) -> dict[str, Any]:
    """A batch as keyword arguments of the model, without labels: no loss is wanted."""
    if isinstance(batch, Mapping):
        return {name: value for name, value in batch.items() if name != "labels"}
    if not isinstance(batch, Tensor):
        rule = "must hold id tensors or dicts of the model's inputs"
        remedy = "Pass, for example, what the tokenizer returns with return_tensors='pt'."
        raise ConfigError("calibrate.batches", type(batch).__name__, rule, remedy)
    if batch.ndim != 2 or batch.is_floating_point():
        rule = "must hold token ids of shape [batch, length]"
        remedy = "Add a batch dimension, or pass a dict of the model's inputs."
        raise ConfigError("calibrate.batches", (tuple(batch.shape), batch.dtype), rule, remedy)
    return {"input_ids": batch}


def _run(model: nn.Module, inputs: dict[str, Any]) -> Any:
    device = next(model.parameters()).device
    if inputs.keys() == {"input_ids"}:
        return model(inputs["input_ids"].to(device))  # whatever the model calls them
    return model(**{k: v.to(device) if isinstance(v, Tensor) else v for k, v in inputs.items()})


def _real_tokens(inputs: dict[str, Any]) -> Tensor | None:
    """[B, L] bool, False for padding."""
    mask = inputs.get("attention_mask")
    return mask != 0 if isinstance(mask, Tensor) and mask.ndim == 2 else None


@contextmanager
def changed(routers: Iterable[Any], **values: Sequence[Any]) -> Iterator[None]:
    """Give the routers other attributes inside the block, each its own: `top_k=[2, 2]`."""
    routers = list(routers)
    before = {name: [getattr(router, name) for router in routers] for name in values}

    def give(values: Mapping[str, Sequence[Any]]) -> None:
        for name, each in values.items():
            for router, value in zip(routers, each, strict=True):
                setattr(router, name, value)

    try:
        give(values)
        yield
    finally:
        give(before)


class Sample:
    """An even sample of at most `limit` of the rows it was shown, in CPU memory."""

    def __init__(self, like: Tensor, limit: int, seed: int) -> None:
        self.limit = limit
        self._generator = torch.Generator().manual_seed(seed)
        self._parts = [(like.new_empty(0, like.shape[1], device="cpu"), torch.empty(0))]

    def add(self, rows: Tensor) -> None:
        keys = torch.rand(len(rows), generator=self._generator, dtype=torch.float32)
        kept = _largest(keys, self.limit)
        self._parts.append((rows[kept.to(rows.device)].cpu(), keys[kept]))
        if sum(len(keys) for _, keys in self._parts) > 2 * self.limit:
            self._parts = [self._best()]

    def rows(self) -> Tensor:
        """[n, D], those with the largest random keys, in the order they came."""
        return self._best()[0]

    def _best(self) -> tuple[Tensor, Tensor]:
        rows, keys = (torch.cat(parts) for parts in zip(*self._parts, strict=True))
        kept = _largest(keys, self.limit)
        return rows[kept], keys[kept]


def _largest(keys: Tensor, limit: int) -> Tensor:
    """Places of the `limit` largest keys, ascending."""
    return keys.topk(min(limit, len(keys))).indices.sort().values


def collect(
    model: nn.Module,
    routers: Sequence[Any],
    batches: Sequence[dict[str, Any]],
    limit: int,
    seed: int,
) -> list[Tensor]:
    """Hidden states [n, D] that each router gets, at most `limit`, in CPU memory.

    Swapped routers score every expert meanwhile. Padding (0 in `attention_mask`, or masked by the
    layer around the router) is left out, and so are states that are not finite.
    """
    samples = [Sample(router.weight, limit, seed + n) for n, router in enumerate(routers)]
    real: Tensor | None = None

    def hook(sample: Sample, _router: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else next(iter(kwargs.values()))
        hidden = hidden.reshape(-1, hidden.shape[-1])
        mask = args[1] if len(args) > 1 else kwargs.get("mask")  # of an AirRouter
        valid = read_tokens("calibrate", hidden.shape[-1], hidden, mask).valid
        if real is not None and real.numel() == valid.numel():
            valid = valid & real.flatten().to(valid.device)
        sample.add(hidden[valid])

    everything = [router.num_experts for router in routers]
    handles = [
        router.register_forward_pre_hook(partial(hook, sample), with_kwargs=True)
        for router, sample in zip(routers, samples, strict=True)
    ]
    try:
        with changed(routers, shortlist_size=everything):
            for inputs in batches:
                real = _real_tokens(inputs)
                _run(model, inputs)
    finally:
        for handle in handles:
            handle.remove()
    return [sample.rows() for sample in samples]


def next_token_loss(model: nn.Module, batches: Sequence[dict[str, Any]]) -> float | None:
    """Mean over the tokens of all ranks; None for a model that gives no logits of tokens."""
    device = next(model.parameters()).device
    total = torch.zeros(3, dtype=torch.float64, device=device)  # loss, tokens, unknown batches
    for inputs in batches:
        logits, ids = getattr(_run(model, inputs), "logits", None), inputs.get("input_ids")
        if ids is None or logits is None or logits.ndim != 3 or logits.shape[-1] <= ids.max():
            total[2] += 1  # logits of something else; all ranks must reach the sum below
            continue
        real = _real_tokens(inputs)
        targets = ids if real is None else ids.masked_fill(~real, -100)
        targets = targets[:, 1:].to(logits.device)
        for row, target in zip(logits[:, :-1], targets, strict=True):
            # One sequence at a time: float32 logits of a whole batch may not fit.
            total[0] += F.cross_entropy(row.float(), target, reduction="sum")
        total[1] += (targets >= 0).sum()
    loss, tokens, unknown = all_reduce_sum(total).tolist()
    return None if unknown else loss / max(tokens, 1)


# -- fit and measure ------------------------------------------------------------------------------


def fit(router: Any, hidden: Tensor, num_codewords: int, passes: int, seed: int) -> Codebook:
    """A codebook of the router's kind, by k-means on hidden [T, D]: an update is a whole pass."""
    scaled, dim = isinstance(router.codebook, ScaledCodebook), hidden.shape[1]
    with torch.random.fork_rng(devices=[]), torch.device(hidden.device):
        torch.manual_seed(seed)
        if scaled:
            codebook = ScaledCodebook(num_codewords, dim)
        else:
            codebook = Codebook(num_codewords, dim, router.codebook.kind, decay=0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its advice is about micro-batches of training
        for _ in range(passes):
            codebook.update(hidden)
    if isinstance(codebook, ScaledCodebook):
        codebook.measure_scales(hidden)
    return codebook


def measure(router: Any, codebook: Codebook, hidden: Tensor, sizes: Sequence[int]) -> list[Trial]:
    """What shortlists of every size keep, as means over tokens [T, D] of all ranks.

    The bound is Prop. 1's. Near its codeword's token r a token h has logits within |w| |h - r| of
    those of r, and both softmax and sigmoid turn that into at most this factor of what the
    shortlist keeps of r's own distribution: exp(-2 |w| |h - r|).
    """
    experts, codeword_ids = router.num_experts, codebook.nearest(hidden)
    near = codebook.codewords
    if isinstance(codebook, ScaledCodebook):
        near = codebook.representatives()
    norm = full_tensor(router.weight).to(torch.promote_types(hidden.dtype, torch.float32))
    norm = norm.norm(dim=1).max()
    overlaps = torch.zeros(len(sizes), dtype=torch.float64, device=hidden.device)
    masses, bounds = (overlaps.new_zeros(experts) for _ in range(2))  # by rank
    # Chunks of tokens with the same codewords need few rankings at a time.
    for rows in codeword_ids.argsort(stable=True).split(max(1, CHUNK_ELEMENTS // experts)):
        used, places = codeword_ids[rows].unique(return_inverse=True)
        order = router.ranking(near[used])  # [g, E] ids; the first M are the shortlist
        ranks = order.argsort(-1)[places]  # [t, E] each expert's place in that order
        logits = router.full_logits(hidden[rows])  # [t, E]
        masses += router.masses(logits).gather(1, order[places]).double().sum(0)
        error = (hidden[rows].to(logits.dtype) - near[used][places]).norm(dim=1)  # [t]
        factor = (-2 * norm * error).exp().double()
        own = router.masses(router.full_logits(near[used])).gather(1, order).double()  # [g, E]
        bounds += factor @ own[places]
        overlaps += _found(router, logits, ranks, sizes).double() / router.top_k
    count = overlaps.new_tensor([len(hidden)])
    means = all_reduce_sum(torch.cat([count, overlaps, masses.cumsum(0), bounds.cumsum(0)]))
    means = means[1:] / means[0]
    overlaps, kept, kept_surely = means.split([len(sizes), experts, experts])
    kept[-1] = 1.0  # whatever rounding says
    return [
        Trial(
            num_codewords=codebook.num_codewords,
            shortlist_size=size,
            overlap=float(overlap),
            mass_recall=float(kept[size - 1]),
            bound=float(kept_surely[size - 1]),
            # Where the shortlist holds every expert, no codeword is compared.
            scored=experts if size == experts else codebook.num_codewords + size,
        )
        for size, overlap in zip(sizes, overlaps, strict=True)
    ]


def _found(router: Any, logits: Tensor, ranks: Tensor, sizes: Sequence[int]) -> Tensor:
    """How many of the exact choices shortlists of each size keep: [t, E] twice -> [sizes]."""
    exact = router.select(logits, logits.dtype)[1]  # [t, K]
    if router.keeps_candidates:
        places = ranks.gather(1, exact)
        return torch.stack([(places < size).sum() for size in sizes])
    right = torch.zeros_like(ranks, dtype=torch.bool).scatter_(1, exact, True)
    found = []
    for size in sizes:
        short = logits.masked_fill(ranks >= size, -torch.inf)
        found.append(right.gather(1, router.select(short, logits.dtype)[1]).sum())
    return torch.stack(found)


def sizes_to_try(router: Any) -> list[int]:
    """Shortlist sizes: all where experts are few, else growing by a factor of sqrt(2)."""
    least = min(router.least_shortlist(router), router.num_experts)
    if router.num_experts <= FEW_EXPERTS:
        return [*range(least, router.num_experts + 1)]
    sizes, size = {router.shortlist_size, router.num_experts}, float(least)
    while size < router.num_experts:
        sizes.add(round(size))
        size *= 2**0.5
    return sorted(sizes)


def codewords_to_try(now: int, num_tokens: int) -> list[int]:
    """A quarter, half and twice as many codewords as now, where there are tokens for them."""
    others = {max(1, now // 4), max(1, now // 2), 2 * now}
    return sorted({now, *(count for count in others if 4 * count <= num_tokens)})
