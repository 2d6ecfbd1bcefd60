"""The parts of `calibrate`: hidden states of routers, codebooks fitted to them, and what they keep.

All of it runs in evaluation mode and without gradients, which `calibrate` sees to.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from airmoe.adapt.shortlist_router import ScaledCodebook
from airmoe.distributed import all_reduce_sum, full_tensor
from airmoe.errors import ConfigError

Batch = Tensor | Mapping[str, Any]
HELD_OUT = 4  # one batch of so many is kept for measuring


@dataclass(frozen=True)
class Trial:
    """One pair of sizes: means over tokens that the codebook had not seen."""

    num_codewords: int
    shortlist_size: int
    overlap: float  # share of the exact top-K that is still chosen
    mass_recall: float  # share of the exact distribution on the candidates
    bound: float  # what Prop. 1 guarantees of the mass recall
    scored: int  # products per token: with the codewords, then with the candidates


# -- running the model ----------------------------------------------------------------------------


def hold_out(batches: Iterable[Batch]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(batches to learn from, batches to measure on), as inputs of the model.

    Every fourth batch is held out, of fewer the last; a single batch is split by its sequences.
    Whole texts, because tokens of a text that was learned from would flatter the measure.
    """
    # One batch is easily taken for many: a dict would give its keys, a tensor its rows.
    if isinstance(batches, Mapping | str | Tensor) or not isinstance(batches, Iterable):
        rule = "must be a list (or other iterable) of batches"
        remedy = "For a single batch pass [batch]."
        raise ConfigError("calibrate.batches", type(batches).__name__, rule, remedy)
    given = [_inputs(batch) for batch in batches]
    if len(given) == 1:
        count = max((len(v) for v in given[0].values() if isinstance(v, Tensor)), default=0)
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


