"""The hidden states that routers get, sampled while a model reads some text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from airmoe.adapt.fitting import CalibratedLayer, sum_over_ranks
from airmoe.distributed import all_reduce_sum, is_distributed
from airmoe.errors import ConfigError
from airmoe.routers.routing import read_tokens

Batch = Tensor | Mapping[str, Any]
HELD_OUT = 4  # one batch of so many is kept for measuring


class Sample:
    """An even sample of at most `limit` of the rows it was shown, in CPU memory."""

    def __init__(self, limit: int, seed: int) -> None:
        self.limit, self.seen = limit, 0
        self._generator = torch.Generator().manual_seed(seed)
        self._parts: list[tuple[Tensor, Tensor]] = []  # rows [n, D], random keys [n]

    def add(self, rows: Tensor) -> None:
        self.seen += rows.shape[0]
        keys = torch.rand(rows.shape[0], generator=self._generator, dtype=torch.float32)
        if self.seen > self.limit:  # most rows of a long text are never copied
            kept = _largest(keys, self.limit)
            rows, keys = rows[kept.to(rows.device)], keys[kept]
        self._parts.append((rows.to("cpu", copy=True), keys))
        if sum(part.shape[0] for part, _ in self._parts) > 2 * self.limit:
            self._parts = [self._best()]

    def rows(self) -> Tensor:
        """[n, D], those with the largest keys in the order they came."""
        return self._best()[0]

    def _best(self) -> tuple[Tensor, Tensor]:
        rows, keys = (torch.cat(parts) for parts in zip(*self._parts, strict=True))
        kept = _largest(keys, self.limit)
        return rows[kept], keys[kept]


def _largest(keys: Tensor, limit: int) -> Tensor:
    """Places of the `limit` largest keys, ascending."""
    return keys.topk(min(limit, keys.shape[0])).indices.sort().values


# -- batches --------------------------------------------------------------------------------------


def hold_out(batches: Iterable[Batch]) -> tuple[list[Batch], list[Batch]]:
    """(batches to learn from, batches to measure on): whole texts, or the measure would flatter.

    Every fourth batch is held out, of fewer the last. A single batch is split by its sequences.
    """
    given = _checked(batches)
    if len(given) == 1:
        given = _sequences(given[0])
    if not given:
        return [], []
    held_out = range(HELD_OUT - 1, len(given), HELD_OUT) or range(len(given) - 1, len(given))
    learned = [batch for place, batch in enumerate(given) if place not in held_out]
    return learned, [given[place] for place in held_out]


def _checked(batches: Any) -> list[Batch]:
    # One batch is easily taken for many: a dict would give its keys.
    iterable = hasattr(batches, "__iter__") or hasattr(batches, "__getitem__")
    if isinstance(batches, Mapping | str) or not iterable:
        rule = "must be a list (or other iterable) of batches"
        remedy = "For a single batch pass [batch]."
        raise ConfigError("calibrate.batches", type(batches).__name__, rule, remedy)
    given = list(batches)
    for batch in given:
        if isinstance(batch, Tensor):
            if batch.ndim != 2 or batch.is_floating_point():
                raise ConfigError(
                    "calibrate.batches",
                    (tuple(batch.shape), batch.dtype),
                    "must hold token ids of shape [batch, length]",
                    "Add a batch dimension, or pass a dict of the model's inputs.",
                )
        elif not isinstance(batch, Mapping):
            rule = "must hold id tensors or dicts of the model's inputs"
            remedy = "Pass, for example, what the tokenizer returns with return_tensors='pt'."
            raise ConfigError("calibrate.batches", type(batch).__name__, rule, remedy)
    return given


def _sequences(batch: Batch) -> list[Batch]:
    """A batch as batches of one sequence each."""
    inputs = {"input_ids": batch} if isinstance(batch, Tensor) else batch
    # The batch size is that of `input_ids`, or else of the first tensor with two dimensions.
    tensors = [value for value in inputs.values() if isinstance(value, Tensor) and value.ndim >= 2]
    ids = inputs.get("input_ids")
    ids = ids if isinstance(ids, Tensor) else next(iter(tensors), None)
    count = 1 if ids is None or ids.ndim < 2 else ids.shape[0]
    if count < 2:
        if is_distributed():  # the other ranks would wait for one that raised; they may have more
            return [batch]
        rule = "must hold two sequences or more, because whole ones are held out for measuring"
        remedy = "Pass more text, or the same in shorter sequences."
        raise ConfigError("calibrate.batches", "a single sequence", rule, remedy)

    def row_of(value: Any, row: int) -> Any:
        has_rows = isinstance(value, Tensor) and value.ndim >= 2 and value.shape[0] == count
        return value[row : row + 1] if has_rows else value

    return [{name: row_of(v, row) for name, v in inputs.items()} for row in range(count)]


# -- reading --------------------------------------------------------------------------------------


class Reader:
    """Runs a model over batches, and knows which tokens of the present one are real."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.device = next(model.parameters()).device
        self.real: Tensor | None = None  # [B, L] bool

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluation mode without gradients, then every module's own flag back."""
        flags = [(module, module.training) for module in self.model.modules()]
        try:
            self.model.eval()
            with torch.no_grad():
                yield
        finally:
            for module, flag in flags:
                module.training = flag

    def run(self, batch: Batch) -> Any:
        self.real = None
        if isinstance(batch, Tensor):
            return self.model(batch.to(self.device))
        inputs = {
            name: value.to(self.device) if isinstance(value, Tensor) else value
            for name, value in batch.items()
            if name != "labels"  # a loss is not wanted
        }
        mask = inputs.get("attention_mask")
        if isinstance(mask, Tensor) and mask.ndim == 2:
            self.real = mask != 0
        return self.model(**inputs)


