"""The hidden states that routers see, sampled while a model reads some text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from airmoe.distributed import all_reduce_sum, is_distributed
from airmoe.errors import ConfigError
from airmoe.moe.swap.layers import Layer
from airmoe.moe.swap.trials import over_ranks
from airmoe.routers.tokens import read_tokens

Batch = Tensor | Mapping[str, Any]


class Sample:
    """An even sample of at most `limit` of the rows it was shown, in memory of the CPU."""

    def __init__(self, limit: int, seed: int) -> None:
        self.limit, self.seen = limit, 0
        self._generator = torch.Generator().manual_seed(seed)
        self._rows: list[Tensor] = []
        self._lots: list[Tensor] = []

    def add(self, rows: Tensor) -> None:
        self.seen += rows.shape[0]
        lots = torch.rand(rows.shape[0], generator=self._generator, dtype=torch.float32)
        if self.seen > self.limit:  # most rows of a long text are never copied
            kept = lots.topk(min(self.limit, rows.shape[0])).indices.sort().values
            rows, lots = rows[kept.to(rows.device)], lots[kept]
        self._rows.append(rows.to("cpu", copy=True))
        self._lots.append(lots)
        if sum(part.shape[0] for part in self._rows) > 2 * self.limit:
            self._rows, self._lots = [self.rows()], [self._best_lots()]

    def rows(self) -> Tensor:
        """[n, D], the rows with the largest lots in the order they came."""
        rows, lots = torch.cat(self._rows), torch.cat(self._lots)
        kept = lots.topk(min(self.limit, lots.shape[0])).indices.sort().values
        return rows[kept]

    def _best_lots(self) -> Tensor:
        lots = torch.cat(self._lots)
        return lots[lots.topk(min(self.limit, lots.shape[0])).indices.sort().values]


HELD_OUT = 4  # one batch of so many is kept for measuring


def hold_out(batches: Iterable[Batch]) -> tuple[list[Batch], list[Batch]]:
    """(batches to learn from, batches to measure on): whole texts, or the measure would flatter.

    Every fourth batch is held out, of fewer the last. A single batch is split by its sequences.
    """
    _check_iterable(batches)
    given = list(batches)
    for batch in given:
        _check_batch(batch)
    if len(given) == 1:
        given = _sequences(given[0])
    if not given:
        return [], []
    held_out = range(HELD_OUT - 1, len(given), HELD_OUT) or range(len(given) - 1, len(given))
    learned = [batch for place, batch in enumerate(given) if place not in held_out]
    return learned, [given[place] for place in held_out]


def _sequences(batch: Batch) -> list[Batch]:
    """A batch as batches of one sequence each."""
    ids = batch if isinstance(batch, Tensor) else _sized_like_the_batch(batch)
    count = 1 if ids is None or ids.ndim < 2 else ids.shape[0]
    if count < 2:
        if is_distributed():  # the other ranks would wait for one that raised; they may have more
            return [batch]
        raise ConfigError(
            "calibrate.batches",
            "a single sequence",
            "must hold two sequences or more, because whole ones are held out for measuring",
            "Pass more text, or the same in shorter sequences.",
        )

    def part(value: Any, row: int) -> Any:
        cut = isinstance(value, Tensor) and value.ndim >= 2 and value.shape[0] == count
        return value[row : row + 1] if cut else value

    if isinstance(batch, Tensor):
        return [part(batch, row) for row in range(count)]
    return [{name: part(v, row) for name, v in batch.items()} for row in range(count)]


def _sized_like_the_batch(inputs: Mapping[str, Any]) -> Tensor | None:
    """`input_ids`, or else the first tensor with two dimensions or more."""
    tensors = [value for value in inputs.values() if isinstance(value, Tensor) and value.ndim >= 2]
    ids = inputs.get("input_ids")
    return ids if isinstance(ids, Tensor) else next(iter(tensors), None)


def collect(
    model: nn.Module, layers: Sequence[Layer], batches: Sequence[Batch], limit: int, seed: int
) -> list[Tensor]:
    """Run the model over the batches, without gradients; one sample [n, D] per layer.

    Padding (0 in `attention_mask`) is left out, and so are states that are not finite.
    """
    samples = [Sample(limit, seed + number) for number in range(len(layers))]
    padding = Padding()
    handles = []
    try:
        for layer, sample in zip(layers, samples, strict=True):
            watch = _watcher(layer, sample, padding)
            handles.append(layer.module.register_forward_pre_hook(watch, with_kwargs=True))
            layer.route_exactly(True)
        with torch.no_grad(), _evaluating(model):
            for batch in batches:
                _run(model, batch, padding)
    finally:
        for layer in layers:
            layer.route_exactly(False)
        for handle in handles:
            handle.remove()
    for layer, sample in zip(layers, samples, strict=True):
        if over_ranks(sample.seen, next(layer.module.parameters()).device) == 0:
            raise ConfigError(
                "calibrate.batches",
                f"no token for {layer.name!r}",
                "must show every router some tokens",
                "Pass a list of id tensors [batch, length] or of dicts of the model's inputs. A "
                "copy that the model does not use (PEFT keeps some) must be merged first.",
            )
    return [
        sample.rows() if sample.seen else next(layer.module.parameters()).new_empty(0, layer.dim)
        for layer, sample in zip(layers, samples, strict=True)
    ]


def _check_iterable(batches: object) -> None:
    """One batch is easily taken for many: a dict would give its keys."""
    iterable = hasattr(batches, "__iter__") or hasattr(batches, "__getitem__")
    if isinstance(batches, Mapping | str) or not iterable:
        raise ConfigError(
            "calibrate.batches",
            type(batches).__name__,
            "must be a list (or other iterable) of batches",
            "For a single batch pass [batch].",
        )


class Padding:
    """Which tokens of the batch being read are real."""

    real: Tensor | None = None  # [B * L] bool


def _check_batch(batch: object) -> None:
    if isinstance(batch, Tensor):
        if batch.ndim != 2 or batch.is_floating_point():
            raise ConfigError(
                "calibrate.batches",
                (tuple(batch.shape), batch.dtype),
                "must hold token ids of shape [batch, length]",
                "Add a batch dimension, or pass a dict of the model's inputs.",
            )
    elif not isinstance(batch, Mapping):
        raise ConfigError(
            "calibrate.batches",
            type(batch).__name__,
            "must hold id tensors or dicts of the model's inputs",
            "Pass, for example, what the tokenizer returns with return_tensors='pt'.",
        )


def _run(model: nn.Module, batch: Batch, padding: Padding) -> Any:
    device = next(model.parameters()).device
    padding.real = None
    if isinstance(batch, Tensor):
        return model(batch.to(device))
    inputs = {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in batch.items()
        if name != "labels"  # a loss is not wanted
    }
    mask = inputs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.ndim == 2:
        padding.real = mask.reshape(-1) != 0
    return model(**inputs)


def next_token_loss(model: nn.Module, batches: Sequence[Batch]) -> float | None:
    """Mean over the tokens of all ranks; None for a model that gives no logits of tokens."""
    padding = Padding()
    total = torch.zeros(3, dtype=torch.float64)  # loss, tokens, batches without logits of tokens
    with torch.no_grad(), _evaluating(model):
        for batch in batches:
            logits = getattr(_run(model, batch, padding), "logits", None)
            ids = batch if isinstance(batch, Tensor) else batch.get("input_ids")
            if not isinstance(ids, Tensor) or not isinstance(logits, Tensor) or logits.ndim != 3:
                total[2] += 1  # all ranks must reach the sum below
                continue
            targets = ids.to(logits.device).clone()
            if padding.real is not None:
                targets[~padding.real.view(targets.shape).to(targets.device)] = -100
            for row, target in zip(logits[:, :-1], targets[:, 1:], strict=True):
                # One sequence at a time: float32 logits of a whole batch may not fit.
                total[0] += F.cross_entropy(row.float(), target, reduction="sum").double().cpu()
            total[1] += (targets[:, 1:] >= 0).sum().cpu()
    loss, tokens, unknown = all_reduce_sum(total.to(next(model.parameters()).device)).tolist()
    return None if unknown else loss / max(tokens, 1)


def _watcher(layer: Layer, sample: Sample, padding: Padding) -> Any:
    def watch(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else next(iter(kwargs.values()))
        hidden = hidden.detach().reshape(-1, layer.dim)
        valid = read_tokens("calibrate", layer.dim, hidden, None).valid
        mask = args[1] if len(args) > 1 else kwargs.get("mask")  # of an AirRouter
        if isinstance(mask, Tensor):
            valid = valid & mask
        real = padding.real
        if real is not None and real.shape == valid.shape:
            valid = valid & real.to(valid.device)
        sample.add(hidden[valid])

    return watch


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, then every module's own flag back."""
    flags = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, flag in flags:
            module.training = flag
