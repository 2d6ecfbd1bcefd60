"""What each rank does. `rank = None` is the single process that sees the concatenated batch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import airmoe
from airmoe import AirRouter, GranularExperts, MoELayer
from airmoe.distributed import full_tensor
from tests.state.common import plain_shortlists, snapshot

Join = Callable[[], None]
DIM, CODEWORDS, STEPS = 8, 12, 20


def tokens(step: int, count: int, clusters: int = 3) -> Tensor:
    """A global batch around a few directions, so that most codewords die."""
    generator = torch.Generator().manual_seed(100 + step)
    centers = torch.randn(clusters, DIM, generator=torch.Generator().manual_seed(1))
    which = torch.randint(clusters, (count,), generator=generator)
    return 3 * centers[which] + 0.4 * torch.randn(count, DIM, generator=generator)


def share(global_batch: Tensor, rank: int | None, sizes: tuple[int, int]) -> Tensor:
    """This rank's part of a batch that is divided unevenly."""
    return global_batch if rank is None else global_batch.split(list(sizes))[rank]


def air(seed: int, **options: Any) -> AirRouter:
    torch.manual_seed(seed)
    sizes = {"dim": DIM, "num_experts": 40, "top_k": 4, "shortlist_size": 10}
    router = AirRouter.Config(**{**sizes, "num_codewords": 4, **options}).build()
    assert isinstance(router, AirRouter)
    return router


# -- codebooks ----------------------------------------------------------------------------------


def learn(rank: int | None, join: Join, *, kind: str) -> list[dict[str, Tensor]]:
    """Ranks of different seeds, group created after the router, 20 uneven batches."""
    router = air(
        seed=rank or 0,
        codebook=kind,
        num_codewords=CODEWORDS,
        dead_below=3.0,
        codebook_decay=0.8,
        jitter_std=0.0,
    )
    join()
    states = []
    for step in range(STEPS):
        router.observe(share(tokens(step, 41), rank, (24, 17)))
        states.append(snapshot(router.codebook))
    return states


def learn_with_empty_ranks(rank: int | None, join: Join) -> list[dict[str, Tensor]]:
    """Ranks without tokens, with padding only, or with NaN only, the first batch included."""
    router = air(seed=rank or 0, num_codewords=CODEWORDS, dead_below=1.5, jitter_std=0.0)
    join()
    states = []
    for step, sizes in enumerate([(0, 30), (30, 0), (20, 10), (0, 30), (0, 0), (11, 19)]):
        hidden = share(tokens(step, sum(sizes)), rank, sizes)
        if hidden.shape[0] or rank is None:
            router.observe(hidden)
        elif step == 1:  # a rank may also be full of padding or of rubbish
            router.observe(torch.randn(9, DIM), torch.zeros(9, dtype=torch.bool))
        elif step == 3:
            router.observe(torch.full((5, DIM), torch.nan))
        else:
            router.observe(hidden)
        states.append(snapshot(router.codebook) | {"micro": router.micro_batches.clone()})
    return states


# -- layers -------------------------------------------------------------------------------------


def model(seed: int, **options: Any) -> nn.Sequential:
    router = air(seed, dead_below=0.5, **options)
    layer = MoELayer(router, GranularExperts(40, DIM))
    return nn.Sequential(nn.Linear(DIM, DIM), layer, nn.Linear(DIM, DIM))


def loss_of(output: Tensor, total: int, world: int) -> Tensor:
    """Scaled so that the mean over ranks (what DDP forms) is the mean over the global batch."""
    return output.pow(3).sum() * world / total


SIZES = [(16, 16), (20, 12), (32, 0), (0, 32)]


