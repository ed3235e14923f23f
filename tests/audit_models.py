"""Models that are not the course's, each right once and with bugs, for drive_audit.py.

A fused q, k, v and a tied head; a parallel model with other classes and names; experts
that are on one rank each; LoRA; PyTorch's plan for a split sequence.
"""

import itertools
import time
from collections import OrderedDict
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

V = 30
D = 16
HEADS = 4
S = 6
EXPERTS = 4


class Copy(torch.autograd.Function):
    """The identity; all-reduce in backward."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Sum(torch.autograd.Function):
    """All-reduce; the identity in backward."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


def piece(p, group, dim: int = 0, blocks: int = 1) -> nn.Parameter:
    """This rank's slice of each of some blocks of a parameter."""
    parts = []
    for block in p.detach().chunk(blocks):
        parts.append(block.chunk(group.size(), dim)[group.rank()])
    return nn.Parameter(torch.cat(parts).clone(), requires_grad=p.requires_grad)


class Split(nn.Module):
    """A module that runs in full or on ranks. What is sharded is between f and g."""

    group = None
    bug = ""

    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            setattr(self, name, part)

    def f(self, x, is_there: bool = True):
        is_copied = self.group is not None and is_there
        return Copy.apply(x, self.group) if is_copied else x

    def g(self, x):
        return x if self.group is None else Sum.apply(x, self.group)


def tell(model, group, bug: str = ""):
    """Tell all modules of a model the group and the bug."""
    for module in filter(lambda m: isinstance(m, Split), model.modules()):
        module.group = group
        module.bug = bug
    return model


def cutting(bug: str, at: str = "", rows="up.weight up.bias", columns="down.weight"):
    """A parallelize that slices parameters and buffers of some modules along dim 0 or 1
    (of "name/3", each of 3 blocks), and tells all modules the group and the bug."""

    def parallelize(model, group):
        for dim, names in enumerate((rows, columns)):
            for prefix, text in itertools.product(at.split() or [""], names.split()):
                name, _, blocks = text.partition("/")
                owner, _, key = f"{prefix}.{name}".strip(".").rpartition(".")
                module = model.get_submodule(owner)
                sliced = piece(getattr(module, key), group, dim, int(blocks or 1))
                is_buffer = key in module._buffers
                setattr(module, key, sliced.data if is_buffer else sliced)
        return tell(model, group, bug)

    return parallelize


