"""What swapped layers say of themselves."""

from __future__ import annotations

import warnings


class Notice:
    """One sentence per swapped model, however many of its layers would say it."""

    def __init__(self, sentence: str) -> None:
        self.sentence, self.given = sentence, False

    def give(self) -> None:
        if not self.given:
            self.given = True
            warnings.warn(self.sentence, stacklevel=3)
