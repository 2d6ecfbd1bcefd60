"""Real text as token states for the demo: the prose inside the running Python, nothing downloaded.

Words become vectors by counting which words stand near each other (positive pointwise mutual
information, then a truncated SVD): nothing is trained. A token's state is its word's vector plus a
fading trace of the words before it. That is no language model, but related words lie close.
"""

from __future__ import annotations

import pydoc_data.topics
import re
import sysconfig
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

NOT_PROSE = {"site-packages", "dist-packages", "test", "tests", "idlelib", "pydoc_data"}
LEAST_COUNT = 10  # rarer words have no usable statistics
WINDOW = 5  # words that count as near
FADING = 0.6  # what is left of the trace one word later
COMMON = 1e-3  # words more frequent than this leave a weaker trace


@dataclass(frozen=True)
class Prose:
    """A text as passages of word ids, and what is needed to turn them into states."""

    words: list[str]  # the vocabulary, most frequent first
    passages: Tensor  # [passages, length] word ids, in a shuffled order
    vectors: Tensor  # [words, D]
    traces: Tensor  # [words] how strongly a word colours those after it

    def states(self, word_ids: Tensor) -> Tensor:
        """Token states of norm sqrt(D): [batch, length] word ids -> [batch, length, D]."""
        own = self.vectors[word_ids]
        traces = own * self.traces[word_ids].unsqueeze(-1)
        mixed = own.clone()
        for distance in range(1, WINDOW):
            mixed[:, distance:] += FADING**distance * traces[:, :-distance]
        return F.normalize(mixed, dim=-1) * own.shape[-1] ** 0.5


def read_prose(dim: int, passage_length: int) -> Prose:
    """The documentation inside this Python: language reference and library docstrings."""
    found = re.findall(r"[a-z]+", _python_prose().lower())
    words = [word for word, count in Counter(found).most_common() if count >= LEAST_COUNT]
    number = {word: i for i, word in enumerate(words)}
    text = torch.tensor([number[word] for word in found if word in number])
    frequency = torch.bincount(text) / text.numel()  # [words]
    vectors = word_vectors(text, len(words), dim)
    vectors = F.normalize(vectors - frequency @ vectors, dim=-1)
    usable = text.numel() // passage_length * passage_length
    passages = text[:usable].view(-1, passage_length)
    passages = passages[torch.randperm(passages.shape[0])]
    return Prose(words, passages, vectors, COMMON / (COMMON + frequency))


def word_vectors(text: Tensor, num_words: int, dim: int) -> Tensor:
    """[words, D]: left singular vectors of the PPMI matrix, scaled by the root of their weight."""
    near = torch.zeros(num_words * num_words)
    for distance in range(1, WINDOW + 1):
        pairs = text[:-distance] * num_words + text[distance:]
        near += torch.bincount(pairs, minlength=near.numel()) / distance
    counts = near.view(num_words, num_words)
    counts = counts + counts.T
    share = counts.sum(0) ** 0.75  # flattened, or rare neighbours would dominate
    share = share / share.sum()
    information = (counts / counts.sum(1, keepdim=True) / share).log()
    left, weight, _ = torch.svd_lowrank(information.clamp_min(0), q=dim)
    return F.normalize(left * weight.sqrt(), dim=-1)


def _python_prose() -> str:
    """Reference topics, then every docstring of the standard library, in a fixed order."""
    parts = [text for _, text in sorted(pydoc_data.topics.topics.items())]
    library = Path(sysconfig.get_path("stdlib"))
    for file in sorted(library.rglob("*.py")):
        if not NOT_PROSE.intersection(file.relative_to(library).parts):
            source = file.read_text(encoding="utf-8", errors="ignore")
            parts += re.findall(r'"""(.*?)"""', source, re.DOTALL)
    return "\n".join(parts)
