"""A tokenizer for workers, in a file of its own because each of them imports it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence

from airmoe.data import Tokenizer, TokenizerIdentity


class Moody(Tokenizer):
    """Counts letters; some texts are slow, wrong or deadly."""

    identity = TokenizerIdentity("moody", 1000, "", eos_id=0)

    def encode(self, text: str) -> list[int]:
        if text == "slow":
            time.sleep(0.3)
        if text == "wrong":
            raise ValueError("cannot read this")
        if text == "deadly":
            os.kill(os.getpid(), signal.SIGKILL)
        return [len(text), os.getpid() % 1000]

    def decode(self, ids: Sequence[int]) -> str:
        raise NotImplementedError

    def _files(self) -> dict[str, bytes]:
        raise NotImplementedError