def attend(parts, **options):
    """Attention of q, k and v in heads."""
    heads = [part.unflatten(-1, (-1, D // HEADS)).transpose(1, 2) for part in parts]
    y = F.scaled_dot_product_attention(*heads, **options)
    return y.transpose(1, 2).flatten(2)


def tokens_batch(step):
    tokens, target = torch.randint(V, (2, 3, S))
    return tokens, target


# ---- A fused weight of q, k and v, and a tied head. The model runs both ways.


class FusedAttention(Split):
    def __init__(self):
        super().__init__(c_attn=nn.Linear(D, 3 * D), c_proj=nn.Linear(D, D))

    def forward(self, x):
        parts = self.parts(self.c_attn(self.f(x)))
        if self.bug == "float32":  # the full model computes this in float64
            parts = [part.float().double() for part in parts]
        return self.project(attend(parts, is_causal=True))

    def parts(self, y):
        return y.chunk(3, -1)

    def project(self, y):
        if self.group is None or self.bug == "no sum":
            return self.c_proj(y)
        if self.bug == "bias before":
            return Sum.apply(self.c_proj(y), self.group)
        y = Sum.apply(F.linear(y, self.c_proj.weight), self.group)
        if self.bug == "mean":
            y = y / self.group.size()
        return y + self.c_proj.bias


class FusedModel(Split):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(V, D)
        self.ln = nn.LayerNorm(D)
        self.attn = FusedAttention()
        self.head = nn.Linear(D, V, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, tokens):
        x = self.wte(tokens)
        x = x + self.attn(self.ln(x))
        weight = self.head.weight
        if self.bug == "detached":
            weight = weight.detach()
        return F.linear(x, weight)


class Sends(torch.optim.AdamW):
    def step(self):
        super().step()
        for p in self.param_groups[0]["params"]:
            dist.broadcast(p.data, 0)


class Skips(torch.optim.AdamW):
    def step(self):
        if dist.get_rank() != 1:
            super().step()


def all_but_first(parameters):
    first = 1 if dist.get_rank() == 1 else 0  # not the embedding
    return torch.optim.AdamW(list(parameters)[first:], 1e-3)


def decaying(parameters, rate: float, of_large: float, of_small: float):
    """Another weight decay for large weights; a shard of one counts as small."""
    parameters = list(parameters)
    large = [p for p in parameters if p.numel() >= 2 * D * D]
    small = [p for p in parameters if p.numel() < 2 * D * D]
    groups = [dict(params=large, weight_decay=of_large)]
    groups += [dict(params=small, weight_decay=of_small)]
    return torch.optim.AdamW(groups, rate)


OPTIMIZERS = {
    "sent after a step": lambda ps: Sends(ps, 1e-3),
    "own rate": lambda ps: torch.optim.AdamW(ps, 1e-3 * (1 + dist.get_rank())),
    "decay": lambda ps: decaying(ps, 1e-3, 0.0, 0.1),
    "one rank skips": all_but_first,
    "one rank skips a step": lambda ps: Skips(ps, 1e-3),
}


def fused_subject(bug: str):
    rows = "c_attn.weight/3 c_attn.bias/3"
    if bug == "contiguous":
        rows = "c_attn.weight c_attn.bias"

    def parallelize(model, group):
        cutting(bug, "attn", rows, "c_proj.weight")(model, group)
        if bug == "broadcast":  # DistributedDataParallel sends rank 0's parameters
            dist.broadcast(model.attn.c_proj.weight.data, 0, group)
        return model

    def clip(model, max_norm):
        total = torch.zeros(())
        for name, p in model.named_parameters():
            is_shard = "c_attn" in name or name == "attn.c_proj.weight"
            if is_shard or dist.get_rank() == 0:
                total += p.grad.square().sum()
        if bug == "norm on rank 0":
            dist.reduce(total, 0)
        else:
            dist.all_reduce(total)
        norm = total.sqrt()
        for p in model.parameters():  # PyTorch's clip adds 1e-6 to the norm
            p.grad *= min(1.0, max_norm / (norm.item() + 1e-12))
        return norm

    subject = SimpleNamespace(build=FusedModel, parallelize=parallelize, clip=clip)
    subject.batch = tokens_batch
    if bug == "wrong slice":  # a gathered gradient, sliced by the wrong rank

        def after_backward(model):
            p = model.attn.c_proj.weight
            pieces = [torch.empty_like(p) for _ in range(dist.get_world_size())]
            dist.all_gather(pieces, p.grad)
            p.grad = pieces[dist.get_rank() - 1]

        subject.after_backward = after_backward
    if bug in OPTIMIZERS:
        subject.optimizer = OPTIMIZERS[bug]
    if bug == "made before":
        made = []

        def parallelize_late(model, group):
            made.append(torch.optim.AdamW(model.parameters(), 1e-3))
            return parallelize(model, group)

        subject.parallelize = parallelize_late
        subject.optimizer = lambda parameters: made[-1]
    return subject


# ---- Other classes and names in the parallel model.


class Mlp(Split):
    def __init__(self):
        super().__init__(
            norm=nn.LayerNorm(D), up=nn.Linear(D, 2 * D), down=nn.Linear(2 * D, D)
        )

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class LayerNormUp(nn.Module):
    """A norm and a column-parallel linear in one module."""

    def __init__(self, full, group, bug):
        super().__init__()
        self.layer_norm_weight = nn.Parameter(full.norm.weight.detach())
        self.layer_norm_bias = nn.Parameter(full.norm.bias.detach())
        self.weight = piece(full.up.weight, group)
        self.bias = piece(full.up.bias, group)
        self.group = group
        self.bug = bug

    def forward(self, x):
        x = F.layer_norm(x, (D,), self.layer_norm_weight, self.layer_norm_bias)
        if self.bug != "no f":
            x = Copy.apply(x, self.group)
        return F.linear(x, self.weight, self.bias)


class RowDown(nn.Module):
    def __init__(self, full, group, bug):
        super().__init__()
        self.weight = piece(full.down.weight, group, 1)
        self.bias = nn.Parameter(full.down.bias.detach())
        self.group = group
        self.bug = bug

    def forward(self, x):
        if self.bug == "bias":
            return Sum.apply(F.linear(x, self.weight, self.bias), self.group)
        if self.bug == "rank 0 adds it":  # no bug: the others do not use their copy
            bias = None if self.group.rank() else self.bias
            return Sum.apply(F.linear(x, self.weight, bias), self.group)
        return Sum.apply(F.linear(x, self.weight), self.group) + self.bias


class ParallelMlp(nn.Module):
    def __init__(self, full, group, bug):
        super().__init__()
        self.linear_fc1 = LayerNormUp(full, group, bug)
        self.linear_fc2 = RowDown(full, group, bug)
        self.factor = 1.5 if bug == "scaled" else 1.0

    def forward(self, x):
        return x + self.linear_fc2(self.factor * F.gelu(self.linear_fc1(x)))


def renamed_subject(bug: str):
    build = lambda: nn.Sequential(Mlp(), Mlp())

    def parallelize(model, group):
        decoder = [ParallelMlp(layer, group, bug) for layer in model]
        return nn.Sequential(OrderedDict(decoder=nn.Sequential(*decoder)))

    def batch(step):
        return torch.randn(3, S, D), torch.randn(3, S, D)

    def own_rows(output, target, group):
        if group is not None:
            output, target = (x.chunk(2, 1)[group.rank()] for x in (output, target))
        loss = F.mse_loss(output, target)
        return loss / 2 if group is not None and bug == "own sum" else loss

    subject = SimpleNamespace(build=build, parallelize=parallelize, batch=batch)
    if bug in ("own rows", "own sum"):
        subject.loss = own_rows
    if bug == "pieces added":  # gradients of shards in a replicated one

        def after_backward(model):
            down = model.decoder[1].linear_fc2
            down.bias.grad += down.weight.grad.sum(1)

        subject.after_backward = after_backward
    return subject


def subject_of(build, parallelize, **more):
    subject = renamed_subject("")
    vars(subject).update(build=build, parallelize=parallelize, **more)
    return subject


def after_linear(layer, parallelize, **more):
    """A linear and one layer more."""
    build = lambda: nn.Sequential(nn.Linear(D, D), layer())
    return subject_of(build, parallelize, **more)


# ---- A model that makes rounding errors a thousand million times larger.


class Sharp(nn.Module):
    def forward(self, x):
        return 1e-9 * torch.sin(1e9 * x)


def sharp_subject(bug: str):
    subject = renamed_subject(bug)
    build = subject.build
    subject.build = lambda: nn.Sequential(*build(), Sharp(), nn.Linear(D, D))

    def parallelize(model, group):
        layers = [ParallelMlp(layer, group, bug) for layer in model[:2]]
        return nn.Sequential(*layers, *model[2:])

    subject.parallelize = parallelize
    subject.optimizer = lambda parameters: torch.optim.SGD(parameters, 1e-6)
    return subject


# ---- A block that is computed again in backward, with dropout.


class Recomputed(Split):
    def __init__(self):
        super().__init__(linear=nn.Linear(D, D), dropout=nn.Dropout(0.5))
        self.keeps_state = None  # None: nothing is computed again

    def block(self, x):
        return self.dropout(self.linear(x))

    def forward(self, x):
        if self.keeps_state is None:
            return self.block(x)
        return checkpoint(
            self.block, x, use_reentrant=False, preserve_rng_state=self.keeps_state
        )


def recomputed_subject(bug: str):
    def parallelize(model, group):
        model[0] = ParallelMlp(model[0], group, bug)
        model[1].keeps_state = bug != "state not kept"
        return model

    return subject_of(lambda: nn.Sequential(Mlp(), Recomputed()), parallelize)


# ---- Two inputs of different lengths, a parameter without dims, BatchNorm, noise.


class Odd(Split):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.q = nn.Linear(D, D)
        self.k = nn.Linear(D, D)
        self.v = nn.Linear(D, D)
        self.o = nn.Linear(D, D)
        self.batch_norm = nn.BatchNorm1d(D)
        self.last = nn.Linear(D, D, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("table", 3.0 ** -torch.arange(D).float())
        self.length = None

    def forward(self, x, memory):
        x = x + 0.1 * torch.randn(x.shape)
        positions = torch.arange(S).to(self.table)
        x = x + (positions[:, None] * self.table).cos()
        memory = self.norm(memory)
        queried = self.f(x)
        memory = self.f(memory, self.bug != "memory")
        y = attend((self.q(queried), self.k(memory), self.v(memory)))
        y = self.g(F.linear(y, self.o.weight))
        y = self.batch_norm((x + y + self.o.bias).transpose(1, 2)).transpose(1, 2)
        length = self.last.weight.detach().norm()
        if self.bug == "stale":
            length = self.length
        return self.scale * F.linear(y, self.last.weight / length)


QKV = "q.weight q.bias k.weight k.bias v.weight v.bias"


def odd_subject(bug: str):
    def parallelize(model, group):
        model.length = model.last.weight.detach().norm()
        model.table = model.table.float()  # a constructor that names a dtype
        return cutting(bug, "", QKV, "o.weight")(model, group)

    def batch(step):
        inputs = torch.randn(3, S, D), torch.randn(3, S - 1, D)
        return inputs, torch.randn(3, S, D)

    return subject_of(Odd, parallelize, batch=batch)


# ---- A row-parallel linear right in front of a column-parallel one.


class Pair(Split):
    def __init__(self):
        super().__init__(up=nn.Linear(D, 2 * D), down=nn.Linear(2 * D, D))

    def forward(self, x):
        h = self.up(self.f(x, self.bug != "no f")).tanh()
        return self.g(F.linear(h, self.down.weight)) + self.down.bias


def pairs_subject(bug: str):
    return subject_of(lambda: nn.Sequential(Pair(), Pair()), cutting(bug, "0 1"))


def float32_loss_subject(bug: str):
    """Both models convert their outputs to float32, as many do with logits."""
    subject = pairs_subject(bug)
    subject.loss = lambda output, target: F.mse_loss(output.float(), target.float())
    if bug == "slow decay":
        subject.optimizer = lambda ps: decaying(ps, 2e-5, 0.1, 0.0)
    return subject


# ---- A list of heads: each rank has some of them, and numbers them from 0.


class Heads(Split):
    def __init__(self):
        super().__init__()
        heads = [nn.Linear(D, D // HEADS) for _ in range(HEADS)]
        self.heads = nn.ModuleList(heads)
        self.proj = nn.Linear(D, D)

    def forward(self, x):
        x = self.f(x)
        return self.proj(torch.cat([head(x).tanh() for head in self.heads], -1))


def lists_subject(bug: str):
    def parallelize(model, group):
        own = model[1]
        count = HEADS // group.size()
        first = group.rank() * count
        own.heads = own.heads[first : first + count]
        own.proj = RowDown(SimpleNamespace(down=own.proj), group, bug)
        return tell(model, group)

    return subject_of(lambda: nn.Sequential(nn.LayerNorm(D), Heads()), parallelize)


# ---- A frozen weight of integers, and what optimizers people write.


class Integers(Split):
    def __init__(self):
        super().__init__()
        values = torch.randint(-100, 100, (2 * D, D), dtype=torch.int8)
        self.up = nn.Parameter(values, requires_grad=False)
        self.A = nn.Linear(D, 2 * D)
        self.down = nn.Linear(2 * D, D, bias=False)

    def forward(self, x):
        x = self.f(x, self.bug != "no f")
        return self.g(self.down((self.A(x) + F.linear(x, self.up.to(x) / 100)).tanh()))


class Stepper:
    """An optimizer that says nothing of its groups."""

    def __init__(self, parameters):
        self.inner = torch.optim.SGD(parameters, 1e-2)

    def step(self):
        self.inner.step()


def integers_subject(bug: str):
    return subject_of(
        lambda: nn.Sequential(nn.LayerNorm(D), Integers()),
        cutting(bug, "1", "up A.weight A.bias", "down.weight"),
        optimizer=Stepper,
    )


# ---- Experts: each is on one rank, so ranks have parameters of different names.


class Experts(Split):
    def __init__(self):
        super().__init__(router=nn.Linear(D, EXPERTS, bias=False))
        names = [str(i) for i in range(EXPERTS)]
        self.experts = nn.ModuleDict({name: nn.Linear(D, D) for name in names})
        self.shared = nn.Linear(D, D)

    def forward(self, x):
        shape = x.shape
        x = x.flatten(0, 1)
        shared = self.shared(x)
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        if self.group is None or self.bug != "scale":
            weights = weights / weights.sum(-1, keepdim=True)
        x = self.f(x)
        weights = self.f(weights, self.bug != "router")
        y = torch.zeros_like(x)
        for name, expert in self.experts.items():
            of_expert = (weights * (chosen == int(name))).sum(-1, keepdim=True)
            y = y + expert(x) * of_expert
        if self.bug == "shared expert":
            y = y + shared
        y = self.g(y)
        return (y if self.bug == "shared expert" else y + shared).view(shape)


def experts_subject(bug: str):
    build = lambda: nn.Sequential(nn.Embedding(V, D), Experts(), nn.Linear(D, V))

    def parallelize(model, group):
        shift = 1 if bug == "wrong expert" else 0
        kept = {}
        for number in range(group.rank(), EXPERTS, group.size()):
            other = (number + shift) % EXPERTS
            kept[str(number)] = model[1].experts[str(other)]
        model[1].experts = nn.ModuleDict(kept)
        return tell(model, group, bug)

    subject = subject_of(build, parallelize, batch=tokens_batch)
    if bug == "experts summed":  # as DistributedDataParallel does

        def after_backward(model):
            for p in model[1].experts.parameters():
                dist.all_reduce(p.grad)

        subject.after_backward = after_backward
    return subject


# ---- LoRA: the weights are frozen, two factors are trained.


class Lora(Split):
    """Runs full, column-parallel (B is sharded) and row-parallel (A is sharded)."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.lora_A = nn.Parameter(torch.randn(2, inputs))
        self.lora_B = nn.Parameter(torch.zeros(outputs, 2))
        self.kind = "full"

    def forward(self, x):
        if self.kind == "full":
            return self.base(x) + x @ self.lora_A.T @ self.lora_B.T
        low = x @ self.lora_A.T
        if self.kind == "column":
            return self.base(self.f(x)) + self.f(low, self.bug != "A") @ self.lora_B.T
        if self.bug == "B":
            y = F.linear(x, self.base.weight) + low @ self.lora_B.T
            return self.g(y) + self.base.bias
        y = self.g(F.linear(x, self.base.weight)) + self.base.bias
        return y + self.g(low) @ self.lora_B.T


def lora_subject(bug: str):
    build = lambda: nn.Sequential(Lora(D, 2 * D), nn.Tanh(), Lora(2 * D, D))

    def parallelize(model, group):
        rows = "0.base.weight 0.base.bias 0.lora_B"
        cutting(bug, "", rows, "2.base.weight 2.lora_A")(model, group)
        up, _, down = model
        up.kind, down.kind = "column", "row"
        if bug == "frozen":
            down.lora_B.requires_grad_(False)
        if bug == "trained":
            down.base.bias.requires_grad_(True)
        return model

    return subject_of(build, parallelize)


# ---- PyTorch's plan, with a sharded embedding in front of a split sequence.


def plan_subject(bug: str):
    def build():
        head = nn.Linear(D, V, bias=False)
        return nn.Sequential(nn.Embedding(V, D), Mlp(), nn.LayerNorm(D), head)

    def parallelize(model, group):
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
        by_position = {"output_layouts": Shard(1)}
        gather = {"input_layouts": Shard(1), "use_local_output": True}
        plan = {
            "0": RowwiseParallel(input_layouts=Replicate(), **by_position),
            "1.norm": SequenceParallel(use_local_output=True),
            "1.up": ColwiseParallel(**gather),
            "1.down": RowwiseParallel(**by_position),
            "2": SequenceParallel(use_local_output=True),
            "3": ColwiseParallel(**gather, output_layouts=Replicate()),
        }
        if bug == "norm":  # a plain LayerNorm gets its part of the sequence
            del plan["1.norm"]
        return parallelize_module(model, mesh, plan)

    return subject_of(build, parallelize, batch=tokens_batch)


# ---- A block with plain functions between its modules.


BLOCK = "up.weight up.bias gain"  # what is cut along dim 0


class Block(Split):
    """x + down(gain · tanh(up(norm(x)))), in the full model and on ranks."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.up = nn.Linear(D, 2 * D)
        self.gain = nn.Parameter(torch.randn(2 * D))
        self.down = nn.Linear(2 * D, D)
        self.calls = 0

    def forward(self, x):
        h = self.norm(x)
        if self.group is None:
            return x + self.down(F.dropout(self.middle(h), 0.3, self.training))
        if self.bug == "recomputed":
            return checkpoint(
                self.parallel, x, h, use_reentrant=False, preserve_rng_state=False
            )
        return self.parallel(x, h)

    def middle(self, h):
        z = self.up(h).tanh() * self.gain
        width = z.shape[-1] if self.bug == "local width" else 2 * D
        return z / width**0.5

    def parallel(self, x, h):
        self.calls += 1
        if self.bug != "train only" or not self.training:  # f is only in eval mode
            h = Copy.apply(h, self.group)
        z = self.middle(h.detach() if self.bug == "detached" else h)
        if self.bug == "leaky":
            z = Leaky.apply(z)
        state = torch.get_rng_state()
        seed = 0 if self.bug == "same masks" else dist.get_rank()
        if self.bug == "recomputed":  # called again in backward
            seed += 10 * self.calls
        if self.training:
            torch.manual_seed(seed)
        if self.bug != "no dropout":
            z = F.dropout(z, 0.5 if self.bug == "rate" else 0.3, self.training)
        torch.set_rng_state(state)
        y = Sum.apply(F.linear(z, self.down.weight), self.group)
        is_second = self.bug == "second call" and self.calls % 2 == 0
        if is_second or (self.bug == "longer" and x.shape[1] > S):
            y = 1.5 * y
        is_here = self.bug != "bias on rank 0" or self.group.rank() == 0
        return x + y + self.down.bias * is_here


class Leaky(torch.autograd.Function):
    """The identity; its backward loses a part of the gradient, another per rank."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        grad[..., dist.get_rank()] = 0
        return grad


def clip_blocks(bug: str):
    """Clipping that is right, or has one of the bugs of public threads."""

    def clip(model, max_norm):
        shards = []
        for block in model[:2]:
            shards += [block.up.weight, block.up.bias, block.gain, block.down.weight]
        ids = set(map(id, shards))
        total = torch.zeros(())
        own = torch.zeros(())
        for p in model.parameters():
            own += p.grad.square().sum()
            if id(p) in ids or dist.get_rank() == 0 or bug == "counted":
                total += p.grad.square().sum()
        dist.all_reduce(total)
        norm = total.sqrt()
        clipped = [p.grad for p in model.parameters()]
        if bug != "gradients clipped":  # they have no .grad, so nothing is scaled
            clipped = list(model.parameters())
        by = own.sqrt() if bug == "local norm" else norm
        nn.utils.clip_grads_with_norm_(clipped, max_norm, by)
        if bug == "clipped twice":
            again = by.clamp(max=max_norm)
            nn.utils.clip_grads_with_norm_(clipped, max_norm / 2, again)
        return norm

    return clip


CLIP = ("gradients clipped", "clipped twice", "local norm", "counted")


def block_subject(bug: str):
    build = lambda: nn.Sequential(Block(), Block(), nn.Linear(D, D))

    def parallelize(model, group):
        if bug == "not split":
            return None
        cutting(bug, "0 1", BLOCK)(model, group)
        model[0].bug = bug if bug == "no dropout" else ""
        up = model[1].up.weight
        if bug == "rounded":
            up.data = up.data.bfloat16().to(up.dtype)
        if bug == "flat":  # a wrong output in another shape than the full model's
            model[0].register_forward_hook(lambda m, inputs, y: 1.5 * y.flatten(0, 1))
            model[1].register_forward_pre_hook(lambda m, x: x[0].view(3, S, D))
        if bug == "rows":
            factors = torch.ones(len(up), 1)
            factors[3:5] = 2
            up.register_hook(lambda grad: grad * factors.to(grad))
        # A library may store weights in float32, and add parameters of its own.
        model[0].up.weight.data = model[0].up.weight.data.float()
        model[2].extra = nn.Parameter(torch.zeros(D))
        model[2].register_forward_hook(lambda m, inputs, output: output + 0 * m.extra)
        return model

    large = lambda step: (torch.randn(3, S, D), 9 * torch.randn(3, S, D))
    subject = subject_of(build, parallelize, batch=large)
    if bug == "longer":  # the second batch
        subject.batch = lambda step: tuple(torch.randn(2, 3, S + step, D))
    if bug in CLIP:
        subject.clip = clip_blocks(bug)
    return subject


class Twice(Split):
    def __init__(self):
        super().__init__(block=Block(), head=nn.Linear(D, D))

    def forward(self, x):
        return self.head(self.block(self.block(x)))


def twice_subject(bug: str):
    """A module that is called twice; its second call may be wrong."""
    return subject_of(Twice, cutting(bug, "block", BLOCK))


# ---- A linear on this rank's rows of its input: its gradient is partial.


class Rows(torch.autograd.Function):
    """This rank's rows; all-gather in backward."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.chunk(group.size(), 1)[group.rank()].contiguous()

    @staticmethod
    def backward(ctx, grad):
        return gather(grad, ctx.group), None


class Gather(torch.autograd.Function):
    """All-gather of rows; backward takes this rank's, or the sum's by mistake."""

    @staticmethod
    def forward(ctx, x, group, is_summed):
        ctx.group = group
        ctx.is_summed = is_summed
        return gather(x, group)

    @staticmethod
    def backward(ctx, grad):
        if ctx.is_summed:  # of all pieces, as if ranks did not compute the same
            return sum(grad.chunk(ctx.group.size(), 1)), None, None
        grad = grad.chunk(ctx.group.size(), 1)[ctx.group.rank()]
        return grad.contiguous(), None, None


def gather(x, group):
    parts = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, 1)


class RowsLinear(nn.Linear, Split):
    def forward(self, x):
        if self.group is None:
            return super().forward(x)
        weight = self.weight
        if self.bug != "reduced again":
            weight = Copy.apply(weight, self.group)
        y = F.linear(Rows.apply(x, self.group), weight)
        return Gather.apply(y, self.group, False)


def rows_subject(bug: str):
    """Sums the weight's gradient in backward, or by a hook on what is accumulated."""

    def sum_again(p):
        dist.all_reduce(p.grad)

    def overwrite(p):
        p.grad = p.last

    def parallelize(model, group):
        weight = model[1].weight
        if bug == "reduced again":
            weight.register_post_accumulate_grad_hook(sum_again)
        if bug == "overwritten":
            own = vars(weight)
            weight.register_hook(lambda grad: own.update(last=grad))
            weight.register_post_accumulate_grad_hook(overwrite)
        return tell(model, group, bug)

    return after_linear(lambda: RowsLinear(D, D, bias=False), parallelize)


# ---- Pieces that are gathered by columns.


class Columns(nn.Linear, Split):
    def forward(self, x):
        if self.group is None:
            return super().forward(x)
        y = F.linear(Copy.apply(x, self.group), self.weight, self.bias).transpose(1, 2)
        return Gather.apply(y, self.group, self.bug == "pieces summed").transpose(1, 2)


def columns_subject(bug: str):
    return subject_of(
        lambda: nn.Sequential(nn.Linear(D, D), Columns(D, D), nn.Tanh()),
        cutting(bug, "1", "weight bias", ""),
    )


# ---- A convolution: its bias belongs to dim 1.


class Convolution(nn.Conv1d, Split):
    def forward(self, x):
        if self.group is None:
            return super().forward(x)
        x = Rows.apply(x, self.group)  # dim 1 is the channels
        bias = self.bias if self.bug == "bias" else None
        y = Sum.apply(F.conv1d(x, self.weight, bias), self.group)
        return y if self.bug == "bias" else y + self.bias[:, None]


def convolution_subject(bug: str):
    batch = lambda step: (torch.randn(3, S, D), torch.randn(3, 4, D - 2))
    cut = cutting(bug, "1", "", "weight")
    return after_linear(lambda: Convolution(S, 4, 3), cut, batch=batch)


# ---- A stack that returns its norm's output, with a Python attribute on it.


class Stack(Split):
    def __init__(self):
        super().__init__(linear=nn.Linear(D, D), norm=nn.LayerNorm(D))

    def forward(self, x):
        x = self.norm(self.linear(x))
        x.held = "replicated"  # as libraries do
        return x


class Head(Split):
    def __init__(self):
        super().__init__(pair=Pair())

    def forward(self, x):
        assert x.held == "replicated"
        return self.pair(x)


def stack_subject(bug: str):
    return subject_of(lambda: nn.Sequential(Stack(), Head()), cutting(bug, "1.pair"))


# ---- A gather that stands between two modules, in the forward around them.


class Rejoined(Split):
    """On ranks, the norm gets this rank's rows, and the pair all of them."""

    def __init__(self):
        super().__init__(linear=nn.Linear(D, D), norm=nn.LayerNorm(D), pair=Pair())

    def forward(self, x):
        x = self.linear(x)
        if self.group is None:
            return self.pair(self.norm(x))
        x = self.norm(Rows.apply(x, self.group))
        return self.pair(Gather.apply(x, self.group, False))


def sum_of_norm(model):
    for p in model.norm.parameters():
        dist.all_reduce(p.grad)


def rejoined_subject(bug: str):
    return subject_of(Rejoined, cutting(bug, "pair"), after_backward=sum_of_norm)


class Ended(Split):
    """The model ends with a gather, after its last module."""

    def __init__(self):
        super().__init__(linear=nn.Linear(D, D), norm=nn.LayerNorm(D))

    def forward(self, x):
        x = self.linear(x)
        if self.group is None:
            return self.norm(x)
        x = self.norm(Rows.apply(x, self.group))
        x = Gather.apply(x, self.group, False)
        return Copy.apply(x, self.group) if self.bug else x


def ended_subject(bug: str):
    return subject_of(Ended, cutting(bug, "", "", ""), after_backward=sum_of_norm)


class Join(nn.Module):
    """Gathers columns. In the full model, the module in this place does nothing."""

    def __init__(self, group):
        super().__init__()
        self.group = group

    def forward(self, x):
        return Gather.apply(x.transpose(1, 2), self.group, False).transpose(1, 2)


def join_subject(bug: str):
    def parallelize(model, group):
        model[1] = Join(group)
        rows = "0.weight 0.bias 2.up.weight 2.up.bias"
        return cutting(bug, "", rows, "2.down.weight")(model, group)

    build = lambda: nn.Sequential(nn.Linear(D, D), nn.Identity(), Pair())
    return subject_of(build, parallelize)


# ---- Parameters that are no pieces, or that a rank does not use.


class Doubled(nn.Module):
    """A linear; the ranks hold four times its weight. One may skip a parameter."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D, D))
        self.idle = nn.Parameter(torch.randn(D))
        self.factor = 1.0
        self.is_idle = False

    def forward(self, x):
        y = x @ (self.weight / self.factor)
        return y if self.is_idle else y + 0 * self.idle


def doubled_subject(bug: str):
    def parallelize(model, group):
        cutting("", "0", BLOCK)(model, group)
        linear = model[1]
        linear.is_idle = bug == "idle" and group.rank() == 1
        if bug != "idle":
            linear.factor = 4.0
            linear.weight.data *= 4.0
        if bug == "apart":
            rank = group.rank()
            linear.weight.register_hook(lambda grad: grad * (1 + rank))
        return model

    def optimizer(named_parameters):
        groups = []
        for name, p in named_parameters:
            # The update of what is four times as large must be, too.
            is_larger = name == "1.weight" and p.abs().max() > 6 and bug != "rate"
            groups.append({"params": [p], "lr": 16e-3 if is_larger else 1e-3})
        return torch.optim.SGD(groups)

    subject = subject_of(lambda: nn.Sequential(Block(), Doubled()), parallelize)
    if bug != "idle":
        subject.optimizer = optimizer
    return subject


# ---- A fused weight in the order of groups (q, k, v of each head), a split embedding.


class Groups(FusedAttention):
    def parts(self, y):
        if self.bug == "read":
            return super().parts(y)
        of_heads = y.unflatten(-1, (-1, 3, D // HEADS)).unbind(-2)
        return [part.flatten(2) for part in of_heads]


class GroupsModel(Split):
    def __init__(self):
        super().__init__(wte=nn.Embedding(V, D), norm=nn.LayerNorm(D), attn=Groups())
        self.head = nn.Linear(D, V)

    def forward(self, tokens):
        x = rows_of(self.wte, tokens, self.group)
        return self.head(x + self.attn(self.norm(x)))


def rows_of(embed, tokens, group):
    """Only the sum is right, and this is done between modules."""
    if group is None:
        return embed(tokens)
    rows = len(embed.weight)
    tokens = tokens - rows * group.rank()
    is_here = (tokens >= 0) & (tokens < rows)
    x = embed(tokens.clamp(0, rows - 1)) * is_here[..., None]
    return Sum.apply(x, group)


def groups_subject(bug: str):
    rows = "attn.c_attn.weight attn.c_attn.bias wte.weight"
    cut = cutting(bug, "", rows, "attn.c_proj.weight")
    return subject_of(GroupsModel, cut, batch=tokens_batch)


# ---- Experts with local numbers; no token chooses those of the last rank.


class Unused(Split):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(EXPERTS))
        self.scale = nn.Parameter(torch.randn(EXPERTS, D))
        self.first = 0

    def forward(self, x):
        z = self.f(x)
        y = 0 * z * self.scale.sum()
        for number, (expert, scale) in enumerate(zip(self.experts, self.scale)):
            if self.first + number < EXPERTS // 2:
                y = y + scale * expert(z)
        return x + (self.g(y))


def unused_subject(bug: str):
    def parallelize(model, group):
        layer = model[1]
        here = EXPERTS // group.size()
        layer.first = here * group.rank()
        layer.experts = layer.experts[layer.first : layer.first + here]
        first = layer.scale.detach()[:here]
        layer.scale = piece(layer.scale, group)
        if bug == "first rows":
            layer.scale = nn.Parameter(first.clone())
        return tell(model, group)

    return after_linear(Unused, parallelize)


# ---- A partial sum that is reduce-scattered by the module around it.


class Scattered(Split):
    def __init__(self):
        super().__init__(linear=nn.Linear(2 * D, D, bias=False))

    def forward(self, x):
        y = self.linear(x)
        if self.group is not None:
            y = Rows.apply(Sum.apply(y, self.group), self.group)
        return y.tanh() if self.bug else y


def scattered_subject(bug: str):
    def parallelize(model, group):
        model[2].register_forward_pre_hook(
            lambda module, inputs: Gather.apply(inputs[0], group, False)
        )
        return cutting(bug, "", "0.weight 0.bias", "1.linear.weight")(model, group)

    return subject_of(
        lambda: nn.Sequential(nn.Linear(D, 2 * D), Scattered(), nn.Linear(D, D)),
        parallelize,
    )


# ---- A head in the model's own forward; what nothing uses is not on the ranks.


class Headed(Split):
    def __init__(self):
        super().__init__()
        self.block = Block()
        self.norm = nn.LayerNorm(D)
        self.head = nn.Parameter(torch.randn(D, D))
        self.pooler = nn.Linear(D, D, bias=False)
        self.register_buffer("table", torch.linspace(0, 1, 2 * S))

    def forward(self, x):
        group = self.block.group
        x = self.norm(self.block(x)) + self.table[: x.shape[1], None]
        if group is None:
            return F.linear(x, self.head)
        x = self.f(x, self.bug != "no f")
        y = F.linear(x, self.head).transpose(1, 2)
        return Gather.apply(y, group, False).transpose(1, 2)


def headed_subject(bug: str):
    def parallelize(model, group):
        model.table[S:] = 0  # positions that no batch has
        del model.pooler
        rows = "block.up.weight block.up.bias block.gain head"
        return cutting(bug, "", rows, "block.down.weight")(model, group)

    return subject_of(Headed, parallelize)


# ---- Both models multiply in bfloat16, so partial sums have its rounding errors.


class Coarse(Split):
    def __init__(self):
        super().__init__(up=nn.Linear(D, 8 * D), down=nn.Linear(8 * D, D, bias=False))

    def forward(self, x):
        h = self.up(self.f(x, self.bug != "no f")).tanh().bfloat16()
        return self.g(F.linear(h, self.down.weight.bfloat16()).to(x))


def coarse_subject(bug: str):
    return subject_of(
        lambda: nn.Sequential(nn.Linear(D, D), Coarse(), nn.LayerNorm(D)),
        cutting(bug, "1"),
    )


# ---- A block whose norm and what it reads can be in front of f, behind it, or both.


class CopyInBFloat16(Copy):
    """The same as Copy, with a sum of 16 bits."""

    @staticmethod
    def backward(ctx, grad):
        return Copy.backward(ctx, grad.bfloat16())[0].to(grad), None


class Feed(Split):
    """A norm, two linears, and as a second summand the input or the norm's output."""

    def __init__(self, adds_norm: bool = False):
        super().__init__()
        self.adds_norm = adds_norm
        self.norm = nn.LayerNorm(D)
        self.up = nn.Linear(D, 2 * D)
        self.down = nn.Linear(2 * D, D, bias=False)

    def forward(self, x):
        left_out = self.bug == "bias left out"  # of a sum after backward
        n = self.norm(self.f(x) if left_out else x)
        rest = n if self.adds_norm else x
        if self.group is None:
            return rest + self.down(self.up(n).relu())
        copy = CopyInBFloat16 if self.bug == "f in bfloat16" else Copy
        h = n if self.bug == "no f" or left_out else copy.apply(n, self.group)
        h = Copy.apply(h, self.group) if self.bug == "f twice" else h
        y = F.linear(self.up(h).relu(), self.down.weight)
        if self.bug == "added before":
            return Sum.apply(rest + y, self.group)
        if self.bug == "summed twice":
            y = self.g(self.down(self.up(h).relu()))
        y = Sum.apply(y, self.group)
        if self.bug == "left out":
            return y
        if self.bug == "scaled too much":
            return y + 1.5 * rest
        if self.bug == "residual averaged":
            rest = rest.detach() + (rest - rest.detach()) / self.group.size()
        if self.bug == "residual detached":
            rest = rest.detach()
        return y + (h if self.bug == "behind f" else rest)


def feeds_subject(bug: str):
    def parallelize(model, group):
        cutting("", "1 2")(model, group)
        model[2 if bug == "behind f" else 1].bug = bug
        if bug == "bias left out":
            model[1].norm.weight.register_hook(model[1].g)
        return model

    build = lambda: nn.Sequential(nn.Linear(D, D), Feed(), Feed(True))
    return subject_of(build, parallelize)


# ---- Ranks compute in another layout than the full model.


class Layout(Split):
    """Two blocks. Ranks compute them as [S, B, D] or [B · S, D], or shuffle rows."""

    def __init__(self):
        super().__init__(
            first=nn.Linear(D, D), a=Feed(), b=Feed(), last=nn.Linear(D, D)
        )
        self.layout = ""

    def forward(self, x):
        x = self.first(x)
        if self.layout == "swapped":
            y = self.b(self.a(x.transpose(0, 1).contiguous()))
            return self.last(y.transpose(0, 1).contiguous())
        if not self.layout:
            return self.last(self.b(self.a(x)))
        order = torch.arange(len(x) * S)
        if self.layout == "shuffled":
            order = order * 5 % len(order)
        y = self.b(self.a(x.flatten(0, 1)[order]))
        return self.last(y[order.argsort()].view(x.shape))


def layout_subject(bug: str, layout: str = "swapped"):
    def parallelize(model, group):
        cutting("", "a b")(model, group)
        model.b.bug = bug
        model.layout = layout
        return model

    return subject_of(Layout, parallelize)


def flat_subject(bug: str):
    return layout_subject(bug, "flat")


def shuffled_subject(bug: str):
    return layout_subject(bug, "shuffled")


# ---- Two branches, so that two faults can be apart.


class Branches(Split):
    def __init__(self):
        super().__init__(a=Feed(), b=Feed())

    def forward(self, x, y):
        return self.a(x) + self.b(y)


def branches_subject(bug: str):
    def batch(step):
        x, y, target = torch.randn(3, 3, S, D)
        return (x, y), target

    return subject_of(Branches, cutting(bug, "a b"), batch=batch)


# ---- What a model returns: the loss gets all of it.


class Outputs(Split):
    def __init__(self):
        super().__init__(feed=Feed(), router=nn.Linear(D, 4))

    def forward(self, x):
        x = self.feed(x)
        second = self.router(x).square().mean()
        if self.bug:
            second = Sum.apply(second, self.feed.group)
        return SimpleNamespace(logits=x, second=second)


def outputs_subject(bug: str):
    return subject_of(
        Outputs,
        cutting(bug, "feed"),
        loss=lambda output, target: F.mse_loss(output.logits, target) + output.second,
    )


# ---- A replicated table, of which each rank takes its own rows as a head.


class Table(Split):
    def __init__(self):
        super().__init__(embed=nn.Embedding(V, D), norm=nn.LayerNorm(D))

    def forward(self, tokens):
        x = self.norm(self.embed(tokens))
        weight = self.embed.weight
        if self.group is None:
            return F.linear(x, weight)
        if self.bug != "rows of a head":
            weight = Copy.apply(weight, self.group)
        weight = weight.chunk(self.group.size())[self.group.rank()]
        y = F.linear(Copy.apply(x, self.group), weight)
        return Gather.apply(y.transpose(1, 2), self.group, False).transpose(1, 2)


def table_subject(bug: str):
    return subject_of(Table, cutting(bug, "", "", ""), batch=tokens_batch)


# ---- A sharded embedding with a padding_idx.


class Padded(Split):
    def __init__(self):
        super().__init__(embed=nn.Embedding(V, D, padding_idx=2), head=nn.Linear(D, V))

    def forward(self, tokens):
        if self.group is None:
            return self.head(self.embed(tokens))
        rows = len(self.embed.weight)
        first = self.group.rank() * rows
        own = (tokens >= first) & (tokens < first + rows)
        padding = 2 - first if 0 <= 2 - first < rows else None
        if self.bug == "local index":
            padding = 2
        index = (tokens - first).clamp(0, rows - 1)
        x = F.embedding(index, self.embed.weight, padding_idx=padding)
        return self.head(Sum.apply(x * own[..., None], self.group))


def padded_subject(bug: str):
    def batch(step):
        tokens = torch.arange(2 * V).view(6, 10) % V  # all of them
        return tokens, tokens.roll(1)

    return subject_of(Padded, cutting(bug, "embed", "weight", ""), batch=batch)


# ---- A buffer that train mode changes, by statistics of a shard.


class Moments(Split):
    def __init__(self):
        super().__init__(up=nn.Linear(D, 2 * D), down=nn.Linear(2 * D, D, bias=False))
        self.register_buffer("average", torch.ones(()))

    def forward(self, x):
        h = self.up(self.f(x))
        if self.training:
            mean = h.detach().abs().mean()
            if self.group is not None and not self.bug.startswith("own mean"):
                dist.all_reduce(mean, group=self.group)
                mean /= self.group.size()
            if self.bug == "own mean, assigned":
                self.average = 0.5 * self.average + 0.5 * mean
            else:
                self.average.mul_(0.5).add_(0.5 * mean)
        y = F.linear((h / self.average).relu(), self.down.weight)
        return x + (self.g(y))


def moments_subject(bug: str):
    return after_linear(Moments, cutting(bug, "1"))


class KeptMoments(Moments):
    """The average is a number that the module keeps, and no buffer. It also keeps what
    says nothing: a time, a count of its own columns, and the last mean of these."""

    def __init__(self):
        super().__init__()
        del self.average
        self.average = 1.0
        self.time = 0.0
        self.count = 0
        self.last = 0.0

    def forward(self, x):
        self.time += time.perf_counter()
        self.count += len(self.up.weight)
        self.last = self.up(x).mean().item()
        self.average = torch.tensor(self.average)
        y = super().forward(x)
        self.average = self.average.item()
        return y


def kept_moments_subject(bug: str):
    return after_linear(KeptMoments, cutting(bug, "1"))


# ---- A buffer that moves with the sum over tokens, of which each rank sees some.


class Leveled(Feed):
    def __init__(self):
        super().__init__()
        self.register_buffer("level", torch.zeros(D))
        self.register_buffer("seen", torch.zeros(D))  # of this rank: nothing reads it
        self.norm.weight.owner = self  # for the optimizer
        self.steps = 0

    def forward(self, x):
        y = super().forward(x) + self.level
        if self.training:
            rank, T = (0, 1) if self.group is None else (dist.get_rank(), 2)
            total = x.detach().chunk(T, 1)[rank].sum((0, 1))
            self.seen += total
            total = total if self.bug == "own tokens" else self.g(total)
            self.level += 0.01 * total * (self.bug != "rank 0 only" or rank == 0)
        return y

    def settle(self):
        self.steps += 1
        if self.steps == 2:  # after the last loss
            self.level += 1 + (self.bug == "settled") * dist.get_rank()


def leveled_subject(bug: str):
    def optimizer(parameters):
        made = torch.optim.SGD(parameters, 1e-2)
        trained = made.param_groups[0]["params"]
        (owner,) = [p.owner for p in trained if hasattr(p, "owner")]
        made.register_step_post_hook(lambda *_: owner.settle())
        return made

    subject = after_linear(Leveled, cutting(bug, "1"))
    subject.optimizer = optimizer
    return subject


class Keyed(Feed):
    """What it reads are keys with a norm over all heads: ranks have all of both."""

    def __init__(self):
        super().__init__()
        self.k_proj = nn.Linear(D, D, bias=False)
        self.k_norm = nn.Parameter(torch.ones(D))

    def forward(self, x):
        norm = self.k_norm.repeat(D // len(self.k_norm))
        return super().forward(self.k_proj(x) * norm)


def keyed_subject(bug: str):
    rows = f"up.weight up.bias {bug}"
    return after_linear(Keyed, cutting("", "1", rows))


# ---- An attention of four linears, and masks.


class Masked(Split):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(D, D)
        self.k = nn.Linear(D, D)
        self.v = nn.Linear(D, D)
        self.o = nn.Linear(D, D, bias=False)

    def forward(self, x):
        h = self.f(x)
        mask = torch.ones(S, S, dtype=torch.bool).tril()
        if self.bug == "no mask":
            mask = None
        elif self.bug == "window":
            mask = mask.triu(-2)
        y = attend((self.q(h), self.k(h), self.v(h)), attn_mask=mask)
        return x + self.g(self.o(y))


def masked_subject(bug: str):
    parts = lambda: dict(norm=nn.LayerNorm(D), mix=Masked(), head=nn.Linear(D, D))
    build = lambda: nn.Sequential(OrderedDict(parts()))
    return subject_of(build, cutting(bug, "mix", QKV, "o.weight"))


# ---- BatchNorm of features that are split: in train mode the bias in front of it has
# the gradient 0, but for rounding errors.


class Normed(Feed):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(2 * D)

    def forward(self, x):
        h = 0.1 * self.f(x)
        h = self.norm(self.up(h).transpose(1, 2)).transpose(1, 2).relu()
        return self.g(self.down(h))


def normed_subject(bug: str):
    rows = "up.weight up.bias norm.weight norm.bias norm.running_mean norm.running_var"
    return after_linear(Normed, cutting(bug, "1", rows))


# ---- GroupNorm on channels that are split.


class Channels(Split):
    def __init__(self):
        super().__init__()
        self.up = nn.Conv1d(S, 2 * D, 3, padding=1)
        self.norm = nn.GroupNorm(4, 2 * D)
        self.down = nn.Conv1d(2 * D, S, 3, padding=1, bias=False)

    def forward(self, x):
        return self.g(self.down(self.norm(self.up(self.f(x))).relu()))


def channels_subject(bug: str):
    def parallelize(model, group):
        model.norm.num_channels //= group.size()
        if bug != "full groups":
            model.norm.num_groups //= group.size()
        rows = "up.weight up.bias norm.weight norm.bias"
        return cutting(bug, "", rows)(model, group)

    return subject_of(Channels, parallelize)


# ---- So few rows that the last rank has none.


def empty_subject(bug: str):
    def parallelize(model, group):
        rows = slice(0, 2) if group.rank() == 0 else slice(2, 2)
        feed = model[1]
        for linear in (feed.up, feed.down):
            weight = linear.weight.detach()
            weight = weight[rows] if linear is feed.up else weight[:, rows]
            linear.weight = nn.Parameter(weight.clone())
        feed.up.bias = nn.Parameter(feed.up.bias.detach()[rows].clone())
        return tell(model, group)

    def narrow():
        feed = Feed()
        feed.up = nn.Linear(D, 2)
        feed.down = nn.Linear(2, D, bias=False)
        return feed

    return after_linear(narrow, parallelize)


# ---- A fused weight whose last row, a gate, all ranks have.


class GatedRows(Feed):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(D, 2 * D + 1, bias=False)
        del self.norm

    def forward(self, x):
        rows, gate = self.up.weight[:-1], self.up.weight[-1:]
        x = self.f(x)
        gate = self.f(gate, self.bug != "row of all")
        h = F.linear(x, rows) * F.linear(x, gate).sigmoid()
        return self.g(self.down(h))


def gated_rows_subject(bug: str):
    def parallelize(model, group):
        up = model[1].up
        rows = piece(up.weight[:-1], group)
        up.weight = nn.Parameter(torch.cat([rows, up.weight[-1:]]).detach())
        return cutting(bug, "1", "")(model, group)

    return after_linear(GatedRows, parallelize)


# ---- An average of a weight, which training keeps without a gradient.


class Averaged(Feed):
    def __init__(self):
        super().__init__()
        self.average = nn.Parameter(torch.zeros(2 * D, D), requires_grad=False)

    def forward(self, x):
        if self.training:
            rate = 0.2 if self.bug else 0.1
            self.average.data.lerp_(self.up.weight.data, rate)
        return super().forward(x)


def averaged_subject(bug: str):
    return after_linear(
        Averaged, cutting(bug, "1", "up.weight up.bias average", "down.weight")
    )


# ---- Layers that are no modules: their weights are stacked.


class Stacked(Split):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(2, D))
        self.up = nn.Parameter(torch.randn(2, 2 * D, D) / 4)
        self.down = nn.Parameter(torch.randn(2, D, 2 * D) / 4)
        self.head = nn.Linear(D, D)

    def forward(self, x):
        for scale, up, down in zip(self.scale, self.up, self.down):
            h = self.f(x * scale, not self.bug)
            x = x + self.g(F.linear(F.linear(h, up).relu(), down))
        return self.head(x)


def stacked_subject(bug: str):
    def parallelize(model, group):
        down = model.down.detach().chunk(group.size(), 2)
        model.down = nn.Parameter(down[group.rank()].clone())
        return cutting(bug, "", "", "up")(model, group)

    return subject_of(Stacked, parallelize)


# ---- A table of rotations (complex numbers), and a list of two matrices.


class Rolled(torch.autograd.Function):
    """The identity; in backward the samples are in another order."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad.roll(1, 0)


class Matrices(nn.Module):
    def __init__(self):
        super().__init__()
        weights = [nn.Parameter(torch.randn(2 * D, D) / 4) for _ in range(2)]
        self.weights = nn.ParameterList(weights)

    def forward(self, x):
        return [F.linear(x, weight) for weight in self.weights]


class Mix(Split):
    def forward(self, x):
        return (Rolled.apply(x) if self.bug == "rolled" else x).tanh()


class Turned(Split):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.w12 = Matrices()
        self.mix = Mix()
        self.down = nn.Linear(2 * D, D, bias=False)
        angles = torch.arange(S)[:, None] / (1 + torch.arange(D // 2))
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles))

    def forward(self, x):
        if self.bug == "input summed":
            x = Sum.apply(x, self.group)
        h = torch.view_as_complex(self.mix(self.norm(x)).unflatten(-1, (-1, 2)))
        h = torch.view_as_real(h * self.turns).flatten(-2)
        h = self.f(h)
        gate, up = self.w12(h)
        if self.bug == "swapped":
            gate, up = up, gate
        y = self.down(gate.sigmoid() * up)
        return self.g(y)


def turned_subject(bug: str):
    def parallelize(model, group):
        if bug == "turns":
            model[1].turns = model[1].turns.roll(group.rank(), 0)
        return cutting(bug, "1", "w12.weights.0 w12.weights.1")(model, group)

    return after_linear(Turned, parallelize)


# ---- Each rank has its own rows and runs some of the experts, for the rows of all.


class GatherPartial(Gather):
    """All-gather of rows; reduce-scatter in backward."""

    @staticmethod
    def backward(ctx, grad):
        return Gather.backward(ctx, Copy.backward(ctx, grad)[0])


class Spread(Split):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(D, D) for _ in range(EXPERTS)])

    def forward(self, x):
        if self.group is None:
            return sum(expert(x).tanh() for expert in self.experts)
        rank, size = self.group.rank(), self.group.size()
        function = Gather if self.bug else GatherPartial
        rows = function.apply(x, self.group, False)
        own = self.experts[rank * EXPERTS // size : (rank + 1) * EXPERTS // size]
        y = function.apply(
            sum(expert(rows).tanh() for expert in own), self.group, False
        )
        return sum(y.chunk(size, 1)).chunk(size, 1)[rank]


def spread_subject(bug: str):
    def parallelize(model, group):
        def own_rows(module, inputs):
            return inputs[0].chunk(group.size(), 1)[group.rank()]

        model[0].register_forward_pre_hook(own_rows)
        return tell(model, group, bug)

    def loss(output, target, group):
        if group is None:
            return F.mse_loss(output, target)
        own = target.chunk(group.size(), 1)[group.rank()]
        return Sum.apply((output - own).square().sum(), group) / target.numel()

    def after_backward(model):
        for p in model.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad, group=model[1].group)

    more = dict(loss=loss, after_backward=after_backward)
    return after_linear(Spread, parallelize, **more)


# ---- A group that layers ask for, as for a library's global. Closures of a model.


class Asks(Feed):
    def __init__(self, held: list):
        super().__init__()
        self.group_of = lambda: held[-1]

    def forward(self, x):
        self.group = self.group_of()
        return super().forward(x)


def asks_subject(bug: str):
    held = [None]

    def parallelize(model, group):
        held.append(group)
        return cutting(bug, "1")(model, group)

    return after_linear(lambda: Asks(held), parallelize)


class Closed(Feed):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(D, D)
        self.seen = []
        self.head = lambda x: self.out(x) * self.seen.pop()
        self.norm.register_forward_hook(lambda module, x, y: self.seen.append(y))

    def forward(self, x):
        return self.head(super().forward(x))


def closed_subject(bug: str):
    return after_linear(Closed, cutting(bug, "1"))


# ---- Dropout of other kinds, in a class whose name has the word.


class OwnDropout(nn.Module):
    def forward(self, x):
        return x * (torch.rand_like(x) > 0.3) / 0.7 if self.training else x


class DropoutFeed(Feed):
    def __init__(self):
        super().__init__()
        self.alpha = nn.AlphaDropout(0.3)
        self.own = OwnDropout()

    def forward(self, x):
        h = self.norm(x)
        if self.group is None:
            return x + self.down(self.own(self.alpha(self.up(h))))
        h = self.up(Copy.apply(h, self.group))
        if self.bug == "scaled in training" and self.training:
            h = 1.5 * h
        state = torch.get_rng_state()
        for name in ("alpha", "own"):
            torch.manual_seed(0 if self.bug == name else dist.get_rank())
            h = getattr(self, name)(h)
        torch.set_rng_state(state)
        return x + Sum.apply(F.linear(h, self.down.weight), self.group)


def drops_subject(bug: str):
    return after_linear(DropoutFeed, cutting(bug, "1"))


# ---- A bias that rank 0 adds, and one that all do. A copy may have no gradient.


class Shifted(Feed):
    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.randn(D))
        self.last = nn.Parameter(torch.randn(D))

    def forward(self, x):
        if self.group is None:
            return super().forward(x) + self.first + self.last
        h = self.up(Copy.apply(self.norm(x), self.group)).relu()
        y = F.linear(h, self.down.weight)
        is_other = self.group.rank() > 0
        y = Sum.apply(y if is_other else y + self.first, self.group)
        is_detached = is_other and self.bug == "detached"
        return x + y + (self.last.detach() if is_detached else self.last)


def shifted_subject(bug: str):
    def parallelize(model, group):
        cutting(bug, "1")(model, group)
        if group.rank():
            model[1].first.requires_grad_(False)  # its copy is not used
            model[1].last.requires_grad_(bug != "frozen")
        return model

    return after_linear(Shifted, parallelize)


# ---- An attribute that has the name of a wrapper's.


class Residual(Split):
    def __init__(self):
        super().__init__(module=Feed(), norm=nn.LayerNorm(D))

    def forward(self, x):
        return x + self.module(self.norm(x))


class Wrapper(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x)


def wrapped_subject(bug: str):
    def parallelize(model, group):
        return Wrapper(cutting(bug and "scaled too much", "1.module")(model, group))

    return after_linear(Residual, parallelize)


# ---- Sparse gradients, and a module inside of a transform of torch.func.


class Mapped(Feed):
    def forward(self, x):
        return super().forward(x) + torch.func.vmap(self.norm)(x)


def sparse_subject(bug: str):
    def build():
        table = nn.Embedding(V, D, sparse=True)
        return nn.Sequential(table, Mapped(), nn.Linear(D, V))

    sgd = lambda parameters: torch.optim.SGD(parameters, 0.1)
    return subject_of(build, cutting(bug, "1"), batch=tokens_batch, optimizer=sgd)


# model → its bugs, and what the first finding of each begins with.
# ---- Outputs of which the loss uses one, and layers that pass on a dict.


class Several(Split):
    def __init__(self):
        super().__init__(feed=Feed())

    def forward(self, x):
        x = self.feed(x)
        rows = x.detach()
        pooled = x.mean(1)
        best = x.argmax(-1)
        if self.feed.group is not None:  # wrong, and the loss cannot show it
            rows = rows.flip(1)
            pooled = 2 * pooled
            best = x.chunk(2, -1)[0].argmax(-1)
        return {"scores": x, "rows": rows, "more": (pooled, x.sum(1)), "best": best}


def several_subject(bug: str):
    def loss(output, target, group):
        factor = 1 if group is None or not bug else 1.5
        return factor * F.mse_loss(output["scores"], target)

    return subject_of(Several, cutting("", "feed"), loss=loss)


class Packed(Feed):
    def forward(self, pack):
        second = pack["second"] + pack["x"].square().mean()
        x = super().forward(pack["x"])
        return {"second": second, "x": 1.5 * x if self.bug == "packed" else x}


class Packs(Split):
    def __init__(self):
        super().__init__(layers=nn.ModuleList([Packed(), Packed()]))

    def forward(self, x):
        pack = {"second": 0.0, "x": x}
        for layer in self.layers:
            pack = layer(pack)
        return pack["x"] + pack["second"]


def packs_subject(bug: str):
    return subject_of(Packs, cutting(bug, "layers.0 layers.1"))


# ---- A list of matrices that each rank numbers from 0; a tensor changed in place.


class Weights(Split):
    def __init__(self):
        super().__init__()
        parts = [nn.Parameter(torch.randn(D, D)) for _ in range(EXPERTS)]
        self.parts = nn.ParameterList(parts)

    def forward(self, x):
        x = self.f(x)
        y = sum((x @ part).tanh() for part in self.parts)
        if self.bug == "list scaled":
            y = 1.5 * y
        return self.g(y)


def weights_subject(bug: str):
    def parallelize(model, group):
        own = model[1]
        count = EXPERTS // group.size()
        first = group.rank() * count
        own.parts = nn.ParameterList(list(own.parts)[first : first + count])
        return tell(model, group, bug)

    return after_linear(Weights, parallelize)


class InPlace(Feed):
    """It returns the tensor that another module has made, and adds its input to it."""

    def __init__(self):
        super().__init__()
        self.post = nn.LayerNorm(D)

    def forward(self, x):
        h = self.up(self.f(self.norm(x))).relu()
        y = self.post(self.g(self.down(h)))
        y += x
        if self.bug == "added twice":
            y += x
        return y


def in_place_subject(bug: str):
    build = lambda: nn.Sequential(nn.Linear(D, D), InPlace(), nn.Linear(D, D))
    return subject_of(build, cutting(bug, "1"))


# ---- A module without f. What it reads itself, by no module, is a norm's output.


class Inner(Feed):
    def __init__(self):
        super().__init__()
        self.mix = nn.Parameter(torch.randn(D, D))

    def forward(self, x):
        return super().forward(x @ self.mix)


def inner_subject(bug: str):
    build = lambda: nn.Sequential(nn.LayerNorm(D), Inner())
    return subject_of(build, cutting(bug, "1"))


# ---- Gates and values of a unit together in one weight, so that one slice is right.


class Units(Feed):
    def __init__(self):
        super().__init__()
        self.gate_up = nn.Linear(D, 4 * D, bias=False)
        del self.up

    def forward(self, x):
        h = self.f(x)
        gate, up = self.gate_up(h).unflatten(-1, (-1, 2)).unbind(-1)
        y = self.g(self.down(gate.sigmoid() * up))
        return y + 0.1 * y.roll(1, -1) if self.bug == "units rolled" else y


def units_subject(bug: str):
    return after_linear(Units, cutting(bug, "1", "gate_up.weight"))


# ---- Each rank computes two linears on its own rows.


class Divided(Split):
    def __init__(self):
        super().__init__(first=nn.Linear(D, D), second=nn.Linear(D, D))

    def forward(self, x):
        if self.group is None:
            return self.second(self.first(x))
        x = self.first(x.chunk(self.group.size(), 1)[self.group.rank()])
        if self.bug:
            x = Copy.apply(x, self.group)
        return Gather.apply(self.second(x), self.group, False)


def divided_subject(bug: str):
    def after_backward(model):
        for p in model.parameters():
            dist.all_reduce(p.grad)

    cut = cutting(bug, "", "", "")
    return subject_of(Divided, cut, after_backward=after_backward)


# ---- An embedding that masks rows of other ranks, and biases in one parameter.


class TableRows(nn.Embedding, Split):
    def forward(self, tokens):
        if self.group is None:
            return super().forward(tokens)
        tokens = tokens - len(self.weight) * self.group.rank()
        is_here = (tokens >= 0) & (tokens < len(self.weight))
        x = super().forward(tokens.clamp(0, len(self.weight) - 1))
        return Sum.apply(x if self.bug else x * is_here[..., None], self.group)


def table_rows_subject(bug: str):
    build = lambda: nn.Sequential(TableRows(V, D), nn.Linear(D, V))
    return subject_of(build, cutting(bug, "0", "weight", ""), batch=tokens_batch)


class Biases(Feed):
    def __init__(self):
        super().__init__()
        self.biases = nn.Parameter(torch.randn(3, D))

    def forward(self, x):
        first, second, third = self.biases
        second = second.detach() if self.bug == "row detached" else second
        return super().forward(x + first).tanh() * second + third


def biases_subject(bug: str):
    return after_linear(Biases, cutting(bug, "1"))


# ---- Several modules read one tensor, as the layers of a decoder read a memory.


class Memory(Split):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.readers = nn.ModuleList([Feed(), Feed(), Feed()])

    def forward(self, x):
        memory = self.norm(x)
        if self.bug == "f in front of all":
            memory = Copy.apply(memory, self.group)
        for number, reader in enumerate(self.readers):
            if self.bug == "detached from 1" and number == 1:
                memory = memory.detach()
            x = x + reader(memory)
        return x


def memory_subject(bug: str):
    def parallelize(model, group):
        if bug == "flipped":
            model.readers[1].register_forward_hook(lambda m, inputs, y: y.flip(1))
        return cutting(bug, "readers.0 readers.1 readers.2")(model, group)

    return subject_of(Memory, parallelize)


class PostNormed(Feed):
    """The norm is behind the linears."""

    def forward(self, x):
        y = self.down(self.up(self.f(x)).relu())
        if self.bug == "norm of partial sums":
            return x + self.g(self.norm(y))
        return x + self.norm(self.g(y))


def post_normed_subject(bug: str):
    return after_linear(PostNormed, cutting(bug, "1"))


# ---- Rows of two outputs and a parameter; the loss compares the rows of all ranks.


class Towers(Split):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(D, D)
        self.second = nn.Linear(D, D)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        if self.group is not None:
            x = x.chunk(self.group.size(), 1)[self.group.rank()]
        return self.first(x), self.second(x), self.scale


def towers_subject(bug: str):
    def loss(output, target, group):
        first, second, scale = output
        if group is not None:
            gather_all = Gather if bug == "own slice" else GatherPartial
            second = gather_all.apply(second, group, False)
        total = (scale * first @ second.transpose(1, 2)).square().mean()
        return total if group is None else Sum.apply(total / group.size(), group)

    def after_backward(model):
        for name, p in model.named_parameters():
            if not (bug == "no sum" and name == "scale"):
                dist.all_reduce(p.grad)

    return subject_of(Towers, tell, loss=loss, after_backward=after_backward)


# ---- An optimizer with an average of weights, and another rate of shards.


def average_subject(bug: str):
    def optimizer(named_parameters):
        named = dict(named_parameters)
        weight = named["1.up.weight"]
        rate = 2e-3 if bug and len(weight) < 2 * D else 1e-3
        groups = [{"params": [weight], "lr": rate}]
        rest = [p for name, p in named.items() if name != "1.up.weight"]
        adamw = torch.optim.AdamW([*groups, {"params": rest, "lr": 1e-3}])

        def update(*_):
            named["1.average"].data.lerp_(weight.data, 0.1)

        adamw.register_step_post_hook(update)
        return adamw

    subject = averaged_subject("")
    subject.optimizer = optimizer
    return subject


# ---- What the first layer returns is also an output of the model.


class States(Split):
    def __init__(self):
        super().__init__(first=Feed(), second=Feed())

    def forward(self, x):
        state = self.first(x)
        return self.second(x if self.bug == "state skipped" else state), state


def states_subject(bug: str):
    def parallelize(model, group):
        cutting(bug, "first second")(model, group)
        if bug == "state averaged":
            model.second.bug = "residual averaged"
        return model

    loss = lambda output, target: sum(F.mse_loss(x, target) for x in output)
    return subject_of(States, parallelize, loss=loss)


# ---- A router with a second loss; a module that is called three times.


class Routed(Split):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(D, 2 * D)
        self.up = nn.Linear(D, 2 * D)
        self.down = nn.Linear(2 * D, D, bias=False)

    def forward(self, x):
        weights = self.gate(x).softmax(-1)
        second = weights.square().sum(-1).mean()
        if self.bug == "second loss detached":
            second = second.detach()
        h = self.up(self.f(x)).tanh()
        weights = self.f(weights)
        if self.group is not None:
            weights = weights.chunk(self.group.size(), -1)[self.group.rank()]
        if self.bug == "weights detached":
            weights = weights.detach()
        return x + self.g(self.down(h * weights)), second


def routed_subject(bug: str):
    loss = lambda output, target: F.mse_loss(output[0], target) + output[1]
    return after_linear(Routed, cutting(bug, "1"), loss=loss)


class Looped(Split):
    def __init__(self):
        super().__init__(layer=GatedLayer(), head=nn.Linear(D, D))

    def forward(self, x):
        for _ in range(3):
            x = self.layer(x)
        return self.head(x)


class GatedLayer(Split):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(D)
        self.gate = nn.Linear(D, 2 * D, bias=False)
        self.up = nn.Linear(D, 2 * D)
        self.down = nn.Linear(2 * D, D, bias=False)

    def forward(self, x):
        h = self.norm(x)
        gate = self.gate(self.f(h, self.bug != "gate without f"))
        return x + self.g(self.down(gate.sigmoid() * self.up(self.f(h))))


def looped_subject(bug: str):
    return subject_of(Looped, cutting(bug, "layer", "gate.weight up.weight up.bias"))


# ---- Quantized weights with a scale per group; a convolution behind a fused linear.


class Scaled(Split):
    def __init__(self):
        super().__init__()
        self.register_buffer("weight", torch.randint(-8, 8, (D, 2 * D)).float())
        self.register_buffer("scale", torch.rand(D, 4) + 0.5)

    def forward(self, x):
        columns = torch.arange(self.weight.shape[1]) // (D // 2)
        return self.g(F.linear(x, self.weight * self.scale[:, columns]))


def scaled_subject(bug: str):
    columns = "1.weight" if bug == "scale in full" else "1.weight 1.scale"
    build = lambda: nn.Sequential(FLinear(D, 2 * D), Scaled(), nn.Linear(D, D))
    return subject_of(build, cutting(bug, "", "0.weight 0.bias", columns))


class FLinear(nn.Linear, Split):
    """A column-parallel linear."""

    def forward(self, x):
        return super().forward(self.f(x))


class Convolved(Split):
    def __init__(self):
        super().__init__()
        self.mixed = nn.Linear(D, 2 * D, bias=False)
        self.conv = nn.Conv1d(2 * D, 2 * D, 3, padding=1, groups=2 * D, bias=False)
        self.out = nn.Linear(D, D, bias=False)

    def forward(self, x):
        h = self.mixed(self.f(x)).transpose(1, 2)
        first, second = self.conv(h).transpose(1, 2).chunk(2, -1)
        return self.g(self.out(first.tanh() * second))


def convolved_subject(bug: str):
    conv = "conv.weight" if bug == "conv as one" else "conv.weight/2"

    def parallelize(model, group):
        model.conv.groups //= group.size()
        return cutting(bug, "", f"mixed.weight/2 {conv}", "out.weight")(model, group)

    return subject_of(Convolved, parallelize)


# ---- A rank without targets, or with a mask of nothing; a loss of sharded logits.


class NanBehind(torch.autograd.Function):
    """The identity; a gradient of nan on rank 1."""

    @staticmethod
    def forward(ctx, x, rank):
        ctx.rank = rank
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad / (0 * grad if ctx.rank == 1 else 1), None


class Counted(Split):
    def __init__(self):
        super().__init__(feed=nn.Linear(D, D), head=nn.Linear(D, V))

    def forward(self, x):
        x = self.feed(x)
        if self.bug == "empty mask":
            count = torch.tensor(float(self.group.rank() == 0)).to(x)
            x = x * count / count
        if self.bug == "empty backward":
            x = NanBehind.apply(x, self.group.rank())
        return self.head(self.f(x))


def counted_subject(bug: str):
    def batch(step):
        target = torch.randint(V, (3, S))
        target[:, S // 2 :] = -100
        return torch.randn(3, S, D), target

    def loss(output, target, group):
        if group is None:
            return F.cross_entropy(output.transpose(1, 2), target)
        if bug == "no targets":
            target = target.chunk(group.size(), 1)[group.rank()]
            rows = output.chunk(group.size(), 1)[group.rank()]
            return F.cross_entropy(rows.transpose(1, 2), target)
        whole = Gather.apply(output.transpose(1, 2), group, False)
        return F.cross_entropy(whole, target)

    rows = "" if bug == "no targets" else "head.weight head.bias"
    return subject_of(Counted, cutting(bug, "", rows, ""), batch=batch, loss=loss)


def entropy_subject(bug: str):
    """The loss is the entropy of sharded logits, and what f and g do in it."""

    def loss(output, target, group):
        here = Split()
        here.group = group
        total = here.g(output.exp().sum(-1, keepdim=True)).log()
        parts = output - here.f(total)
        entropy = (parts.exp() * parts).sum(-1)
        if bug == "not tracked" and group is not None:
            entropy = entropy + total[..., 0] * (dist.get_rank() == 0)
            dist.all_reduce(entropy)
            return entropy.mean()
        entropy = entropy if bug == "own columns" else here.g(entropy)
        return entropy.mean() + total.mean()

    cut = cutting("", "", "head.weight head.bias", "")
    return subject_of(Counted, cut, loss=loss)


MODELS = {
    fused_subject: {
        "no sum": "forward partial, but for the bias",
        "bias before": "forward bias",
        "mean": "forward 1/T",
        "contiguous": "fused",
        "detached": "gradient of its uses: 0 × head + 1 × wte",
        "broadcast": "wrong piece",
        "float32": "forward right but for rounding",
        "norm on rank 0": "norm",
        "wrong slice": "gradient another rank's piece",
        "own rate": "update differs between replicas",
        "sent after a step": ["update", "attn.c_attn.weight"],
        "decay": ["update", "attn.c_attn.weight"],
        "one rank skips": "update missing on ranks [1]",
        "one rank skips a step": "update missing on ranks [1]",
        "made before": "not in the optimizer",
    },
    renamed_subject: {
        "no f": "gradient sum",
        "bias": "forward bias",
        "scaled": ["forward 1.5 times", "0"],
        "own rows": ["loss of each rank's part", "loss"],
        "own sum": ["loss of each rank's part", "loss"],
        "pieces added": [
            "gradient differs between replicas",
            "decoder.1.linear_fc2.bias",
        ],
    },
    sharp_subject: {},
    odd_subject: {"memory": "gradient sum", "stale": ["later loss", "loss"]},
    pairs_subject: {"no f": "backward partial"},
    lists_subject: {"bias": ["forward bias", "1.proj"]},
    float32_loss_subject: {
        "no f": "backward partial",
        "slow decay": ["update", "0.up.weight"],
    },
    integers_subject: {"no f": ["gradient sum", "0.weight"]},
    recomputed_subject: {"state not kept": "dropout recomputed"},
    experts_subject: {
        "router": "gradient sum",
        "wrong expert": "wrong parameter",
        "experts summed": "gradient of several pieces",
        "scale": "forward wrong",
        "shared expert": ["forward wrong", "1"],
    },
    lora_subject: {
        "A": "gradient sum",
        "B": "gradient sum",
        "frozen": ["gradient frozen on the ranks", "2.lora_B"],
        "trained": ["gradient of a frozen parameter", "2.base.bias"],
    },
    plan_subject: {"norm": "gradient sum"},
    block_subject: {
        "local width": ["forward", "1"],
        "bias on rank 0": ["forward right on", "1"],
        "flat": ["forward", "the model"],
        "leaky": ["backward of a module", "1"],
        "detached": ["backward cut off", "1.up"],
        "longer": ["second batch", "loss"],
        "no dropout": ["dropout missing", "loss"],
        "rate": ["dropout rate", "1"],
        "train only": ["train mode", "1.norm.weight"],
        "same masks": ["dropout same", "1"],
        "recomputed": ["dropout recomputed", "1"],
        "rounded": ["not a piece", "1.up.weight"],
        "rows": ["gradient unexplained", "1.up.weight"],
        "gradients clipped": ["clip", "clip()"],
        "clipped twice": ["clip", "clip()"],
        "local norm": ["clip", "clip()"],
        "counted": ["norm", "clip()"],
    },
    twice_subject: {"second call": ["forward", "block"]},
    rows_subject: {
        "reduced again": ["accumulation reduced again", "1.weight"],
        "overwritten": ["accumulation", "1.weight"],
    },
    columns_subject: {"pieces summed": ["gradient of several pieces", "1.weight"]},
    convolution_subject: {"bias": ["forward bias", "1"]},
    stack_subject: {"no f": ["gradient sum", "0.norm.weight"]},
    rejoined_subject: {"no f": ["backward slice", "the model"]},
    ended_subject: {"summed again": ["loss backward", "the model"]},
    join_subject: {"no f": ["backward partial", "1"]},
    doubled_subject: {
        "idle": ["update missing on ranks [1]", "1.idle"],
        "rate": ["later loss", "loss"],
        "apart": ["gradient not the same on replicas", "1.weight"],
    },
    groups_subject: {"read": ["fused", "attn.c_attn.weight"]},
    unused_subject: {"first rows": ["wrong piece", "1.scale"]},
    scattered_subject: {"wrong": ["forward wrong", "1"]},
    headed_subject: {"no f": ["gradient sum", "norm.weight"]},
    feeds_subject: {
        "behind f": ["backward T times", "2"],
        "f in bfloat16": ["backward right but for rounding", "the forward of 1"],
        "added before": ["forward wrong", "1"],
        "left out": ["forward wrong", "1"],
        "scaled too much": ["forward wrong", "1"],
        "f twice": ["backward T times", "1"],
        "summed twice": ["forward wrong", "1"],
        "bias left out": ["gradient sum", "1.norm.bias"],
        "residual averaged": ["backward lost term", "1"],
        "residual detached": ["backward lost term", "1"],
    },
    layout_subject: {"no f": ["gradient sum", "b.norm.weight"]},
    flat_subject: {"no f": ["gradient sum", "b.norm.weight"]},
    shuffled_subject: {"no f": ["gradient sum", "b.norm.weight"]},
    branches_subject: {"no f": ["gradient sum", "b.norm.weight"]},
    outputs_subject: {"second loss summed": ["forward T times", "the model"]},
    table_subject: {
        "rows of a head": ["gradient differs between replicas", "embed.weight"]
    },
    padded_subject: {"local index": ["gradient unexplained", "embed.weight"]},
    moments_subject: {
        "own mean": ["train buffer", "1.average"],
        "own mean, assigned": ["train buffer", "1.average"],
    },
    kept_moments_subject: {"own mean, kept": ["train buffer", "1.average"]},
    masked_subject: {
        "no mask": ["forward wrong", "mix"],
        "window": ["forward wrong", "mix"],
    },
    channels_subject: {"full groups": ["forward wrong", "norm"]},
    gated_rows_subject: {"row of all": ["gradient sum", "1.up.weight"]},
    averaged_subject: {"average": ["update", "1.average"]},
    stacked_subject: {"stacked": ["gradient differs between replicas", "scale"]},
    turned_subject: {
        "input summed": ["forward T times", "1"],
        "swapped": ["forward wrong", "1"],
        "rolled": ["backward of a module", "1.mix"],
        "turns": ["buffer", "1.turns"],
    },
    spread_subject: {"slices": ["backward of a module", "1"]},
    packs_subject: {"packed": ["forward 1.5 times", "layers.0"]},
    weights_subject: {"list scaled": ["forward 1.5 times", "1"]},
    in_place_subject: {"added twice": ["forward wrong", "1"]},
    inner_subject: {"no f": ["gradient differs between replicas", "1.mix"]},
    units_subject: {"units rolled": ["forward wrong", "1"]},
    divided_subject: {"summed": ["backward of a module", "the model"]},
    table_rows_subject: {"unmasked": ["forward wrong", "0"]},
    biases_subject: {"row detached": ["gradient unexplained", "1.biases"]},
    several_subject: {"own loss": ["loss", "loss"]},
    normed_subject: {},
    asks_subject: {"no f": ["gradient sum", "1.norm.weight"]},
    closed_subject: {"no f": ["gradient differs between replicas", "1.norm.weight"]},
    drops_subject: {
        "alpha": ["dropout same", "1.alpha"],
        "own": ["dropout same", "1.own"],
        "scaled in training": ["train mode", "loss"],
    },
    shifted_subject: {
        "frozen": ["gradient frozen on the ranks", "1.last"],
        "detached": ["gradient None", "1.last"],
    },
    wrapped_subject: {"scaled, wrapped": ["forward wrong", "1.module"]},
    sparse_subject: {"no f": ["gradient differs between replicas", "1.norm.weight"]},
    empty_subject: {},
    memory_subject: {
        "f in front of all": ["backward T times", "the model"],
        "detached from 1": ["backward cut off", "readers.1"],
        "flipped": ["forward in another order", "readers.1"],
    },
    towers_subject: {
        "own slice": ["loss backward", "loss"],
        "no sum": ["gradient sum", "scale"],
    },
    average_subject: {"rate of shards": ["update", "1.up.weight"]},
    states_subject: {
        "state averaged": ["backward lost term", "second"],
        "state skipped": ["forward wrong", "the model"],
    },
    routed_subject: {
        "second loss detached": ["backward lost term", "1"],
        "weights detached": ["backward lost term", "1"],
    },
    looped_subject: {"gate without f": ["backward partial", "layer.norm"]},
    scaled_subject: {"scale in full": ["buffer cut in another way", "1.scale"]},
    convolved_subject: {"conv as one": ["forward wrong", "conv"]},
    counted_subject: {
        "no targets": ["loss nan", "loss"],
        "empty mask": ["forward nan on ranks [1]", "the model"],
        "empty backward": ["backward nan", "feed"],
    },
    entropy_subject: {
        "own columns": ["loss", "loss"],
        "not tracked": ["backward of an untracked collective", "loss"],
    },
    leveled_subject: {
        "own tokens": ["train buffer", "1.level"],
        "rank 0 only": ["train buffer", "1.level"],
        "settled": ["train buffer", "1.level"],
    },
    keyed_subject: {"k_norm": ["other rows than its weight", "1.k_norm"]},
    post_normed_subject: {
        "norm of partial sums": ["forward", "1.norm"],
    },
}
