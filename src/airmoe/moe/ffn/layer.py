"""The layer that takes the place of a dense network, and what it knows of the batch being read."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from airmoe.moe.layer import MoELayer, MoEOutput


class Reading:
    """What a decoder knows of the batch that it is reading, and does not hand to its layers."""

    def __init__(self) -> None:
        self._mask: Tensor | None = None  # [B, positions], those in the cache come first
        self.goes_on = False  # it was given a cache, as whoever writes token by token does

    def __getstate__(self) -> dict[str, object]:
        return vars(Reading())  # a copy of the model reads batches of its own

    def watch(self, decoder: nn.Module) -> None:
        decoder.register_forward_pre_hook(self._note, with_kwargs=True)
        decoder.register_forward_hook(self._forget, always_call=True)

    def mask_of(self, x: Tensor) -> Tensor | None:
        """x [B, L, D] -> [B, L] bool, True for real tokens; None where no mask fits."""
        mask = self._mask
        if mask is None or x.ndim != 3:
            return None
        batch, length, _ = x.shape
        if mask.shape[0] != batch or mask.shape[1] < length:
            return None
        return mask[:, mask.shape[1] - length :].to(x.device) != 0

    def _note(self, _decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
        # Masks of other shapes say who sees whom.
        self._mask = mask if isinstance(mask, Tensor) and mask.ndim == 2 else None
        self.goes_on = kwargs.get("past_key_values", args[3] if len(args) > 3 else None) is not None

    def _forget(self, _decoder: nn.Module, _args: Any, _output: Any) -> None:
        self._mask, self.goes_on = None, False


class SwappedFfn(MoELayer):
    """A MoELayer in the place of a dense network: it leaves padding out, and its router learns
    nothing from what the model is writing.
    """

    reading: Reading | None = None

    def forward_with_routing(
        self, x: Tensor, mask: Tensor | None = None, *, learn: bool = True
    ) -> MoEOutput:
        reading = self.reading
        if reading is not None:
            mask = reading.mask_of(x) if mask is None else mask
            learn = learn and not reading.goes_on
        return super().forward_with_routing(x, mask, learn=learn)


def connect(decoder: nn.Module) -> None:
    """Let all swapped layers of a decoder, also those of earlier calls, share one `Reading`."""
    layers = [module for module in decoder.modules() if isinstance(module, SwappedFfn)]
    known = [layer.reading for layer in layers if layer.reading is not None]
    if not known:
        known = [Reading()]
        known[0].watch(decoder)
    for layer in layers:
        layer.reading = known[0]
