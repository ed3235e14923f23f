"""Lesson 02: a transformer under tensor parallelism.

Attention splits by heads as an MLP splits by columns: q, k and v by column, o by row.
So a layer needs two all-reduces forward and two backward, and what lies between the
blocks (LayerNorm, residual, dropout, embedding) stays whole and equal on every rank.

Run it (1, 2 or 4 ranks; or 3, 6, 8: more heads, a wider D, so another loss):

    torchrun --standalone --nproc_per_node=2 02_transformer_tp.py

What you will see: a decoder's first steps on this text, byte by byte, in one process,
under TP and by PyTorch's DTensor, side by side: losses, every gradient, parameters
after the last step. Then what a rank sends and holds, against formulas.

Try (bytes get a ✗): nn.RMSNorm for LayerNorm in DecoderLayer; TP for attention alone
(leave out parallelize_layer's last line); a gated MLP, down(silu(gate(x)) · up(x)).

How to read this file: NEW is the lesson, RUN what it prints, BREAK IT lists its bugs
(`--break list`). If time is short: CoreAttention, parallelize_layer, global_norm.

Shapes: B batch, S sequence, D hidden, F MLP width (4·D), N heads, K key/value heads,
    H = D/N head size, V vocabulary, L layers, T ranks in the TP group. UPPERCASE is the
    full size, lowercase this rank's slice. Replicate() is PyTorch's word for what every
    rank holds whole, Shard(dim) for what is cut along a dim.

Sources: Megatron-LM, arXiv:1909.08053, sec. 3 (the split, dropout); arXiv:2205.05198
    (what is kept for backward); RoFormer, arXiv:2104.09864 (rotary embedding).
"""

from __future__ import annotations

import argparse
import copy
import functools
import gc
import hashlib
import inspect
import json
import math
import os
import re
import signal
import sys
import textwrap
import time
import traceback
from collections import Counter, namedtuple
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, parallel
from torch.utils._python_dispatch import TorchDispatchMode

# ==== NEW in 02: a transformer under tensor parallelism

# From lesson 01: f (CopyToTP) is the identity forward and an all-reduce backward, g
# (ReduceFromTP) the other way round; ColumnParallelLinear has a slice of the outputs,
# RowParallelLinear of the inputs and then g; tp_mlp is one after the other. A parameter
# remembers how it was cut: p.shardings = ((dim, group), …), and has none if it is whole.
# From lesson 00: shard(x, dim, group) is this rank's slice of what every rank holds.

# The reference: one process, plain PyTorch. No collective, no group.

Config = namedtuple("Config", "vocab_size hidden heads kv_heads layers seq_len dropout")


def rotary_table(seq_len: int, head_size: int) -> tuple[Tensor, Tensor]:
    """cos and sin [S, H] of the angle position · 10000^(−2i/H) (arXiv:2104.09864)."""
    frequency = 10000.0 ** (-torch.arange(0, head_size, 2) / head_size)
    angle_SH = torch.outer(torch.arange(seq_len), frequency).repeat(1, 2)
    return angle_SH.cos(), angle_SH.sin()


def rotate(x_BNSH: Tensor, cos_SH: Tensor, sin_SH: Tensor) -> Tensor:
    """Turn each pair (i, i + H/2) of a head by its position's angle."""
    first, second = x_BNSH.chunk(2, -1)
    return x_BNSH * cos_SH + torch.cat([-second, first], -1) * sin_SH


class Dropout(nn.Dropout):
    """nn.Dropout, but drawn as ShardedDropout draws; its mask has a byte a number."""

    def forward(self, x: Tensor) -> Tensor:
        if self.p == 0 or not self.training:
            return x
        keep = torch.rand(x.shape, device=x.device) >= self.p
        return x * keep / (1 - self.p)


class CoreAttention(nn.Module):
    """The part of attention that has no weights. Heads never meet here, so it works on
    N and K of them, or on N/T and K/T. Each key/value head serves N/K query heads.

    Shapes: q [B, S, N·H], k and v [B, S, K·H], tables [S or more, …] → [B, S, N·H].
    """

    def __init__(self, head_size: int, dropout: float):
        super().__init__()
        self.head_size = head_size
        self.dropout = Dropout(dropout)  # of the attention weights

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tables: tuple) -> Tensor:
        S = q.shape[1]
        cos_SH, sin_SH, future_SS = tables
        q_BNSH = q.unflatten(-1, (-1, self.head_size)).transpose(1, 2)
        k_BKSH = k.unflatten(-1, (-1, self.head_size)).transpose(1, 2)
        v_BKSH = v.unflatten(-1, (-1, self.head_size)).transpose(1, 2)
        q_BNSH = rotate(q_BNSH, cos_SH[:S], sin_SH[:S])
        k_BKSH = rotate(k_BKSH, cos_SH[:S], sin_SH[:S])
        queries_per_kv = q_BNSH.shape[1] // k_BKSH.shape[1]
        k_BNSH = k_BKSH.repeat_interleave(queries_per_kv, 1)
        v_BNSH = v_BKSH.repeat_interleave(queries_per_kv, 1)
        scores_BNSS = q_BNSH @ k_BNSH.mT / math.sqrt(self.head_size)
        scores_BNSS = scores_BNSS.masked_fill(future_SS[:S, :S], float("-inf"))
        weights_BNSS = self.dropout(scores_BNSS.softmax(-1))
        return (weights_BNSS @ v_BNSH).transpose(1, 2).flatten(2)


def apply_each(x_BSD: Tensor, *linears: nn.Module) -> list[Tensor]:
    """The same x through several linears."""
    return [linear(x_BSD) for linear in linears]


class Attention(nn.Module):
    """Causal attention. Shapes: x [B, S, D] → [B, S, D]."""

    def __init__(self, config: Config):
        super().__init__()
        D, H = config.hidden, config.hidden // config.heads
        self.q_proj = nn.Linear(D, config.heads * H)
        self.k_proj = nn.Linear(D, config.kv_heads * H)
        self.v_proj = nn.Linear(D, config.kv_heads * H)
        self.project = apply_each  # how x gets to the three; TP puts f there
        self.core = CoreAttention(H, config.dropout)
        self.o_proj = nn.Linear(D, D)

    def forward(self, x_BSD: Tensor, tables: tuple) -> Tensor:
        q, k, v = self.project(x_BSD, self.q_proj, self.k_proj, self.v_proj)
        return self.o_proj(self.core(q, k, v, tables))


class DecoderLayer(nn.Module):
    """Pre-LayerNorm: x + dropout(attention(norm(x))), then + dropout(MLP(norm(x)))."""

    def __init__(self, config: Config):
        super().__init__()
        D = config.hidden
        self.input_layernorm = nn.LayerNorm(D)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.LayerNorm(D)
        self.mlp = MLP(D, 4 * D)
        self.dropout = Dropout(config.dropout)

    def forward(self, x_BSD: Tensor, tables: tuple) -> Tensor:
        # By keywords, as Hugging Face's layers call their attention.
        y_BSD = self.self_attn(x_BSD=self.input_layernorm(x_BSD), tables=tables)
        x_BSD = x_BSD + self.dropout(y_BSD)
        y_BSD = self.mlp(self.post_attention_layernorm(x_BSD))
        return x_BSD + self.dropout(y_BSD)


