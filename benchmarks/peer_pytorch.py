"""PyPI's PEER-pytorch with the selection of the PEER paper (a benchmark-only dependency)."""

from __future__ import annotations

from importlib.util import find_spec

from torch import Tensor, nn

INSTALL_HINT = (
    "PEER-pytorch is not installed. It is needed for this comparison only: "
    "pip install -c constraints/cpu.txt 'airmoe[bench]'"
)


class MissingPackageError(RuntimeError):
    """A contender's package is not there; the message says how to get it."""


class PeerPytorch(nn.Module):
    """PEER_pytorch.PEER, two matrices with GELU between them; hidden [T, D] -> [T, D].

    `non_competing_scores=False` matters: the package's default takes one expert per head.
    """

    def __init__(self, dim: int, num_experts: int, top_k: int, num_heads: int) -> None:
        super().__init__()
        if find_spec("PEER_pytorch") is None:
            raise MissingPackageError(INSTALL_HINT)
        from PEER_pytorch import PEER

        self.peer = PEER(
            dim,
            heads=num_heads,
            num_experts=num_experts,
            num_experts_per_head=top_k // num_heads,
            non_competing_scores=False,
        )

    def forward(self, hidden: Tensor) -> Tensor:
        return self.peer(hidden.unsqueeze(0)).squeeze(0)

    def forward_with_ids(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """(output, expert ids [T, heads, K / heads]) as the package itself looks them up."""
        seen: list[Tensor] = []
        handle = self.peer.weight_down_embed.register_forward_pre_hook(
            lambda _module, inputs: seen.append(inputs[0])
        )
        try:
            output = self.forward(hidden)
        finally:
            handle.remove()
        (ids,) = seen
        return output, ids.squeeze(0)
