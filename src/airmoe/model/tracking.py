"""`track_optimizer` for those whose loop is the Hugging Face Trainer's."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

from airmoe.routers.base import Router
from airmoe.routers.tracking import Tracking, track_optimizer


class TrackOptimizerCallback(TrainerCallback):
    """Tells the routers of each optimizer step: Trainer(..., callbacks=[TrackOptimizerCallback()]).

    The Trainer makes its optimizer when training begins, so nobody can call `track_optimizer`
    before. The connection ends with the training. A model without our routers is left alone.
    """

    def __init__(self) -> None:
        self._tracking: Tracking | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **found: Any) -> None:
        model = found["model"]
        if any(isinstance(module, Router) for module in model.modules()):
            self._tracking = track_optimizer(model, found["optimizer"])

    def on_train_end(self, args: Any, state: Any, control: Any, **found: Any) -> None:
        if self._tracking is not None:
            self._tracking.remove()
            self._tracking = None
