"""What `calibrate` reads: whole batches held out, and samples of the hidden states routers get.

Models run in evaluation mode and without gradients, which `calibrate` sees to.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from airmoe.distributed import all_reduce_sum
from airmoe.errors import ConfigError
from airmoe.routers.routing import read_tokens

Batch = Tensor | Mapping[str, Any]
HELD_OUT = 4  # one batch of so many is kept for measuring


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
        (batch,) = given
        tensors = {k: v for k, v in batch.items() if isinstance(v, Tensor) and v.ndim >= 2}
        count = len(batch.get("input_ids", next(iter(tensors.values())))) if tensors else 0
        cut = {name: value for name, value in tensors.items() if len(value) == count}
        given = [batch | {k: v[row : row + 1] for k, v in cut.items()} for row in range(count)]
    places = range(len(given))
    held_out = places[HELD_OUT - 1 :: HELD_OUT] or places[-1:]
    return [given[n] for n in places if n not in held_out], [given[n] for n in held_out]


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
def changed(routers: Sequence[Any], **values: Sequence[Any]) -> Iterator[None]:
    """Give the routers other attributes inside the block, each its own: `top_k=[2, 2]`."""
    before = [(router, name, getattr(router, name)) for router in routers for name in values]
    try:
        for name, each in values.items():
            for router, value in zip(routers, each, strict=True):
                setattr(router, name, value)
        yield
    finally:
        for router, name, value in before:
            setattr(router, name, value)


class Sample:
    """An even sample of at most `limit` of the rows it was shown, in CPU memory."""

    def __init__(self, like: Tensor, limit: int, seed: int) -> None:
        self.limit = limit
        self._generator = torch.Generator().manual_seed(seed)
        self._parts = [(like.new_empty(0, like.shape[1], device="cpu"), torch.empty(0))]

    def add(self, rows: Tensor) -> None:
        keys = torch.rand(len(rows), generator=self._generator, dtype=torch.float32)
        self._parts.append(self._best(rows, keys))
        if sum(len(keys) for _, keys in self._parts) > 2 * self.limit:
            self.rows()

    def rows(self) -> Tensor:
        """[n, D], those with the largest random keys, in the order they came."""
        self._parts = [self._best(*map(torch.cat, zip(*self._parts, strict=True)))]
        return self._parts[0][0]

    def _best(self, rows: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        kept = keys.topk(min(self.limit, len(keys))).indices.sort().values
        return rows[kept.to(rows.device)].cpu(), keys[kept]


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
    with ExitStack() as until_read:
        for router, sample in zip(routers, samples, strict=True):
            handle = router.register_forward_pre_hook(partial(hook, sample), with_kwargs=True)
            until_read.enter_context(handle)
        until_read.enter_context(changed(routers, shortlist_size=everything))
        for inputs in batches:
            real = _real_tokens(inputs)
            _run(model, inputs)
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