def collect(
    model: nn.Module,
    routers: Sequence[Any],
    batches: Sequence[dict[str, Any]],
    limit: int,
    seed: int,
) -> list[Tensor]:
    """Hidden states [n, D] of every router, in CPU memory: at most `limit`, of all batches alike.

    Padding (0 in `attention_mask`) is left out, and so are states that are not finite.
    """
    kept = [[torch.empty(0, router.hidden_dim, dtype=router.weight.dtype)] for router in routers]
    share = -(-limit // max(1, len(batches)))
    generator = torch.Generator().manual_seed(seed)
    real: Tensor | None = None

    def hook(router: Any, args: tuple[Any, ...]) -> None:
        hidden = args[0].reshape(-1, router.hidden_dim)
        valid = hidden.isfinite().all(-1)
        if real is not None:
            valid &= real.flatten().to(valid.device)
        rows = valid.nonzero().squeeze(1)
        keys = torch.rand(len(rows), generator=generator, dtype=torch.float32)
        drawn = keys.topk(min(share, len(rows))).indices.sort().values
        kept[routers.index(router)].append(hidden[rows[drawn.to(rows.device)]].cpu())

    everything = [router.num_experts for router in routers]
    handles = [router.register_forward_pre_hook(hook) for router in routers]
    try:
        with changed(routers, shortlist_size=everything):
            for inputs in batches:
                real = _real_tokens(inputs)
                _run(model, inputs)
    finally:
        for handle in handles:
            handle.remove()
    return [torch.cat(parts)[:limit] for parts in kept]


def next_token_loss(model: nn.Module, batches: Sequence[dict[str, Any]]) -> float | None:
    """Mean over the tokens of all ranks; None for a model that gives no logits of tokens."""
    total = torch.zeros(2, dtype=torch.float64, device=next(model.parameters()).device)
    for inputs in batches:
        logits, ids = getattr(_run(model, inputs), "logits", None), inputs.get("input_ids")
        if ids is None or logits is None or logits.ndim != 3:
            return None
        real = _real_tokens(inputs)
        targets = ids if real is None else ids.masked_fill(~real, -100)
        targets = targets[:, 1:].to(logits.device)
        for row, target in zip(logits[:, :-1], targets, strict=True):
            # One sequence at a time: float32 logits of a whole batch may not fit.
            total[0] += F.cross_entropy(row.float(), target, reduction="sum")
        total[1] += (targets >= 0).sum()
    loss, tokens = all_reduce_sum(total).tolist()
    return loss / max(tokens, 1)


# -- fit and measure ------------------------------------------------------------------------------


def fit(hidden: Tensor, num_codewords: int, passes: int, seed: int) -> ScaledCodebook:
    """k-means on hidden [T, D]: each update of the codebook is a whole pass."""
    with torch.random.fork_rng(devices=[]), torch.device(hidden.device):
        torch.manual_seed(seed)
        codebook = ScaledCodebook(num_codewords, hidden.shape[1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its advice is about micro-batches of training
        for _ in range(passes):
            codebook.update(hidden)
    codebook.measure_scales(hidden)
    return codebook


def measure(
    router: Any, codebook: ScaledCodebook, hidden: Tensor, sizes: Sequence[int]
) -> list[Trial]:
    """What shortlists of every size keep, as means over tokens [T, D] of all ranks.

    The bound is Prop. 1's. Near its codeword's token r a token h has logits within |w| |h - r| of
    those of r, and both softmax and sigmoid turn that into at most this factor of what the
    shortlist keeps of r's own distribution: exp(-2 |w| |h - r|).
    """
    near, codeword_ids = codebook.representatives(), codebook.nearest(hidden)
    order = router.ranking(near)[codeword_ids]  # [T, E] ids; the first M are the shortlist
    ranks = order.argsort(-1)  # [T, E] places in that order
    logits = router.full_logits(hidden)  # [T, E]
    masses = router.masses(logits).gather(1, order).double()  # [T, E] by rank
    own = router.masses(router.full_logits(near))[codeword_ids].gather(1, order).double()
    weight = full_tensor(router.weight).to(logits.dtype)
    error = (hidden.to(logits.dtype) - near[codeword_ids]).norm(dim=1)  # [T]
    factor = (-2 * weight.norm(dim=1).max() * error).exp().double()
    right = torch.zeros_like(ranks, dtype=torch.bool)
    right.scatter_(1, router.select(logits, logits.dtype)[1], True)
    found = []
    for size in sizes:
        short = logits.masked_fill(ranks >= size, -torch.inf)
        chosen = router.select(short, logits.dtype)[1]
        found.append(right.gather(1, chosen).sum() / router.top_k)
    count = masses.new_tensor([len(hidden)])
    sums = torch.cat([count, torch.stack(found).double(), masses.sum(0), factor @ own])
    means = all_reduce_sum(sums)
    means = means[1:] / means[0]
    overlaps, masses, bounds = means.split([len(sizes), len(weight), len(weight)])
    kept, kept_surely = masses.cumsum(0), bounds.cumsum(0)
    kept[-1] = 1.0  # whatever rounding says
    return [
        Trial(
            num_codewords=codebook.num_codewords,
            shortlist_size=size,
            overlap=float(overlap),
            mass_recall=float(kept[size - 1]),
            bound=float(kept_surely[size - 1]),
            # Where the shortlist holds every expert, no codeword is compared.
            scored=len(weight) if size == len(weight) else codebook.num_codewords + size,
        )
        for size, overlap in zip(sizes, overlaps, strict=True)
    ]


def sizes_to_try(router: Any) -> list[int]:
    """Shortlist sizes: the present one, and from the smallest to all by steps of sqrt(2)."""
    size = float(min(router.least_shortlist(router), router.num_experts))
    sizes = {router.shortlist_size, router.num_experts}
    while size < router.num_experts:
        sizes.add(round(size))
        size *= 2**0.5
    return sorted(sizes)


def codewords_to_try(now: int, num_tokens: int) -> list[int]:
    """A quarter, half and twice as many codewords as now, where there are tokens for them."""
    others = {max(1, now // 4), max(1, now // 2), 2 * now}
    return sorted({now, *(count for count in others if 4 * count <= num_tokens)})
