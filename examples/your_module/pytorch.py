"""The other side of docs/your_module.md: the same steps in PyTorch.

    torchrun --nproc_per_node 2 pytorch.py FOLDER
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import mse_loss, softplus
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))

    def forward(self, x):
        return x + self.body(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(32, 8)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batches(rank, ranks, count=5):
    for number in range(count):
        torch.manual_seed(1000 + number)
        x = torch.randn(12, 32).chunk(ranks)[rank]
        yield x, x[:, :8].sin() + x[:, 8:16]


def single_process():
    data = list(batches(0, 1))
    # snippet: single
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for x, y in data:
        optimizer.zero_grad()
        loss = mse_loss(net(x), y)
        loss.backward()
        clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
    # end of snippet


def ddp(rank, ranks):
    data = list(batches(rank, ranks))
    # snippet: ddp
    net = DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for x, y in data:
        optimizer.zero_grad()
        loss = mse_loss(net(x), y)
        loss.backward()
        clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
    # end of snippet


def fsdp(rank, ranks, mesh):
    data = list(batches(rank, ranks))
    # snippet: fsdp
    net = Net()
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for x, y in data:
        optimizer.zero_grad()
        loss = mse_loss(net(x), y)
        loss.backward()
        clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
    # end of snippet
    return net, optimizer


def accumulation(rank, ranks, mesh):
    data = list(batches(rank, ranks))
    # snippet: accumulation
    net = Net()
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for x, y in data:
        optimizer.zero_grad()
        parts = list(zip(x.chunk(2), y.chunk(2)))
        for i, (x, y) in enumerate(parts):
            net.set_requires_gradient_sync(i == len(parts) - 1)
            loss = mse_loss(net(x), y)
            (loss / len(parts)).backward()
        clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
    # end of snippet


def validation(rank, ranks, net):
    data = list(batches(rank, ranks))
    # snippet: validation
    net.eval()
    sums = torch.zeros(2)
    with torch.no_grad():
        for x, y in data:  # as many on every rank: pad, or it hangs
            sums += torch.tensor([mse_loss(net(x), y).item() * len(x), len(x)])
    dist.all_reduce(sums)
    loss = sums[0] / sums[1]
    net.train()
    # end of snippet
    return loss


def groups(net):
    # snippet: groups
    biases = [p for name, p in net.named_parameters() if name.endswith("bias")]
    others = [p for name, p in net.named_parameters() if not name.endswith("bias")]
    optimizer = torch.optim.AdamW(
        [{"params": others, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}], lr=1e-3
    )
    # end of snippet
    return optimizer


def checkpoint(net, optimizer, path):
    step = 5
    # snippet: save
    model_state, optimizer_state = get_state_dict(net, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state, "step": step}
    dcp.save(state, checkpoint_id=path)
    # end of snippet
    # snippet: resume
    if os.path.exists(path):
        model_state, optimizer_state = get_state_dict(net, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state, "step": 0}
        dcp.load(state, checkpoint_id=path)
        set_state_dict(net, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        step = state["step"]
    # end of snippet
    return step


def uneven(rank, ranks):
    data = list(batches(rank, ranks, count=rank + 1))
    net = DistributedDataParallel(Net())
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    # snippet: uneven
    with Join([net]):  # DDP only; FSDP2 has no counterpart
        for x, y in data:
            optimizer.zero_grad()
            mse_loss(net(x), y).backward()
            optimizer.step()
    # end of snippet


def mixed_precision(rank, ranks, mesh):
    data = list(batches(rank, ranks))
    # snippet: bf16
    net = Net()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in net.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(net, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for x, y in data:
        optimizer.zero_grad()
        loss = mse_loss(net(x).float(), y)
        loss.backward()
        clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
    # end of snippet


def frozen(rank, ranks, mesh):
    data = list(batches(rank, ranks))
    # snippet: frozen
    net = Net()
    net.blocks[0].requires_grad_(False)
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for x, y in data:
        optimizer.zero_grad()
        mse_loss(net(x), y).backward()
        optimizer.step()
    # end of snippet


def gan(rank, ranks, mesh):
    data = list(batches(rank, ranks))
    generator, discriminator = Net(), nn.Linear(8, 1)
    # snippet: gan
    makes, judges = DistributedDataParallel(generator), DistributedDataParallel(discriminator)
    maker = torch.optim.AdamW(makes.parameters(), lr=1e-3)
    judge = torch.optim.AdamW(judges.parameters(), lr=1e-3)
    for x, y in data:
        fake = makes(x)
        judge.zero_grad()
        (softplus(judges(fake.detach())) + softplus(-judges(y))).mean().backward()
        judge.step()
        discriminator.requires_grad_(False)
        maker.zero_grad()
        softplus(-discriminator(fake)).mean().backward()
        maker.step()
        discriminator.requires_grad_(True)
    # end of snippet


# snippet: shared
class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.out = self.embedding.weight

    def forward(self, tokens):
        return nn.functional.linear(self.embedding(tokens), self.out)
# end of snippet


def main():
    # snippet: join
    dist.init_process_group()  # torchrun
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    # end of snippet
    rank, ranks = dist.get_rank(), dist.get_world_size()
    single_process()
    ddp(rank, ranks)
    net, optimizer = fsdp(rank, ranks, mesh)
    accumulation(rank, ranks, mesh)
    validation(rank, ranks, net)
    groups(net)
    checkpoint(net, optimizer, os.path.join(sys.argv[1], "state"))
    uneven(rank, ranks)
    mixed_precision(rank, ranks, mesh)
    frozen(rank, ranks, mesh)
    gan(rank, ranks, mesh)
    fully_shard(Tied(), mesh=mesh)(torch.arange(10)).sum().backward()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # threads of PyTorch that outlive its groups abort some processes while Python ends
