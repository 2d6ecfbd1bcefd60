"""What every contender of a case is given: the same tokens and the same codebook."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from airmoe.errors import ConfigError
from airmoe.experiments.bench.cases import CellSizes, Shape
from airmoe.routers import Codebook

NUM_BATCHES = 4  # steps take turns on them, so that no batch stays in a cache
SPREAD = 0.6  # a token's distance from its codeword's direction: cosine 0.86
CODEBOOK_UPDATES = 20  # where codewords are learned


@dataclass(frozen=True)
class Inputs:
    """Tokens on the device under test."""

    shape: Shape
    seed: int
    batches: list[Tensor]  # [T, D] each, in the dtype of the shape
    cotangent: Tensor  # [T, D] gradient of a loss with respect to the output
    codewords: Tensor  # [G, D] float32, unit norm
    centroids: Tensor | None = None  # [E, D] where they were captured too

    @property
    def device(self) -> torch.device:
        return self.cotangent.device

    def codebook_state(self) -> dict[str, Tensor]:
        """A codebook in the middle of a training, with the cells of the first batch."""
        sizes = cell_sizes(self).float()
        return {
            "codewords": self.codewords,
            "counts": sizes,
            "sums": self.codewords * sizes.unsqueeze(-1),
            "initialized": torch.tensor(True),
            "seed": torch.tensor(self.seed),
            "updates": torch.tensor(CODEBOOK_UPDATES),
        }


@dataclass(frozen=True)
class Captured:
    """Hidden states of a trained model."""

    hidden: Tensor  # [rows, D]
    codewords: Tensor | None  # [G, D]
    centroids: Tensor | None  # [E, D]

    def shape(self, wanted: Shape) -> Shape:
        """The wanted shape with the sizes that the file decides."""
        rows, dim = self.hidden.shape
        groups = wanted.num_codewords if self.codewords is None else self.codewords.shape[0]
        experts = wanted.num_experts if self.centroids is None else self.centroids.shape[0]
        tokens = min(rows, wanted.num_tokens)
        return replace(
            wanted, num_tokens=tokens, dim=dim, num_codewords=groups, num_experts=experts
        )


def read_captured(path: Path) -> Captured:
    """A safetensors file with `hidden` [T, D], and `codewords`, `centroids` if they are known."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    def wrong(rule: str) -> ConfigError:
        remedy = "Write hidden [T, D], and if you like codewords [G, D] and centroids [E, D]."
        return ConfigError("bench.activations", str(path), rule, remedy)

    if not path.is_file():
        raise wrong("must be a safetensors file")
    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise wrong(f"cannot be read ({error})") from error
    if "hidden" not in tensors:
        raise wrong("must hold a tensor `hidden`")
    hidden = tensors["hidden"]
    for name in ("hidden", "codewords", "centroids"):
        tensor = tensors.get(name, hidden)
        if tensor.ndim != 2 or tensor.shape[1] != hidden.shape[-1] or not tensor.numel():
            raise wrong(f"must hold matrices of one width, {name} is {tuple(tensor.shape)}")
        if not tensor.is_floating_point() or not tensor.isfinite().all():
            raise wrong(f"{name} must be finite numbers")
    return Captured(hidden, tensors.get("codewords"), tensors.get("centroids"))


def make_inputs(
    shape: Shape, device: torch.device, seed: int, captured: Captured | None = None
) -> Inputs:
    """Draw clustered tokens, or take captured ones."""
    generator = torch.Generator(device).manual_seed(seed)
    if shape.cells == "captured":
        assert captured is not None
        shape = captured.shape(shape)
    cotangent = torch.randn(shape.num_tokens, shape.dim, generator=generator, device=device)
    cotangent = cotangent.to(shape.torch_dtype)
    if captured is not None and shape.cells == "captured":
        return _captured_inputs(shape, seed, captured, cotangent)
    centres = _directions(shape.num_codewords, shape.dim, generator)
    if shape.cells == "topics":  # in families of four, as many families as codewords: [4 G, D]
        children = _directions(4 * shape.num_codewords, shape.dim, generator)
        centres = F.normalize(centres.repeat_interleave(4, 0) + 0.4 * children, dim=-1)
    shares = popularity(shape.cells, len(centres)).to(device)
    shares = shares[torch.randperm(len(centres), generator=generator, device=device)]

    def draw() -> Tensor:
        """[T, D] around the centres, of norm sqrt(D)."""
        owners = torch.multinomial(shares, shape.num_tokens, replacement=True, generator=generator)
        noise = _directions(shape.num_tokens, shape.dim, generator)
        hidden = F.normalize(centres[owners] + SPREAD * noise, dim=-1) * shape.dim**0.5
        return hidden.to(shape.torch_dtype)

    batches = [draw() for _ in range(NUM_BATCHES)]
    codewords = centres
    if shape.cells == "topics":
        codewords = _learned_codewords(shape, seed, device, lambda _: draw())
    return Inputs(shape, seed, batches, cotangent, codewords)