def collect(
    model: nn.Module,
    layers: Sequence[CalibratedLayer],
    batches: Sequence[Batch],
    limit: int,
    seed: int,
) -> list[Tensor]:
    """Run the model over the batches, without gradients; one sample [n, D] per layer.

    Padding (0 in `attention_mask`) is left out, and so are states that are not finite.
    """
    samples = [Sample(limit, seed + number) for number in range(len(layers))]
    reader, handles = Reader(model), []
    try:
        for layer, sample in zip(layers, samples, strict=True):
            hook = _sampling_hook(layer, sample, reader)
            handles.append(layer.router.register_forward_pre_hook(hook, with_kwargs=True))
            layer.route_exactly(True)
        with reader.evaluating():
            for batch in batches:
                reader.run(batch)
    finally:
        for layer in layers:
            layer.route_exactly(False)
        for handle in handles:
            handle.remove()
    for layer, sample in zip(layers, samples, strict=True):
        if sum_over_ranks(sample.seen, layer.device) == 0:
            raise ConfigError(
                "calibrate.batches",
                f"no token for {layer.name!r}",
                "must show every router some tokens",
                "Pass a list of id tensors [batch, length] or of dicts of the model's inputs. A "
                "copy that the model does not use (PEFT keeps some) must be merged first.",
            )
    return [
        sample.rows() if sample.seen else next(layer.router.parameters()).new_empty(0, layer.dim)
        for layer, sample in zip(layers, samples, strict=True)
    ]


def _sampling_hook(layer: CalibratedLayer, sample: Sample, reader: Reader) -> Any:
    def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else next(iter(kwargs.values()))
        hidden = hidden.detach().reshape(-1, layer.dim)
        valid = read_tokens("calibrate", layer.dim, hidden, None).valid
        mask = args[1] if len(args) > 1 else kwargs.get("mask")  # of an AirRouter
        if isinstance(mask, Tensor):
            valid = valid & mask
        if reader.real is not None and reader.real.numel() == valid.numel():
            valid = valid & reader.real.flatten().to(valid.device)
        sample.add(hidden[valid])

    return hook


def next_token_loss(model: nn.Module, batches: Sequence[Batch]) -> float | None:
    """Mean over the tokens of all ranks; None for a model that gives no logits of tokens."""
    reader = Reader(model)
    total = torch.zeros(3, dtype=torch.float64)  # loss, tokens, batches without logits of tokens
    with reader.evaluating():
        for batch in batches:
            logits = getattr(reader.run(batch), "logits", None)
            ids = batch if isinstance(batch, Tensor) else batch.get("input_ids")
            if not isinstance(ids, Tensor) or not isinstance(logits, Tensor) or logits.ndim != 3:
                total[2] += 1  # all ranks must reach the sum below
                continue
            targets = ids.to(logits.device).clone()
            if reader.real is not None:
                targets[~reader.real.to(targets.device)] = -100
            for row, target in zip(logits[:, :-1], targets[:, 1:], strict=True):
                # One sequence at a time: float32 logits of a whole batch may not fit.
                total[0] += F.cross_entropy(row.float(), target, reduction="sum").double().cpu()
            total[1] += (targets[:, 1:] >= 0).sum().cpu()
    loss, tokens, unknown = all_reduce_sum(total.to(reader.device)).tolist()
    return None if unknown else loss / max(tokens, 1)