class Transformer(nn.Module):
    """The decoder. Shapes: tokens [B, S] int64 → logits [B, S, V]."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden)
        self.lm_head = nn.Linear(config.hidden, config.vocab_size)
        cos_SH, sin_SH = rotary_table(config.seq_len, config.hidden // config.heads)
        self.register_buffer("cos", cos_SH, persistent=False)
        self.register_buffer("sin", sin_SH, persistent=False)
        future_SS = torch.ones(config.seq_len, config.seq_len, dtype=torch.bool).triu(1)
        self.register_buffer("future", future_SS, persistent=False)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        x_BSD = self.embed_tokens(tokens_BS)
        for layer in self.layers:
            x_BSD = layer(x_BSD, (self.cos, self.sin, self.future))
        return self.lm_head(self.norm(x_BSD))


# ---- Tensor parallelism: the same model, edited


class ShardedDropout(nn.Module):
    """Dropout where x is a slice along dim: each rank must drop elements of its own.

    Every rank draws the same whole mask (all are seeded alike) and keeps its slice; so
    plain Dropout, where x is whole (a block's output), still drops the same on all
    ranks, as it must. For slices Megatron seeds another generator, by tp_rank.
    """

    def __init__(self, p: float, dim: int, tp_group: dist.ProcessGroup):
        super().__init__()
        self.p, self.dim, self.tp_group = p, dim, tp_group

    def forward(self, x: Tensor) -> Tensor:
        if self.p == 0 or not self.training:
            return x
        whole = list(x.shape)
        whole[self.dim] *= self.tp_group.size()
        keep = torch.rand(whole, device=x.device) >= self.p
        return x * shard(keep, self.dim, self.tp_group) / (1 - self.p)


def copy_then_apply_each(x_BSD: Tensor, *linears: ColumnParallelLinear) -> list[Tensor]:
    """f once, over q's group, for all linears that read x: one sum of their dL/dx."""
    return apply_each(CopyToTP.apply(x_BSD, linears[0].tp_group), *linears)


@functools.cache  # once for all layers: torch names a group by counting them
def kv_groups(heads: int, tp_group: dist.ProcessGroup) -> tuple:
    """If T ranks share fewer heads, rank t has head t // c, c = T/heads. Two groups:
    one rank of each head, which together hold them all; and the c ranks with mine."""
    ranks = torch.tensor(dist.get_process_group_ranks(tp_group)).view(heads, -1)
    head, place = divmod(tp_group.rank(), ranks.shape[1])
    options = {"timeout": COMM.limit, "use_local_synchronization": True}
    kv_group = dist.new_group(ranks[:, place].tolist(), group_desc="kv", **options)
    copies = dist.new_group(ranks[head].tolist(), group_desc="copy", **options)
    return kv_group, copies


def split_heads(full: nn.Linear, heads: int, tp_group) -> ColumnParallelLinear:
    """Columns by whole heads; with fewer heads than ranks, some ranks hold copies."""
    if heads % tp_group.size() == 0:
        return ColumnParallelLinear(full, tp_group, copy_input=False)
    if tp_group.size() % heads:
        raise ValueError(f"{heads} key/value heads on {tp_group.size()} ranks")
    kv_group, copies = kv_groups(heads, tp_group)
    linear = ColumnParallelLinear(full, kv_group, copy_input=False)
    for p in linear.parameters():
        p.copies = copies
        # A copy met its own rank's queries only, so it has one of c terms of dL/dp.
        p.register_hook(lambda grad: all_reduce(grad, copies))
    return linear


def parallelize_layer(layer: DecoderLayer, tp_group: dist.ProcessGroup) -> None:
    """Put parallel modules in the place of a layer's linears: Megatron's split.

    Attention by heads: q, k and v by column, each on its own, so that a rank's queries
    meet their own keys and values; then o by row. What enters and leaves attention and
    MLP stays whole, and equal on all ranks: LayerNorm, dropout, residual.

    Shapes (global → on a rank, placement):
        q_proj.weight          [D, D]    → [D/T, D]       Shard(0), N/T heads
        k_proj, v_proj.weight  [K·H, D]  → [k·H, D]       Shard(0), k = max(K/T, 1)
        o_proj.weight          [D, D]    → [D, D/T]       Shard(1)
    Communication: 2 all-reduces forward (g of o_proj and of down_proj) and 2 backward
        (f before q, k and v together, and before up_proj), each of B·S·D elements.
        If T > K, backward: k's and v's gradients are summed over their copies.
    Raises: ValueError if T does not divide N, or neither of K and T the other.
    Source: arXiv:1909.08053, sec. 3.
    """
    attn = layer.self_attn
    heads = attn.q_proj.out_features // attn.core.head_size
    if heads % tp_group.size():  # key/value heads can be copied, query heads cannot
        raise ValueError(f"{heads} heads on {tp_group.size()} ranks")
    for name in ("q_proj", "k_proj", "v_proj"):
        full = getattr(attn, name)
        heads = full.out_features // attn.core.head_size
        setattr(attn, name, split_heads(full, heads, tp_group))
    attn.project = copy_then_apply_each
    attn.core.dropout = ShardedDropout(attn.core.dropout.p, 1, tp_group)  # [B, n, S, S]
    attn.o_proj = RowParallelLinear(attn.o_proj, tp_group)
    layer.mlp = tp_mlp(layer.mlp, tp_group)


def tp_transformer(full: Transformer, tp_group: dist.ProcessGroup) -> Transformer:
    """A copy of the decoder with its layers split over the TP group.

    Shapes: tokens [B, S] → logits [B, S, V], Replicate(): embedding and head are whole.
    Communication: 2·L all-reduces of B·S·D elements forward, as many backward.
    """
    model = copy.deepcopy(full)
    for layer in model.layers:
        parallelize_layer(layer, tp_group)
    return model.train(full.training)  # in eval mode if full is


def tp_plan() -> dict:
    """PyTorch's way to say which linear is split by column, which by row. By hand q, k
    and v share one f; here each has its own: backward 4·L all-reduces, not 2·L."""
    column, row = parallel.ColwiseParallel(), parallel.RowwiseParallel()
    return {
        "layers.*.self_attn.q_proj": column,
        "layers.*.self_attn.k_proj": column,
        "layers.*.self_attn.v_proj": column,
        "layers.*.self_attn.o_proj": row,
        "layers.*.mlp.up_proj": column,
        "layers.*.mlp.down_proj": row,
    }


def dtensor_transformer(full: Transformer, plan: dict, tp_group) -> Transformer:
    """The model that PyTorch makes of a plan: parameters that are cut are DTensors."""
    device = next(full.parameters()).device.type
    mesh = DeviceMesh.from_group(tp_group, device, mesh_dim_names=("tp",))
    model = parallel.parallelize_module(copy.deepcopy(full), mesh, plan)
    for layer in model.layers:  # a plan is about parameters: masks are ours to cut
        p = layer.self_attn.core.dropout.p
        layer.self_attn.core.dropout = ShardedDropout(p, 1, tp_group)
    return model.train(full.training)  # in eval mode if full is


# ---- The same bits for every T (--same-bits)

BLOCKS = 8  # all that T ranks cut is cut into 8 blocks, each a product of its own


def blocked_column_linears(x_BSD: Tensor, *linears: nn.Module) -> list[Tensor]:
    """f, then column-parallel linears, one block at a time. The last bits of a product
    may depend on its shape: all blocks have the same for every T. Backward, their terms
    of dL/dx are added as one tree: on a rank by autograd, then by tree_all_reduce.
    """
    tp_group, uses = linears[0].tp_group, [x_BSD.view_as(x_BSD)]
    if uses[0].requires_grad:
        uses[0].register_hook(lambda grad: tree_all_reduce(grad, tp_group))
    while len(uses) < BLOCKS // tp_group.size():
        uses = [x.view_as(x) for x in uses for _ in range(2)]  # two terms meet in each
    ys = []
    for linear in linears:
        W, b = linear.weight.chunk(len(uses)), linear.bias.chunk(len(uses))
        ys.append(torch.cat([F.linear(*block) for block in zip(uses, W, b)], -1))
    return ys


def blocked_row_linear(x_BSf: Tensor, linear: nn.Module) -> list[Tensor]:
    """A row-parallel linear, one block at a time, then g: one tree of terms."""
    blocks = BLOCKS // linear.tp_group.size()
    pairs = zip(split(x_BSf, -1, blocks), split(linear.weight, 1, blocks))
    partial_y_BSD = tree_sum([F.linear(x, w) for x, w in pairs])
    terms = GatherFromTP.apply(partial_y_BSD[None], 0, linear.tp_group)
    return [tree_sum(list(terms)) + linear.bias]


class LinearWithInputComm(nn.Module):
    """A parallel linear that `project` computes, as attention's does q, k and v."""

    def __init__(self, linear: nn.Module, project):
        super().__init__()
        self.tp_group, self.project = linear.tp_group, project
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.project(x, self)[0]


def same_bits_transformer(full: Transformer, tp_group) -> Transformer:
    """tp_transformer, but losses, gradients and weights are the same bits for T = 1, 2,
    4 and 8: measured in float32 on CPUs. (Another library adds in orders of its own.)

    Communication: for each all-reduce of B·S·D elements, an all-gather of T times as
        many: a ring sends T/2 times the bytes.
    """
    model = tp_transformer(full, tp_group)
    for layer in model.layers:
        layer.self_attn.project = blocked_column_linears
        layer.self_attn.o_proj = LinearWithInputComm(
            layer.self_attn.o_proj, blocked_row_linear
        )
        layer.mlp.up_proj = LinearWithInputComm(
            layer.mlp.up_proj, blocked_column_linears
        )
        layer.mlp.down_proj = LinearWithInputComm(
            layer.mlp.down_proj, blocked_row_linear
        )
    return model


# ---- After backward: the norm of a gradient in shards


def global_norm(model: nn.Module, tp_group: dist.ProcessGroup) -> float:
    """Norm of the whole model's gradient, the same on every rank.

    Squares are summed over the group. What c ranks hold would count c times, so it is
    divided by c = T / parts: 1 if it is cut over all T ranks, T if it is replicated,
    T/K for a shared head. Communication: one all-reduce of one float64.
    """
    total = next(model.parameters()).new_zeros((), dtype=torch.float64)
    for p in model.parameters():
        parts = math.prod(group.size() for _, group in getattr(p, "shardings", ()))
        if p.grad is not None:
            total += p.grad.double().square().sum() * parts / tp_group.size()
    return math.sqrt(all_reduce(total, tp_group))


def clip_gradients(model: nn.Module, max_norm: float, norm: float) -> None:
    """Scale all gradients by one factor, so that their norm is max_norm at most."""
    scale = min(1.0, max_norm / (norm + 1e-6))  # as torch.nn.utils.clip_grad_norm_
    for p in model.parameters():
        if p.grad is not None:
            p.grad.mul_(scale)


# ==== RUN


def main(args, report: Report) -> None:
    tp_group = mesh_groups({"tp": args.ranks}, args.timeout)["tp"]
    report.begin({"tp": args.ranks})
    full, batches = make_transformer(args), make_batches(__doc__, args, args.steps)
    models = {"without TP": copy.deepcopy(full)}
    models["with TP"] = tp_transformer(full, tp_group)
    if args.same_bits:
        models["same bits"] = same_bits_transformer(full, tp_group)
    elif args.kv_heads >= args.ranks:  # a plan makes no copies: it would cut heads
        models["DTensor"] = dtensor_transformer(full, tp_plan(), tp_group)
    runs = {}
    for what, model in models.items():
        group = None if what in ("without TP", "DTensor") else tp_group
        runs[what] = train_transformer(what, model, batches, args, mean_loss, group)
    show_heads(report, full, models["with TP"])
    show_steps(report, runs, "with TP", models["with TP"], tp_group)
    show_all_gradients(report, runs)
    show_all_reduces(report, runs, full.config)
    show_bytes_held(report, runs, full.config)
    if args.same_bits:
        show_hashes(report, full, batches, runs)


PAD = 256  # the one token that is not a byte
IGNORE = -100  # as a target: there is none, F.cross_entropy leaves this token out


def make_batches(text: str, args, count: int) -> list[tuple[Tensor, Tensor]]:
    """Tokens and targets [B, S]: bytes of random lines of a text, each from a random
    place on. Short lines are filled up with PAD, which the loss leaves out."""
    lines = [f"{line}\n".encode() for line in text.splitlines() if line.strip()]
    generator = torch.Generator().manual_seed(args.seed)
    batches = []
    for _ in range(count):
        rows = torch.full((args.batch_size, args.seq_len + 1), PAD)
        for row in rows:
            line = lines[torch.randint(len(lines), (), generator=generator)]
            start = torch.randint(len(line) - 1, (), generator=generator)
            line = line[start : start + args.seq_len + 1]
            row[: len(line)] = torch.tensor(list(line))
        tokens_BS, target_BS = rows[:, :-1].contiguous(), rows[:, 1:]
        target_BS = target_BS.masked_fill(target_BS == PAD, IGNORE)
        batches.append((tokens_BS.to(args.device), target_BS.to(args.device)))
    return batches


def mean_loss(logits_BSV: Tensor, target_BS: Tensor) -> Tensor:
    """Cross entropy, averaged over the tokens that have a target."""
    return F.cross_entropy(logits_BSV.flatten(0, 1), target_BS.flatten())


def make_transformer(args) -> Transformer:
    """The full model, the same on every rank: drawn from the seed before any cut."""
    torch.manual_seed(args.seed)
    sizes = {name: getattr(args, name) for name in Config._fields}
    return Transformer(Config(**sizes)).to(args.device, getattr(torch, args.dtype))


class TrainingRun(NamedTuple):
    losses: dict[str, float]  # by step
    norms: dict[str, float]  # of the gradient, by step, before it was clipped
    gradients: dict[str, Tensor]  # of step 1, put together from all ranks
    parameters: dict[str, Tensor]  # likewise, at the end
    held: dict[str, int]  # bytes on this rank
    seconds: float = 0.0  # of all of it


def train_transformer(
    what, model, batches, args, loss_of, tp_group=None, after_backward=None
) -> TrainingRun:
    """A step of AdamW on each batch, with gradients clipped to norm args.clip.

    what: names the run where collectives are counted; loss_of: (logits, target) → loss;
    tp_group: None for one process and DTensor; after_backward: for lesson 04.
    """
    # eps above the rounding error of a gradient: AdamW divides by the gradient's size,
    # and would turn rounding into steps as long as any other.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
    losses, norms, held, start = {}, {}, {}, time.perf_counter()
    for step, batch in enumerate(batches, 1):
        model.zero_grad()
        torch.manual_seed(args.seed + step)  # the masks of this step, alike everywhere
        loss, held["activations"] = forward_backward(what, model, batch, loss_of)
        if after_backward:
            COMM.what, COMM.phase = what, "summing"
            after_backward(model)
        if step == 1:
            gradients = unshard_model(model, "grad")
        COMM.what, COMM.phase = what, "clipping"
        losses[f"loss, step {step}"] = loss
        norm = global_norm(model, tp_group) if tp_group else norm_by_pytorch(model)
        clip_gradients(model, args.clip, norm)
        norms[f"‖g‖, step {step}"] = norm
        # Every rank updates what it holds, and nothing is sent. Replicas stay equal
        # because they started equal and get equal gradients: nothing else sees to it.
        optimizer.step()
    moments = [x for state in optimizer.state.values() for x in state.values()]
    held["parameters"] = nbytes(model.parameters())
    held["gradients"] = nbytes(p.grad for p in model.parameters())
    held["optimizer state"] = nbytes(moments)
    ends, seconds = unshard_model(model, "data"), time.perf_counter() - start
    return TrainingRun(losses, norms, gradients, ends, held, seconds)


def forward_backward(what, model, batch, loss_of) -> tuple[float, int]:
    """The loss of a batch, and the bytes that the model keeps for backward."""
    tokens_BS, target_BS = batch
    saved = SavedBytes([*model.parameters(), *model.buffers()])
    COMM.what, COMM.phase = what, "forward"
    with CountDTensor("tp") if "DTensor" in what else nullcontext():
        with saved:
            logits = model(tokens_BS)
        COMM.phase = "loss"
        loss = loss_of(logits, target_BS)
        COMM.phase = "backward"
        loss.backward()
    return loss.item(), saved.total()


def norm_by_pytorch(model: nn.Module) -> float:
    """PyTorch's own norm of the gradient, which knows DTensors; in float64."""
    grads = [p.grad.double() for p in model.parameters() if p.grad is not None]
    return nn.utils.get_total_norm(grads, foreach=False).item()


def unshard_model(model: nn.Module, what: str) -> dict[str, Tensor]:
    """All parameters ("data") or gradients ("grad") from all ranks' slices."""
    COMM.what = COMM.phase = ""  # not the model's calls, but the report's
    whole = {}
    for name, p in model.named_parameters():
        x = getattr(p, what)
        if isinstance(x, DTensor):
            x = x.full_tensor()
        elif x is not None:
            x = unshard(x, getattr(p, "shardings", ()))
            x = x[: p.rows] if hasattr(p, "rows") else x  # lesson 03 pads rows
        whole[name] = torch.empty(0) if x is None else x.clone()
    return whole


def show_heads(report: Report, full: Transformer, split_model: Transformer) -> None:
    """How attention is cut."""
    rows, held = [], dict(split_model.layers[0].self_attn.named_parameters())
    for name, p in full.layers[0].self_attn.named_parameters():
        mine = held.get(name, torch.empty(0))  # in a model of yours it may have gone
        cuts = [f"Shard({dim})" for dim, _ in getattr(mine, "shardings", ())]
        if copies := getattr(mine, "copies", None):
            cuts.append(f"the same on ranks {dist.get_process_group_ranks(copies)}")
        row = {"self_attn": name, "global": [*p.shape], "on a rank": [*mine.shape]}
        rows.append(row | {"placement": ", ".join(cuts) or "Replicate()"})
    heads, kv_heads = full.config.heads, full.config.kv_heads
    report.section(f"Who holds what: {heads} heads, {kv_heads} key/value heads")
    report.say("   MLP: as in 01. Embedding, head and LayerNorms: whole on every rank.")
    report.table("holdings", rows)


def show_steps(report: Report, runs: dict, split: str, model, tp_group) -> None:
    """Losses, norms, and where training ended; replicas in the run that is split."""
    args, losses = report.args, {what: run.losses for what, run in runs.items()}
    ends = {what: run.norms | run.parameters for what, run in runs.items()}
    labels = dict.fromkeys(ends[split], f"parameters after {args.steps} steps")
    labels |= dict.fromkeys(runs[split].norms, f"√Σ‖g‖², {args.steps} steps")
    report.section("Losses; ‖g‖, the gradient's norm before clipping; where AdamW ends")
    report.say("   Checked, too: what is replicated is equal on all ranks, to the bit.")
    report.compare("losses", losses, report.allowed_loss)
    report.compare("updates", ends, fold=labels.get)
    for name, p in model.named_parameters():
        whole = None if getattr(p, "shardings", ()) else tp_group
        if copies := getattr(p, "copies", whole):
            report.check(f"replicas: {name}", rel_diff(p, broadcast(p, 0, copies)))
    of_rank_0 = gather_objects(losses[split])[0]
    report.check("replicas: losses", float(losses[split] != of_rank_0))


def show_all_gradients(report: Report, runs: dict) -> None:
    """Gradients of step 1, a row for the same module of all layers."""
    gradients = {what: run.gradients for what, run in runs.items()}
    report.section("Gradients of step 1: norms; weight, bias and layers in one row")
    report.compare("gradients", gradients, fold=module_of)
    name = next(n for n in next(iter(gradients.values())) if "self_attn" in n)
    report.say(f"   The first numbers of dL/d {name}:")
    for what, of_run in gradients.items():
        numbers = of_run[name].flatten()[:4].tolist()
        report.say(f"   {what:<12}" + " ".join(f"{x:11.8f}" for x in numbers))


def module_of(name: str) -> str:
    """layers.3.mlp.up_proj.weight → layers.*.mlp.up_proj."""
    parts = ["*" if part.isdecimal() else part for part in name.split(".")]
    return ".".join(parts[:-1]) or name


def show_all_reduces(report: Report, runs: dict, config: Config) -> None:
    """Calls and bytes of a step, by hand and by PyTorch's plan."""
    args, L, e = report.args, config.layers, getattr(torch, report.args.dtype).itemsize
    BSD = args.batch_size * args.seq_len * config.hidden
    two = 2 * L, "2·L·B·S·D", 2 * L * BSD * e
    four = 4 * L, "4·L·B·S·D", 4 * L * BSD * e
    gathers = 2 * L, "T·2·L·B·S·D", 2 * L * BSD * e * args.ranks
    clipping = 1, "one float64", 8
    report.section("Communication of a step; ring: bytes that a rank of a ring sends")
    report.say(f"   × e = {e} bytes; L {L}, B·S·D {BSD:,}. DTensor: 3 f's for q, k, v.")
    formulas = {
        ("with TP", "forward", "all-reduce", "tp"): two,
        ("with TP", "backward", "all-reduce", "tp"): two,
        ("with TP", "clipping", "all-reduce", "tp"): clipping,
        ("DTensor", "forward", "all-reduce", "tp"): two,
        ("DTensor", "backward", "all-reduce", "tp"): four,
        ("with TP", "backward", "all-reduce", "copy"): sums_of_copies(report),
        ("same bits", "forward", "all-gather", "tp"): gathers,
        ("same bits", "backward", "all-gather", "tp"): gathers,
        ("same bits", "clipping", "all-reduce", "tp"): clipping,
    }
    formulas = {key: formula for key, formula in formulas.items() if key[0] in runs}
    report.ledger(formulas, steps=args.steps)


def sums_of_copies(report: Report) -> tuple[int, str, int]:
    """Calls, formula and bytes of a step: k and v of heads that ranks share."""
    args, H = report.args, report.args.hidden // report.args.heads
    report.axes = report.axes | {"copy": max(1, args.ranks // args.kv_heads)}
    sent = 2 * args.layers * H * (args.hidden + 1) * getattr(torch, args.dtype).itemsize
    return 4 * args.layers, "2·L·H·(D + 1)", sent


def show_bytes_held(report: Report, runs: dict, config: Config) -> None:
    """Bytes on a rank. Kept for backward: LayerNorm's input, mean and 1/σ; the input of
    q, k, v; q, and k and v repeated for query heads; softmax's output, dropout's mask
    and output; inputs of o, up, GELU and down; masks of the two dropouts on x."""
    args, V, D, L = report.args, config.vocab_size, config.hidden, config.layers
    C, drops = D // config.heads * config.kv_heads, config.dropout > 0
    BS, e = args.batch_size * args.seq_len, getattr(torch, args.dtype).itemsize
    X, Q, rows = BS * D, BS * config.heads * args.seq_len, []
    for what, T in (("without TP", 1), ("with TP", args.ranks)):
        P = L * ((10 * D * D + 5 * D) // T + 6 * D) + 2 * V * D + V + 2 * D
        P += L * 2 * C * (D + 1) // min(T, config.kv_heads)  # copies are cut no further
        A = L * ((12 * X + (1 + drops) * Q) // T + 4 * X + 4 * BS) + 2 * X + 2 * BS
        M = drops * L * (Q // T + 2 * X)
        state = 2 * e * P + 4 * len(runs[what].parameters)  # AdamW counts its steps
        predicted = {
            "parameters": ("e·P", e * P),
            "gradients": ("e·P", e * P),
            "optimizer state": ("2e·P + 4 a tensor", state),
            "activations": ("e·A + M + 8·B·S", e * A + M + 8 * BS),
        }
        for kind, (formula, wanted) in predicted.items():
            row = {"held": kind, "run": what, "formula": formula}
            row |= {"bytes": runs[what].held[kind], "predicted_bytes": wanted}
            rows.append(row)
    report.section("Memory of a rank: what lies between f and g is cut by T")
    report.say("   P = L·((10D² + 5D)/T + 2C(D + 1)/min(T, K) + 6D) + 2VD + V + 2D")
    report.say("   A = L·((12X + 2Q)/T + 4X + 4BS) + 2X + 2BS, masks M = L·(Q/T + 2X)")
    report.say("   C = KH, X = BSD, Q = BNS², tokens 8BS; no dropout: M = 0, Q not 2Q")
    report.measure("memory", rows)


def show_hashes(report: Report, full, batches, runs: dict) -> None:
    """`--same-bits`: all bits of what training gives, on T ranks and on one."""
    args, rows, kinds = report.args, [], ("losses", "gradients", "parameters")
    alone = mesh_groups({"all": args.ranks, "alone": 1}, args.timeout)["alone"]
    model = same_bits_transformer(full, alone)
    runs["same, T = 1"] = train_transformer("", model, batches, args, mean_loss, alone)
    for what, run in runs.items():
        row = {"run": what}
        for kind in kinds:
            row[kind] = digest(*getattr(run, kind).values())
        slower = run.seconds / runs["with TP"].seconds
        rows.append(row | {"time ÷ with TP's": f"{slower:.1f}"})
    report.section("Can the difference be zero? Hashes of all bits, after training")
    report.say("   same bits: one hash for 1, 2, 4, 8 ranks. Try them; T = 1 is here.")
    report.table("hashes", rows)
    one, many = rows[-1], rows[-2]
    for kind in kinds:
        report.check(f"same bits: {kind}", one[kind] != many[kind], kind="bits")


def parse_args(ranks: int) -> argparse.Namespace:
    sizes = {"layers": 2, "batch_size": 4, "seq_len": 32, "vocab_size": 257}
    parser = lesson_parser(__doc__, BREAKS, steps=3, **sizes)
    parser.add_argument("--same-bits", action="store_true", help="for T = 1, 2, 4, 8")
    if "--same-bits" not in sys.argv:
        return parse_sizes(parser, ranks)
    if BLOCKS % ranks:
        raise ValueError(f"--same-bits on {ranks} ranks: take 1, 2, 4 or 8")
    args = parse_sizes(parser, BLOCKS)  # sizes that do for every T
    must_divide(args, "kv_heads", BLOCKS, "blocks")  # a shared head would be one block
    if args.dtype == "float64":  # where the norm's last digit depends on T
        raise ValueError("--same-bits: gradients are clipped alike in float32 only")
    return args


def parse_sizes(parser: argparse.ArgumentParser, ranks: int) -> argparse.Namespace:
    """The model's flags. ValueError if it cannot be built, or cut into `ranks`."""
    add = parser.add_argument
    add("--hidden", type=positive, help="D (8 numbers a head)")
    add("--heads", type=positive, help="N (2 for each key/value head)")
    add("--kv-heads", type=positive, help="K (4, more for more ranks); below T: copied")
    add("--dropout", type=float, default=0.1, help="probability (0.1)")
    add("--clip", type=float, default=1.0, help="norm that a gradient may have (1)")
    args = parser.parse_args()
    usual = ranks * math.ceil(4 / ranks)  # 4, or more: all ranks have some
    usual = 1 if args.bug == "copies" else usual
    args.heads = args.heads or 2 * math.lcm(args.kv_heads or usual, ranks)
    args.kv_heads = args.kv_heads or math.gcd(args.heads, usual)
    args.hidden = args.hidden or 8 * args.heads
    must_divide(args, "heads", ranks, "ranks")
    must_divide(args, "hidden", 2 * args.heads, "(2 · --heads: rotary pairs)")
    must_divide(args, "heads", args.kv_heads, "(--kv-heads)")
    if ranks % args.kv_heads:  # else c = T/K ranks hold the same one
        must_divide(args, "kv_heads", ranks, "ranks")
    if args.vocab_size <= PAD:
        raise ValueError(f"--vocab-size {args.vocab_size}: 256 bytes and PAD need 257")
    if args.hidden < 4:
        raise ValueError("--hidden 2: LayerNorm makes ±1 of any 2 numbers; take 4")
    if not 0 <= args.dropout < 1:
        raise ValueError(f"--dropout {args.dropout}: a probability below 1 is wanted")
    if not args.clip > 0:
        raise ValueError(f"--clip {args.clip}: a norm above 0 is wanted")
    return args


# ==== BREAK IT

BREAKS = {
    "seed": dict(
        target="shard_parameter",
        old="        full = shard(full, dim, group)\n",
        new="        torch.manual_seed(0)\n"
        "        full = shard(full, dim, group).normal_(0, 0.1)\n",
        what="each rank draws its shards itself, all from the same seed",
        symptom="it trains, but another model: each head and MLP column exists T times",
        why="equal shards get nearly equal gradients: a T-th of the model is left",
        met="github.com/modelscope/ms-swift/issues/7944, allenai/OLMo-core issue 307",
    ),
    "qkv": dict(
        target="parallelize_layer",
        old='    for name in ("q_proj", "k_proj", "v_proj"):\n',
        new="    three = attn.q_proj, attn.k_proj, attn.v_proj\n"
        "    slices = torch.cat([x.weight for x in three]).chunk(tp_group.size())\n"
        "    sizes = [len(x.weight) // tp_group.size() for x in three]\n"
        "    for linear, rows in zip(three, zip(*(x.split(sizes) for x in slices))):\n"
        "        linear.weight.data = torch.cat(rows)\n"
        '    for name in ("q_proj", "k_proj", "v_proj"):\n',
        what="one weight of q, k and v is cut into T slices, and each slice into three",
        symptom="shapes fit and nothing complains; the loss is wrong from step 1 on",
        why="the first slice is all queries: some serve rank 0 as keys and values",
        met="github.com/deepspeedai/DeepSpeed/pull/3844",
    ),
    "copies": dict(
        target="split_heads",
        old="        p.register_hook(lambda grad: all_reduce(grad, copies))\n",
        new="        pass\n",
        what="ranks that hold the same key/value head do not add up its gradients",
        symptom="gradients of k and v are wrong; copies of one weight drift apart",
        why="each copy met the queries of its own rank only: it has one of c terms",
        met="github.com/bigcode-project/Megatron-LM/pull/12: biases part between ranks",
    ),
    "mask-heads": dict(
        target="parallelize_layer",
        old="    attn.core.dropout = ShardedDropout(attn.core.dropout.p, 1, tp_group)",
        new="",
        what="one dropout mask for the heads of all ranks",
        symptom="no error; losses near the right ones, never equal to them",
        why="heads on different ranks drop alike: T times fewer random draws",
        met="github.com/NVIDIA/Megatron-LM/issues/206",
    ),
    "mask-residual": dict(
        target="parallelize_layer",
        old="    layer.mlp = tp_mlp(layer.mlp, tp_group)\n",
        new="    layer.mlp = tp_mlp(layer.mlp, tp_group)\n"
        "    layer.dropout = ShardedDropout(layer.dropout.p, 2, tp_group)\n",
        what="every rank its own dropout mask on what the blocks give",
        symptom="losses differ from rank to rank; replicated parameters drift apart",
        why="all ranks hold the same tensor, so all must drop the same elements",
        met="github.com/NVIDIA/Megatron-LM/issues/206",
    ),
    "clip": dict(
        target="global_norm",
        old=" * parts / tp_group.size()\n"
        "    return math.sqrt(all_reduce(total, tp_group))\n",
        new="\n    return math.sqrt(total)\n",
        what="gradients are clipped by each rank's own norm",
        symptom="norms are wrong, gradients are right; losses part from step 2 on",
        why="a rank sees its own shards' squares only: sum them over the group first",
        met="github.com/pytorch/torchtune/issues/2420, pytorch/torchtitan issue 596",
    ),
    "data": dict(
        target="train_transformer",
        old="    for step, batch in enumerate(batches, 1):\n",
        new="    ahead = tp_group.rank() if tp_group else 0\n"
        "    for step, batch in enumerate(batches[ahead:] + batches[:ahead], 1):\n",
        what="every rank of the TP group reads a batch of its own",
        symptom="losses are wrong from step 1 on and differ between ranks; no error",
        why="ranks of a TP group have terms of sums over features of the same tokens",
        met="github.com/deepspeedai/DeepSpeed/issues/7199",
    ),
    "drift": dict(
        target="train_transformer",
        old="        optimizer.step()\n",
        new="        if tp_group and tp_group.rank() == tp_group.size() - 1:\n"
        "            model.norm.zero_grad(set_to_none=False)\n"
        "        optimizer.step()\n",
        what="on one rank the last LayerNorm's gradient is lost",
        symptom="step 1 is right; then replicas differ, and losses part slowly",
        why="only equal starts, gradients and updates keep replicated parameters equal",
        met="github.com/NVIDIA/Megatron-LM/issues/1446",
    ),
}


# ==== CARRIED OVER from 00, unchanged
# region  What lesson 00 explains.


def split(x: Tensor, dim: int, parts: int) -> list[Tensor]:
    """Cut x into equal contiguous parts along dim (lesson 00)"""
    if x.shape[dim] % parts:
        raise ValueError(f"dim {dim} of {list(x.shape)} is not a multiple of {parts}")
    return [part.contiguous() for part in x.chunk(parts, dim)]


def shard(full: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """This rank's slice of a tensor that every rank holds (lesson 00)"""
    return split(full.detach(), dim, group.size())[group.rank()].clone()


def all_reduce(
    x: Tensor, group: dist.ProcessGroup, op: dist.ReduceOp = dist.ReduceOp.SUM
) -> Tensor:
    """Every rank gets the sum over ranks: Partial() → Replicate() (lesson 00)"""
    out = x.detach().clone(memory_format=torch.contiguous_format)
    if group.size() > 1:
        with COMM.record("all-reduce", out, group):
            dist.all_reduce(out, op, group=group)
    return out


def all_gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Every rank gets all slices: Shard(dim) → Replicate() (lesson 00)"""
    x = x.detach().contiguous()
    if group.size() == 1:
        return x.clone()
    slices = [torch.empty_like(x) for _ in range(group.size())]
    with COMM.record("all-gather", x, group, copies=group.size()):
        dist.all_gather(slices, x, group=group)
    return torch.cat(slices, dim)


def broadcast(x: Tensor, src: int, group: dist.ProcessGroup) -> Tensor:
    """Every rank gets the x of group rank src (lesson 00)"""
    out = x.detach().clone(memory_format=torch.contiguous_format)
    if group.size() > 1:
        with COMM.record("broadcast", out, group):
            dist.broadcast(out, group_src=src, group=group)
    return out


def tree_sum(terms: list[Tensor]) -> Tensor:
    """Add neighbors in pairs, then those sums in pairs, … (lesson 00)"""
    if len(terms) == 1:
        return terms[0]
    half = len(terms) // 2
    return tree_sum(terms[:half]) + tree_sum(terms[half:])


def tree_all_reduce(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """All-reduce in an order that can be the same for every T (lesson 00)"""
    return tree_sum(list(all_gather(x[None], 0, group)))


def digest(*tensors) -> str:
    """The first digits of a hash of all their bits (lesson 00)"""
    sha = hashlib.sha256()
    for x in tensors:
        sha.update(torch.as_tensor(x, dtype=torch.float64).cpu().numpy().tobytes())
    return sha.hexdigest()[:12]


def mesh_groups(sizes: dict[str, int], timeout: float) -> dict[str, dist.ProcessGroup]:
    """This rank's group along each axis of a mesh (lesson 00)"""
    ranks = torch.arange(dist.get_world_size()).view(*sizes.values())
    groups = {}
    for dim, (axis, size) in enumerate(sizes.items()):
        lines = ranks.movedim(dim, -1).reshape(-1, size).tolist()
        groups[axis], _ = dist.new_subgroups_by_enumeration(
            lines, timeout=timedelta(seconds=timeout), group_desc=axis
        )
    return groups


# endregion


# ==== CARRIED OVER from 01, unchanged
# region  What lesson 01 explains.


class MLP(nn.Module):
    """The reference: plain PyTorch, one process (lesson 01)"""

    def __init__(self, hidden: int, width: int):
        super().__init__()
        self.up_proj = nn.Linear(hidden, width)  # weight [F, D]: torch stores (out, in)
        self.down_proj = nn.Linear(width, hidden)  # weight [D, F]

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.up_proj(x_BSD)))


def shard_parameter(full: Tensor, *cuts: tuple[int, dist.ProcessGroup]) -> nn.Parameter:
    """This rank's slice of a parameter, which remembers its cuts (lesson 01)"""
    for dim, group in cuts:
        full = shard(full, dim, group)
    mine = nn.Parameter(full.detach().clone())
    mine.shardings = cuts
    return mine


def unshard(x: Tensor, cuts: tuple) -> Tensor:
    """The whole tensor from all ranks' slices: cuts undone (lesson 01)"""
    for dim, group in reversed(cuts):
        x = all_gather(x, dim, group)
    return x


class CopyToTP(torch.autograd.Function):
    """Megatron's f: identity forward, all-reduce backward (lesson 01)"""

    @staticmethod
    def forward(ctx, x: Tensor, tp_group: dist.ProcessGroup) -> Tensor:
        ctx.tp_group = tp_group
        return x.view_as(x)  # every rank has all of x already: nothing to send

    @staticmethod
    def backward(ctx, partial_grad: Tensor):
        # Rank t used only its slice of W, so it has one of the T terms of dL/dx.
        return all_reduce(partial_grad, ctx.tp_group), None


class ReduceFromTP(torch.autograd.Function):
    """Megatron's g: all-reduce forward, identity backward (lesson 01)"""

    @staticmethod
    def forward(ctx, partial_y: Tensor, tp_group: dist.ProcessGroup) -> Tensor:
        return all_reduce(partial_y, tp_group)

    @staticmethod
    def backward(ctx, grad: Tensor):
        # y is one tensor that all ranks hold, so each has the whole dL/dy; and y is the
        # sum of the terms, so dL/dy is also the gradient of every term.
        return grad, None


class ColumnParallelLinear(nn.Module):
    """Y = X Wᵀ + b with W's *output* features split over the TP group (lesson 01)"""

    def __init__(self, full: nn.Linear, tp_group, copy_input=True, gather_output=False):
        super().__init__()
        self.tp_group, self.copy_input = tp_group, copy_input
        self.gather_output = gather_output
        self.weight = shard_parameter(full.weight, (0, tp_group))  # [f, D]
        self.bias = shard_parameter(full.bias, (0, tp_group))  # [f]

    def forward(self, x_BSD: Tensor) -> Tensor:
        if self.copy_input:
            x_BSD = CopyToTP.apply(x_BSD, self.tp_group)
        y_BSf = F.linear(x_BSD, self.weight, self.bias)
        if self.gather_output:
            return GatherFromTP.apply(y_BSf, 2, self.tp_group)
        return y_BSf


class RowParallelLinear(nn.Module):
    """Y = X Wᵀ + b with W's *input* features split over the TP group (lesson 01)"""

    def __init__(self, full: nn.Linear, tp_group: dist.ProcessGroup):
        super().__init__()
        self.tp_group = tp_group
        self.reduce = ReduceFromTP.apply  # g; lesson 04 puts a reduce-scatter here
        self.weight = shard_parameter(full.weight, (1, tp_group))  # [D, f]
        self.bias = shard_parameter(full.bias)  # [D]

    def forward(self, x_BSf: Tensor) -> Tensor:
        partial_y_BSD = F.linear(x_BSf, self.weight)
        y_BSD = self.reduce(partial_y_BSD, self.tp_group)
        return y_BSD + self.bias  # after the sum: before it, it would be added T times


def tp_mlp(full: MLP, tp_group: dist.ProcessGroup) -> MLP:
    """Megatron's MLP: columns, then rows (lesson 01)"""
    mlp = copy.deepcopy(full)
    mlp.up_proj = ColumnParallelLinear(full.up_proj, tp_group)
    mlp.down_proj = RowParallelLinear(full.down_proj, tp_group)
    return mlp


class GatherFromTP(torch.autograd.Function):
    """All-gather forward, slice backward (lesson 01)"""

    @staticmethod
    def forward(ctx, x: Tensor, dim: int, tp_group: dist.ProcessGroup) -> Tensor:
        ctx.dim, ctx.tp_group = dim, tp_group
        return all_gather(x, dim, tp_group)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return shard(grad, ctx.dim, ctx.tp_group), None, None


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Within `with`: bytes kept for backward, each storage once (lesson 01)"""

    def __init__(self, skip):
        self.skip = {local(x).untyped_storage().data_ptr() for x in skip}
        self.storages = {}
        super().__init__(self.pack, lambda x: x)

    def pack(self, x: Tensor) -> Tensor:
        storage = local(x).untyped_storage()
        if storage.data_ptr() not in self.skip:
            self.storages[storage.data_ptr()] = storage.nbytes()
        return x

    def total(self) -> int:
        return sum(self.storages.values())


class CountDTensor(TorchDispatchMode):
    """Within `with`: DTensor's collectives are counted, too (lesson 01)"""

    names = {
        "_c10d_functional::all_reduce": "all-reduce",
        "_c10d_functional::all_gather_into_tensor": "all-gather",
        "_c10d_functional::reduce_scatter_tensor": "reduce-scatter",
    }

    def __init__(self, axis: str):
        super().__init__()
        self.axis = axis

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # let DTensor turn it into local ops and collectives
        out = func(*args, **(kwargs or {}))
        if name := self.names.get(func._schema.name):
            COMM.count(name, max(args[0].nbytes, out.nbytes), self.axis)
        return out


def local(x: Tensor) -> Tensor:
    """This rank's piece of a DTensor, waited for (lesson 01)"""
    x = x._local_tensor if isinstance(x, DTensor) else x
    return x.wait() if hasattr(x, "wait") else x  # DTensor does not wait at once


def nbytes(tensors) -> int:
    """Bytes of these tensors on this rank (lesson 01)"""
    return sum(local(x).nbytes for x in tensors if x is not None)


def must_divide(args, name: str, parts: int, what: str) -> None:
    """ValueError with the arithmetic if a flag's value is no multiple (lesson 01)"""
    value = getattr(args, name)
    if value % parts:
        flag, up = f"--{name.replace('_', '-')}", value + parts - value % parts
        left = f"{value} % {parts} {what} = {value % parts}, not 0"
        raise ValueError(f"{flag} {value}: {left}; take {flag} {up}")


# endregion


# ==== HARNESS, the same in every lesson
# region  It counts, compares, prints tables, says who is missing. Fold it away.


class CommCounter:
    """Calls and payload bytes of every collective, and the call this rank is in now."""

    def __init__(self):
        self.rows = {}  # (what, phase, collective, axis) → [calls, bytes]
        self.what = self.phase = ""  # labels of what is called next
        self.place, self.made, self.store = "in no call", Counter(), None
        self.limit = timedelta(seconds=60)  # of a call, in groups that a model makes

    def count(self, collective: str, nbytes: int, axis: str) -> None:
        row = self.rows.setdefault((self.what, self.phase, collective, axis), [0, 0])
        row[0] += 1
        row[1] += nbytes

    @contextmanager
    def record(self, collective: str, x: Tensor, group, copies: int = 1):
        """Around one call on copies·x.nbytes bytes of payload."""
        self.count(collective, copies * x.nbytes, group.group_desc)
        call = f"{collective} of {list(x.shape)} over {group.group_desc}"
        with self.meet(call, dist.get_process_group_ranks(group)):
            yield

    @contextmanager
    def meet(self, call: str, ranks: list[int]):
        """Around a call that ends when all these ranks are in it."""
        before = self.place
        self.made[str(ranks)] += 1  # the n-th call of one meets the n-th of the others
        self.note(f"in call {self.made[str(ranks)]} of ranks {ranks}, {call}")
        yield
        self.note(before)  # not after an error: then this rank is still in it

    def note(self, place: str) -> None:
        """Where this rank is, for the others to read if something goes wrong."""
        self.place = place
        if self.store:
            self.store.set(f"place/{dist.get_rank()}", place)


COMM = CommCounter()
ALLOWED = {"float32": (1e-6, 1e-5), "float64": (1e-12, 1e-12)}  # of a loss, of a tensor


def rel_diff(got, wanted) -> float:
    """max|got − wanted| / max|wanted|; inf for nan and for another shape."""
    got = torch.as_tensor(got, dtype=torch.float64).detach().cpu()
    wanted = torch.as_tensor(wanted, dtype=torch.float64).detach().cpu()
    if got.shape != wanted.shape:
        return math.inf
    if torch.equal(got, wanted):
        return 0.0
    diff = ((got - wanted).abs().max() / wanted.abs().max()).item()
    return diff if diff == diff else math.inf


def gather_objects(value, group=None) -> list:
    """The value of every rank (of a group), in order: for the report, not counted."""
    values = [None] * dist.get_world_size(group)
    with COMM.meet("gathering of results", dist.get_process_group_ranks(group)):
        dist.all_gather_object(values, value, group)
    return values


class Report:
    """Rank 0 prints, every rank checks, --json keeps the rows of all tables."""

    def __init__(self, lesson: str, args):
        self.args, self.checks, self.number, self.axes = args, {}, 0, {}
        self.allowed_loss, self.allowed = ALLOWED[args.dtype]
        self.data = {"lesson": lesson, "world_size": args.ranks, "dtype": args.dtype}

    def begin(self, mesh: dict[str, int]) -> None:
        """The first line; mesh: axis → ranks."""
        self.axes = self.data["mesh"] = mesh
        axes = " × ".join(f"{axis} {size}" for axis, size in mesh.items())
        where = f"{dist.get_backend()} on {self.args.device}  {self.args.dtype}"
        print(f"{self.data['lesson']}  ranks {self.args.ranks}, mesh {axes}  {where}")

    def section(self, title: str) -> None:
        self.number += 1
        self.say(f"\n{self.number}  {title}")

    def say(self, text: str) -> None:
        if self.args.only in (None, self.number):
            print(text, flush=True)

    def check(self, name: str, diff: float, allowed=0.0, kind="numbers") -> bool:
        """Note one comparison on this rank; does it hold here?"""
        assert name not in self.checks, f"two checks are called {name}"
        ok = diff <= allowed  # False for nan, too
        self.checks[name] = {"diff": diff, "allowed": allowed, "kind": kind, "ok": ok}
        return ok

    def table(self, key: str, rows: list[dict], hide=()) -> None:
        """Print and keep rows of like keys; diff and ok are the worst of all ranks."""
        for row, of_ranks in zip(rows, zip(*gather_objects(rows))):
            for name, worst in (("diff", max), ("ok", all)):
                if name in row:
                    row[name] = worst(other[name] for other in of_ranks)
        self.data.setdefault(key, []).extend(rows)
        if not rows:  # nothing sent: there is one rank
            return
        lines = [" "] * (len(rows) + 1)  # they grow to the right, column by column
        for name in [name for name in rows[0] if name not in hide]:
            texts = [cell(name, row[name]) for row in rows]
            texts.insert(0, name.replace("_bytes", ""))
            width = max(map(len, texts))
            pad = str.ljust if isinstance(rows[0][name], str) else str.rjust
            lines = [f"{line}  {pad(text, width)}" for line, text in zip(lines, texts)]
        self.say("\n".join(line.rstrip() for line in lines))

    def compare(self, key: str, runs: dict, allowed=None, fold=str) -> None:
        """Numbers, or tensors by their norms: of several runs against the first one.

        runs: run → name → value; fold: name → the label of its row.
        """
        allowed = self.allowed if allowed is None else allowed
        rows, missing, first = {}, torch.empty(0), next(iter(runs))
        for name in dict.fromkeys(name for values in runs.values() for name in values):
            row = {"name": fold(name), **dict.fromkeys(runs, 0.0)}
            row = rows.setdefault(fold(name), row | {"diff": 0.0, "ok": True})
            wanted = runs[first].get(name, missing)
            for run, values in runs.items():
                value = values.get(name, missing)
                norm = torch.as_tensor(value, dtype=torch.float64).detach().norm()
                row[run] = math.hypot(row[run], norm)
                if run != first:
                    diff = rel_diff(value, wanted)
                    row["diff"] = max(row["diff"], diff)
                    row["ok"] &= self.check(f"{key}: {name}, {run}", diff, allowed)
        self.table(key, list(rows.values()))

    def measure(self, key: str, rows: list[dict], hide=()) -> None:
        """Rows with bytes and predicted_bytes, which have to be equal."""
        for row in rows:
            name = " ".join(value for value in row.values() if isinstance(value, str))
            off = abs(row["bytes"] - row["predicted_bytes"])
            equal = self.check(f"{key}: {name}", off, kind="bytes")
            row["ok"] = row.get("ok", True) and equal
        self.table(key, rows, hide)

    def ledger(self, formulas: dict, steps: int = 1) -> None:
        """Calls and bytes of a step, as counted, against formulas.

        formulas: (what, phase, collective, axis) → (calls, formula, bytes).
        """
        rows, whats = [], {what for what, *_ in formulas}
        for key in dict.fromkeys([*formulas, *COMM.rows]):
            row = dict(zip(("what", "phase", "collective", "axis"), key))
            calls, formula, predicted = formulas.get(key, (0, "none", 0))
            made, sent = (n / steps for n in COMM.rows.get(key, (0, 0)))
            ranks = self.axes.get(row["axis"], 1)
            if ranks == 1:  # nobody to send to
                calls = predicted = 0
            if row["what"] in whats and (made or calls):
                share = (ranks - 1) / ranks  # of the payload, in a half of a ring
                share = {"all-reduce": 2 * share, "send/recv": 1}.get(key[2], share)
                sent = int(sent) if sent.is_integer() else sent
                row |= {"calls": round(made), "bytes": sent, "formula": formula}
                row |= {"predicted_bytes": predicted, "ring": round(share * sent)}
                off = abs(made - calls)
                row["ok"] = self.check(f"calls: {' '.join(key)}", off, kind="calls")
                rows.append(row)
        alike = [name for name in ("phase", "axis") if len({r[name] for r in rows}) < 2]
        self.measure("communication", rows, hide=["predicted_bytes", *alike])

    def verdict(self) -> str:
        """PASS or FAIL, of all ranks' checks together."""
        rows = {}
        for rank, checks in enumerate(gather_objects(self.checks)):
            for name, check in checks.items():
                row = rows.setdefault(name, {"name": name, "bad": []} | check)
                row["diff"] = max(row["diff"], check["diff"])
                row["bad"] += [] if check["ok"] else [rank]
        bad = [row for row in rows.values() if row["bad"]]
        print()
        for row in bad[:4]:
            diff = f"off by {row['diff']:.3g}, allowed {row['allowed']:.3g}"
            print(wrap(f"✗ {row['name']}: {diff}, on ranks {row['bad']}"))
        wrong = Counter(row["kind"] for row in bad)
        kinds = Counter(row["kind"] for row in rows.values())
        counts = ", ".join(f"{wrong[kind]} of {kinds[kind]} {kind}" for kind in kinds)
        numbers = [row for row in rows.values() if row["kind"] == "numbers"]
        worst = max(numbers, key=lambda row: row["diff"])
        diff = f"worst difference {worst['diff']:.1e} (allowed {worst['allowed']:.0e})"
        text = f"{counts} differ" if bad else f"{len(rows)} checks, {diff}"
        self.data |= {"verdict": "FAIL" if bad else "PASS", "checks": [*rows.values()]}
        if self.args.json and dist.get_rank() == 0:
            self.args.json.write_text(json.dumps(self.data, indent=1))
        return f"{self.data['verdict']}  {self.data['lesson']}  {text}"


def cell(name: str, value) -> str:
    """A value as a table shows it."""
    if isinstance(value, bool):
        return "ok" if value else "✗"
    if isinstance(value, float):
        return f"{value:.1e}" if name == "diff" else f"{value:#.7g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def wrap(text: str) -> str:
    return textwrap.fill(text, 88, subsequent_indent="  ", break_on_hyphens=False)


class Parser(argparse.ArgumentParser):
    def error(self, message):  # argparse would print its usage, on every rank
        raise ValueError(message)


def lesson_parser(doc: str, breaks: dict, **sizes: int) -> Parser:
    """The flags that all lessons share, and whole numbers with their defaults."""
    about, style = doc.partition("How to read")[0], argparse.RawDescriptionHelpFormatter
    parser = Parser(description=about, formatter_class=style, allow_abbrev=False)
    add = parser.add_argument
    for name, default in {**sizes, "seed": 1, "timeout": 60}.items():
        said = f"({default or 'follows the mesh'})"
        add(f"--{name.replace('_', '-')}", type=positive, default=default, help=said)
    add("--dtype", choices=ALLOWED, default="float32", help="float64 is the proof")
    add("--only", type=positive, metavar="N", help="print section N alone")
    add("--break", dest="bug", choices=[*breaks, "list"], metavar="NAME", help="a bug")
    add("--json", type=Path, metavar="PATH", help="write all tables there")
    return parser


def positive(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 2**31:
        raise argparse.ArgumentTypeError(f"{text} is not one of 1, 2, …, 2^31 − 1")
    return int(text)


def apply_edit(edit: dict, module: dict) -> None:
    """Put an edited copy of its target, a name or Class.name, into a lesson."""
    owner, _, name = edit["target"].rpartition(".")
    definition = getattr(module[owner], name) if owner else module[name]
    source = textwrap.dedent(inspect.getsource(definition))
    if source.count(edit["old"]) != 1:
        raise ValueError(f"{edit['target']} has not exactly once: {edit['old']}")
    scope = {} if owner else module  # where the edited copy is defined
    exec(source.replace(edit["old"], edit["new"]), module, scope)
    if owner:
        setattr(module[owner], name, scope[name])


def describe(name: str, edit: dict) -> tuple[str, str]:
    """A bug as a diff; and its symptom, why, and who met it."""
    lines = [wrap(f"--break {name}: {edit['what']}; in {edit['target']}:")]
    for sign, text in (("-", edit["old"]), ("+", edit["new"])):
        lines += [f"{sign} {line}" for line in text.splitlines()]
    told = [wrap(f"{word}: {edit[word]}") for word in ("symptom", "why", "met")]
    return "\n".join([*lines, ""]), "\n".join(told)


def who_is_missing(places: list[str]) -> str:
    """What the ranks' notes say for certain; nobody is accused on a guess."""
    inside = [rank for rank, place in enumerate(places) if place.startswith("in call")]
    outside = [rank for rank in range(len(places)) if rank not in inside]
    if not inside:
        return "a call failed of which nothing is noted: see what the transport says"
    if outside:
        who = f"rank {outside[0]} is" if len(outside) == 1 else f"ranks {outside} are"
        text = f"{who} in no call, ranks {inside} wait"
        return f"{text}: a hang, a crash, or a skipped call"
    if len({*places}) == 1:
        return "a call failed that every rank had come to"
    text = f"ranks {inside} wait for each other"
    return f"{text}: one skipped or swapped a call, or died in it"


def fail(error: Exception, bug: str) -> None:
    """Say what went wrong, once for all ranks; end this rank."""
    words = re.sub(r"^(\[.*?] )+", "", str(error)).partition("\n")[0]
    if COMM.store is None:
        stop(1, wrap(f"error: the ranks did not meet: {error}"), speaks=True)
    lost = re.search("[Tt]imed? ?out|clos|[Rr]eset|[Bb]roken pipe", words)
    lost = lost and isinstance(error, RuntimeError)
    if lost:  # others note where they are; or one died: torchrun ends us, and says whom
        time.sleep(3)
    speaks, code, lines = COMM.store.add("told", 1) == 1, 1, []
    what = f"rank {dist.get_rank()} raised {type(error).__name__}: {words}"
    if huge := re.search(r"tried to allocate \S+ \w+|overflowed.*", words, re.I):
        has = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        code, what = 2, f"too large: {huge[0]}; this machine has {has} bytes"
    elif lost:
        ranks = range(dist.get_world_size())
        places = [COMM.store.get(f"place/{rank}").decode() for rank in ranks]
        what = who_is_missing(places)
        lines = [f"  rank {rank}: {place}"[:88] for rank, place in enumerate(places)]
        lines.append(wrap(f"  transport: {words[:150]}"))
    elif speaks and not isinstance(error, OSError):
        traceback.print_exception(error)
    stop(code, "\n".join([wrap(f"error: {what}"), *lines, bug]).strip(), speaks)


def stop(code: int, message: str, speaks: bool) -> None:
    """End this rank at once: tidying up while others are in a collective can hang."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # for torchrun's report
        words = {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}
        Path(path).write_text(json.dumps({"message": words}))
    sys.stdout.flush()
    if speaks:
        print(message, file=sys.stderr, flush=True)
    else:
        time.sleep(2)  # torchrun reports the first rank that ends
    os._exit(code)


def read_flags(parse_args, breaks: dict) -> argparse.Namespace:
    """What the command line says; the process ends here if that is a list, or wrong."""
    try:
        ranks = int(os.environ.get("WORLD_SIZE", 1))
        args = parse_args(ranks)
        if args.bug == "list":
            print(*(f"{name:<14}{breaks[name]['what']}" for name in breaks), sep="\n")
            sys.exit(0)
        if args.bug and ranks == 1:
            raise ValueError("--break needs 2 ranks or more: alone nothing breaks")
        if args.json:
            args.json.open("a").close()
    except (ValueError, OSError) as error:
        stop(2, wrap(f"error: {error}"), speaks=os.environ.get("RANK", "0") == "0")
    args.ranks, args.device, args.backend = ranks, "cpu", "gloo"
    if torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1)):
        args.device, args.backend = f"cuda:{os.environ['LOCAL_RANK']}", "nccl"
        torch.cuda.set_device(args.device)
    return args


def join_group(backend: str, limit: timedelta) -> dist.Store:
    """All ranks meet; the store that they share (a new part of it after a restart)."""
    store, rank, ranks = next(dist.rendezvous("env://", timeout=limit))
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # of --max-restarts
    store = dist.PrefixStore(f"attempt {again}", store)
    where = {"store": store, "rank": rank, "world_size": ranks}
    dist.init_process_group(backend, timeout=limit, **where)
    return store


def launch(main, parse_args, module: dict) -> None:
    """One rank of a lesson, from its command line to its exit code."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it, wherever it waits
    gc.freeze()  # what imports made stays: gc.collect() below need not look at it
    lesson, breaks = Path(module["__file__"]), module["BREAKS"]
    if "LOCAL_RANK" not in os.environ and not {"-h", "--help", "list"} & {*sys.argv}:
        command = f"torchrun --standalone --nproc_per_node={module.get('RANKS', 2)}"
        print("start it with torchrun, which makes the ranks:\n")
        print(f"    {command} {lesson.name}")
        sys.exit(2)
    if os.environ.get("RANK", "0") != "0":
        sys.stdout = open(os.devnull, "w")  # rank 0 alone prints
    sys.stdout.reconfigure(errors="replace")  # a terminal may not know our · and →
    args = read_flags(parse_args, breaks)
    torch.set_num_threads(1)  # ranks share the cores: more threads would crawl
    torch.manual_seed(args.seed)
    diff, bug = describe(args.bug, breaks[args.bug]) if args.bug else ("", "")
    try:
        COMM.store = join_group(args.backend, timedelta(seconds=args.timeout))
        COMM.note("in no call")
        if args.bug:
            told = lambda *_: stop(1, bug, COMM.store.add("told", 1) == 1)
            signal.signal(signal.SIGTERM, told)  # the bug has ended another rank
            args.timeout = min(args.timeout, 5)  # of the lesson's groups: it may hang
            apply_edit(breaks[args.bug], module)
            print(diff, flush=True)
        COMM.limit = timedelta(seconds=args.timeout)
        report = Report(lesson.stem, args)
        main(args, report)
        line = report.verdict()
        print(f"{bug}\n{line}".strip(), flush=True)
        with COMM.meet("the last barrier", [*range(args.ranks)]):
            dist.barrier()
    except Exception as error:
        fail(error, bug)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # all has been told
    gc.collect()  # whatever still refers to a group must go before the groups do
    dist.destroy_process_group()
    if line.startswith("FAIL"):
        stop(1, line, speaks=False)
    os._exit(0)  # Python's own end can abort: DTensor's caches still hold groups there


# endregion


if __name__ == "__main__":
    launch(main, parse_args, globals())