def train_ddp(rank: int | None, join: Join) -> list[dict[str, Tensor]]:
    """Gradients, parameters and codebook of every step; some ranks are empty at times."""
    net = model(seed=rank or 0, jitter_std=0.0)
    join()
    wrapped: nn.Module = net
    if rank is not None:
        wrapped = DistributedDataParallel(net, broadcast_buffers=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02)
    airmoe.track_optimizer(net, optimizer)
    layer: Any = net[1]
    states = []
    for step, sizes in enumerate(SIZES):
        hidden = share(tokens(step, 32, clusters=9), rank, sizes).unsqueeze(0)
        loss_of(wrapped(hidden), 32, 1 if rank is None else 2).backward()
        grads = {
            f"{n}.grad": p.grad.clone() for n, p in net.named_parameters() if p.grad is not None
        }
        lists = {"lists": layer.router.shortlists().clone()}
        states.append(grads | lists | snapshot(layer.router.codebook))
        optimizer.step()
        optimizer.zero_grad()
    return states


def train_fsdp(rank: int | None, join: Join) -> list[dict[str, Tensor]]:
    """The same under FSDP2, where the centroids are sharded outside forward."""
    net = model(seed=0, jitter_std=0.0)
    join()
    layer = net[1]
    assert isinstance(layer, MoELayer)
    router = layer.router
    assert isinstance(router, AirRouter)
    if rank is not None:
        mesh = init_device_mesh("cpu", (2,))
        for module in net:
            fully_shard(module, mesh=mesh)
        fully_shard(net, mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    airmoe.track_optimizer(net, optimizer)
    states = []
    for step in range(3):
        net.train()
        hidden = share(tokens(step, 32, clusters=9), rank, (16, 16)).unsqueeze(0)
        output = net(hidden)
        lists = {"lists": router.training_lists.experts.clone()}
        lists["expected"] = plain_shortlists(router)
        loss_of(output, 32, 1 if rank is None else 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        net.eval()
        lists["outside"] = router.shortlists().clone()  # the centroids are sharded here
        with torch.no_grad():
            evaluated = net(tokens(90, 8).unsqueeze(0))
        lists["evaluation"] = router.evaluation_lists.experts.clone()
        lists["expected_evaluation"] = plain_shortlists(router)
        parameters = {n: full_tensor(p).detach().clone() for n, p in net.named_parameters()}
        states.append(
            parameters | lists | snapshot(router.codebook) | {"evaluated": evaluated.clone()}
        )
    return states


# -- noise --------------------------------------------------------------------------------------


def draw_noise(rank: int | None, join: Join, *, seed_offset: int) -> dict[str, Tensor]:
    """The same tokens, parameters and counters on both ranks: what still differs is noise."""
    router = air(seed=(rank or 0) * seed_offset, jitter_std=1.0, dead_below=0.0)
    join()
    torch.manual_seed(3)
    with torch.no_grad():
        router.centroids.normal_()
    router.on_parameters_changed()
    hidden = tokens(0, 24, clusters=9)
    router.observe(hidden)
    calm = plain_shortlists(router)
    scores = router(hidden).to_token_routing()
    return {
        "lists": router.shortlists().clone(),
        "calm": calm,
        "experts": scores.expert_ids,
        "weights": scores.weights.detach(),
        "seed": router.noise_seed.clone(),
    }


def frozen_noise(rank: int | None, join: Join) -> dict[str, Tensor]:
    """A codebook loaded equally and frozen, in routers built with different seeds."""
    router = air(seed=7, jitter_std=1.0)
    router.codebook.update(tokens(0, 24))
    loaded = router.codebook.state_dict()
    centroids = router.centroids.detach()
    router = air(seed=rank or 0, jitter_std=1.0)
    router.codebook.load_state_dict(loaded)
    router.freeze_codebook()
    with torch.no_grad():
        router.centroids.copy_(centroids)
    router.on_parameters_changed()
    join()
    router.observe(tokens(1, 24))
    return {"lists": router.shortlists().clone()}


SCENARIOS = {
    "learn_spherical": partial(learn, kind="spherical"),
    "learn_euclidean": partial(learn, kind="euclidean"),
    "learn_static": partial(learn, kind="static"),
    "learn_with_empty_ranks": learn_with_empty_ranks,
    "train_ddp": train_ddp,
    "train_fsdp": train_fsdp,
    "noise_same_seed": partial(draw_noise, seed_offset=0),
    "noise_other_seed": partial(draw_noise, seed_offset=1),
    "frozen_noise": frozen_noise,
}