def _directions(count: int, dim: int, generator: torch.Generator) -> Tensor:
    drawn = torch.randn(count, dim, generator=generator, device=generator.device)
    return F.normalize(drawn, dim=-1)


def popularity(cells: CellSizes, count: int) -> Tensor:
    """How likely a token belongs to each of so many centres.

    "zipf" is 1 / rank with the last sixteenth left empty: of 1,024 cells the largest holds 137
    times the mean. "topics" are milder. A codebook that learns them has, like that of a trained
    model, cells of unequal size and a cosine of about 0.7 between a token and its codeword.
    """
    shares = torch.ones(count)
    if cells == "zipf":
        shares /= torch.arange(1, count + 1)
        shares[count - max(1, count // 16) :] = 0
    if cells == "topics":
        shares /= torch.arange(10, 10 + count).sqrt()
    return shares / shares.sum()


def _captured_inputs(shape: Shape, seed: int, captured: Captured, cotangent: Tensor) -> Inputs:
    """Windows of the captured rows; where there are no more than one, it begins elsewhere."""
    device = cotangent.device
    rows = captured.hidden.to(device, shape.torch_dtype)
    stride = max(1, rows.shape[0] // NUM_BATCHES)
    starts = [number * stride for number in range(NUM_BATCHES)]
    batches = [rows.roll(-start, 0)[: shape.num_tokens].contiguous() for start in starts]
    if captured.codewords is not None:
        codewords = F.normalize(captured.codewords.to(device, torch.float32), dim=-1)
    else:
        codewords = _learned_codewords(shape, seed, device, lambda n: batches[n % NUM_BATCHES])
    centroids = captured.centroids
    if centroids is not None:
        centroids = centroids.to(device, shape.torch_dtype)
    return Inputs(shape, seed, batches, cotangent, codewords, centroids)


def _learned_codewords(
    shape: Shape, seed: int, device: torch.device, batch: Callable[[int], Tensor]
) -> Tensor:
    torch.manual_seed(seed)
    with torch.device(device):
        codebook = Codebook(shape.num_codewords, shape.dim)
    for number in range(CODEBOOK_UPDATES):
        codebook.update(batch(number))
    return codebook.codewords.clone()


def cell_sizes(inputs: Inputs) -> Tensor:
    """[G] tokens of the first batch in each cell."""
    nearest = (inputs.batches[0].float() @ inputs.codewords.T).argmax(-1)
    return torch.bincount(nearest, minlength=inputs.shape.num_codewords)


@dataclass(frozen=True)
class CellSummary:
    """How a batch falls into cells."""

    mean_cosine: float  # of a token to its codeword
    mean_size: float
    largest: int
    empty: int

    def __str__(self) -> str:
        return (
            f"{self.mean_size:.1f} tokens per cell, at most {self.largest:,}, "
            f"{self.empty} cells empty, cosine {self.mean_cosine:.2f}"
        )


def summarize_cells(inputs: Inputs) -> CellSummary:
    sizes = cell_sizes(inputs)
    cosines = F.normalize(inputs.batches[0].float(), dim=-1) @ inputs.codewords.T  # [T, G]
    return CellSummary(
        mean_cosine=cosines.amax(-1).mean().item(),
        mean_size=sizes.float().mean().item(),
        largest=int(sizes.max()),
        empty=int((sizes == 0).sum()),
    )
