"""The layer that takes the place of a dense feed-forward network in another library's decoder."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from airmoe.moe import MoELayer, MoEOutput


class DecoderInputs:
    """The padding mask and cache of the current forward, which decoders don't pass to their layers.

    Hooks on the decoder set both before its forward and clear them after it.
    """

    def __init__(self) -> None:
        self._mask: Tensor | None = None  # [B, positions], those in the cache come first
        self.has_cache = False  # the model is generating token by token

    def __getstate__(self) -> dict[str, object]:
        return vars(DecoderInputs())  # a copy of the model has inputs of its own

    def watch(self, decoder: nn.Module) -> None:
        decoder.register_forward_pre_hook(self._set, with_kwargs=True)
        decoder.register_forward_hook(self._clear, always_call=True)

    def mask_of(self, x: Tensor) -> Tensor | None:
        """x [B, L, D] -> [B, L] bool, True for real tokens; None where no mask fits."""
        mask = self._mask
        if mask is None or x.ndim != 3:
            return None
        batch, length, _ = x.shape
        if mask.shape[0] != batch or mask.shape[1] < length:
            return None
        return mask[:, mask.shape[1] - length :].to(x.device) != 0

    def _set(self, _decoder: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
        # Masks with more dimensions say which token attends to which.
        self._mask = mask if isinstance(mask, Tensor) and mask.ndim == 2 else None
        cache = kwargs.get("past_key_values", args[3] if len(args) > 3 else None)
        self.has_cache = cache is not None

    def _clear(self, _decoder: nn.Module, _args: Any, _output: Any) -> None:
        self._mask, self.has_cache = None, False


class SwappedFfn(MoELayer):
    """A MoELayer that leaves padding out and doesn't learn from text the model generates."""

    inputs: DecoderInputs | None = None

    def forward_with_routing(
        self, x: Tensor, mask: Tensor | None = None, *, learn: bool = True
    ) -> MoEOutput:
        inputs = self.inputs
        if inputs is not None:
            mask = inputs.mask_of(x) if mask is None else mask
            learn = learn and not inputs.has_cache
        return super().forward_with_routing(x, mask, learn=learn)


def share_inputs(decoder: nn.Module) -> None:
    """Connect all swapped layers of a decoder, also those of earlier calls, to its inputs."""
    layers = [module for module in decoder.modules() if isinstance(module, SwappedFfn)]
    known = [layer.inputs for layer in layers if layer.inputs is not None]
    if not known:
        known = [DecoderInputs()]
        known[0].watch(decoder)
    for layer in layers:
        layer.inputs = known[0]
