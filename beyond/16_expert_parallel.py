"""Beyond the lessons 16: expert parallelism.

A mixture of experts has E MLPs instead of one, and a router that sends each token to
the k best of them. With expert parallelism (EP) each rank owns some of the experts, and
tokens travel: to the ranks that own their experts, and back. EP needs no ranks of its
own, it borrows those of data parallelism. So a rank's attention sees its own tokens,
its experts see those of all ranks of its group, and only some gradients are summed.

Run it on 1, 2, 4 or 8 ranks:

    torchrun --standalone --nproc_per_node=2 beyond/16_expert_parallel.py

What you will see: who owns which experts, and how many rows each rank sends to whom; a
small decoder, trained in one process, with EP, and with EP by PyTorch's all-to-all (the
rest is the same code), with equal losses, gradients and parameters; one layer for k =
1, 2, 3 and for unbalanced routers; what is sent, compared with TP; memory.

Try one change at a time. notebooks/16_expert_parallel.ipynb, section 9, answers.
    1. --ep 2 on 4 ranks, so that two ranks hold each expert. Which calls are new?
    2. Weigh outputs by the probability itself, as Switch does: in MoE.forward, delete
       the division by the sum. All values agree. What changes in section 4 for k = 1?
    3. --tp 2 on 4 ranks; a rank has as many tokens as on 2. What is sent in addition?

How to read this file: NEW is the lesson, RUN trains and prints, BREAK IT lists bugs for
`--break NAME`. Short of time? Read MoE, ExpertParallel and sum_gradients.

Shapes: B batch, b sequences of it on a rank, S sequence, D hidden, F MLP width (4·D),
    N heads, K key/value heads, H = D/N head size, V vocabulary, L layers, E experts, k
    experts per token, R ranks that split the experts, T ranks in the TP group, e bytes
    per element. Tokens of a rank are counted by t = b·S, rows by r: one for each token
    and expert that it goes to, so r = k·t before they travel.

Sources: arXiv:2006.16668 (GShard: experts over ranks, all-to-all), arXiv:2101.03961
    (Switch: the balance loss), arXiv:2401.04088 (Mixtral: weights sum to 1),
    arXiv:2412.19437 (DeepSeek-V3: shared expert), arXiv:2501.11873 (the balance loss
    needs the shares of the global batch).
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import sys
import time
from itertools import product

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd

try:
    from course import lesson00, lesson01, lesson02, lesson05
    from expert_balance import balance_loss
    from expert_norm import ep_norm
    from one_moe_layer import bytes_under_tp, compare_layer, router_gradient, run_layer
    from routed_rows import by_owner_text, rows_between, rows_of_rank, show_rows
except ModuleNotFoundError as error:  # a copy of this file, without its repository
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(60)  # rank 0 says why, and torchrun ends all
    print(f"error: this script imports the course's lessons: {error}", file=sys.stderr)
    sys.exit(2)

# ==== NEW in 16: expert parallelism
# Read lines 68 to 336, in about 27 minutes. Stop at RUN.

# From lesson 00: shard is this rank's slice, all_to_all sends part j to rank j, and
# mesh_groups returns this rank's group along each axis of a mesh. From lesson 01:
# CopyToTP (f) is the identity forward and an all-reduce backward, and ReduceFromTP (g)
# is the reverse. shardings_of(p) is ((dim, group), …): how p is split. From lesson 02:
# the decoder, IGNORE (the target of a position without loss), and parallelize_layer,
# which splits attention and an MLP. From 05: all_reduce_gradients, a sum over a group.

# ---- A mixture of experts in one process


def sort_by_expert(x_tD: Tensor, expert_tk: Tensor, experts: int) -> tuple:
    """A row for each token and each of its experts, sorted by expert.

    Example, t = 2, k = 2: the tokens go to experts (3, 0) and (0, 1). Unsorted rows 0
    to 3 are token 0 for expert 3, token 0 for 0, token 1 for 0, token 1 for 1. Sorted
    they are rows 1, 2, 3, 0: that is `order`. counts is [2, 1, 0, 1].
    Returns: rows [k·t, D], counts [E] of rows per expert, order [k·t].
    """
    k = expert_tk.shape[1]
    expert_r = expert_tk.flatten()  # row i belongs to token i // k
    order = expert_r.argsort(stable=True)
    rows_rD = x_tD[order // k]
    return rows_rD, torch.bincount(expert_r, minlength=experts), order


def undo_sort(sorted_rD: Tensor, order: Tensor) -> Tensor:
    """Rows in their order before the sort: order.argsort() is the inverse of order."""
    return sorted_rD[order.argsort()]


class Experts(nn.Module):
    """E MLPs without biases; their weights are stacked: [E, F, D] and [E, D, F].

    Shapes: rows [r, D], sorted by expert → [r, D]; counts [E], the rows of each.
    """

    def __init__(self, experts: int, hidden: int, width: int):
        super().__init__()
        up = torch.empty(experts, width, hidden)
        down = torch.empty(experts, hidden, width)
        self.up_proj = nn.Parameter(up.uniform_(-1, 1) / math.sqrt(hidden))
        self.down_proj = nn.Parameter(down.uniform_(-1, 1) / math.sqrt(width))

    def forward(self, rows_rD: Tensor, counts: Tensor) -> Tensor:
        blocks = rows_rD.split(counts.tolist())  # one per expert, some without rows
        outputs = []  # large systems multiply all blocks in one kernel, a grouped GEMM
        for up_FD, down_DF, block_rD in zip(self.up_proj, self.down_proj, blocks):
            outputs.append(F.gelu(block_rD @ up_FD.T) @ down_DF.T)
        return torch.cat(outputs)


class MoE(nn.Module):
    """Experts, and an MLP that computes all tokens: the shared expert.

    The weights of a token's k experts sum to 1. With k = 1 the weight is always 1, so
    only the balance loss trains the router. (Switch uses the probability.)
    Shapes: [B, S, D] → [B, S, D].
    """

    def __init__(self, mlp: nn.Module, experts: int, top_k: int):
        super().__init__()
        width, hidden = mlp.up_proj.weight.shape
        self.top_k = top_k
        self.router = nn.Linear(hidden, experts, bias=False)
        self.experts = Experts(experts, hidden, width)
        self.shared_expert = mlp
        self.batch_groups = ()  # groups over which the batch is split
        self.balance = None  # this rank's part of the last forward's balance loss

    def forward(self, x_BSD: Tensor) -> Tensor:
        x_tD = x_BSD.flatten(0, 1)
        probs_tE = self.router(x_tD).softmax(-1)
        E = probs_tE.shape[1]
        probs_tk, expert_tk = probs_tE.topk(self.top_k, -1)
        # The choice has no gradient. The weights and the balance loss train the router.
        weights_tk = probs_tk / probs_tk.sum(-1, keepdim=True)
        rows_rD, counts_E, order = sort_by_expert(x_tD, expert_tk, E)
        rows_rD = undo_sort(self.experts(rows_rD, counts_E), order)
        rows_tkD = rows_rD.unflatten(0, expert_tk.shape)
        y_tD = (weights_tk[..., None] * rows_tkD).sum(1)
        # A second loss, against uneven rows; it all-reduces counts (expert_balance.py).
        self.balance = balance_loss(probs_tE, counts_E, self.top_k, self.batch_groups)
        return self.shared_expert(x_BSD) + y_tD.view_as(x_BSD)


# ---- Rows travel
#
# The mesh is dp × ep × tp. The batch is split over dp and ep (lesson 05 calls both dp).
# The ranks of an ep group split the experts; those of a dp group hold the same ones.
#
# Ep rank i owns experts i·E/R to (i + 1)·E/R − 1. Rows are sorted by expert, so those
# for rank 0 come first, then those for rank 1, …. How many is up to the router: splits
# are uneven, they differ from step to step, and some are empty. So ranks first tell
# each other how many rows will come. E = 4, R = 2, k = 1, t = 5:
#
#     rows for expert   0  1 | 2  3
#     rank 0 has        3  1 | 0  1   sends 4 rows to rank 0 (itself), 1 to rank 1
#     rank 1 has        0  1 | 2  2   sends 1 row to rank 0, 4 to rank 1
#
# Rank 1 gets a row for expert 3, then rows for 2, 2, 3 and 3: it sorts what arrives.


def all_to_all_rows(x_rD: Tensor, send: list, recv: list, group) -> Tensor:
    """Send the first send[0] rows to rank 0, the next send[1] to rank 1, …

    Rows that arrive are in the order of their senders: recv[0] from rank 0, ….
    Counted: the bytes that this rank sends to other ranks.
    """
    x_rD = x_rD.detach().contiguous()
    if group.size() == 1:
        return x_rD.clone()
    arrived = x_rD.new_empty(sum(recv), x_rD.shape[1])
    leaving = x_rD[send[group.rank()] :]  # COMM needs its size only
    with lesson00.COMM.record("all-to-all", leaving, group):
        # A rank without rows must call it as well: the others wait for it.
        dist.all_to_all_single(arrived, x_rD, recv, send, group=group)
    return arrived


class AllToAllRows(torch.autograd.Function):
    """all_to_all_rows, and backward: each gradient goes back to where its row was."""

    @staticmethod
    def forward(ctx, x_rD: Tensor, send: list, recv: list, group) -> Tensor:
        ctx.splits = send, recv
        ctx.group = group
        return all_to_all_rows(x_rD, send, recv, group)

    @staticmethod
    def backward(ctx, grad: Tensor):
        send, recv = ctx.splits
        return all_to_all_rows(grad, recv, send, ctx.group), None, None, None


class ExpertParallel(Experts):
    """Replaces Experts: this rank's experts, and rows that travel to them and back.

    Under TP each expert is split by column, then by row over tp, as any MLP. The ranks
    of a TP group have the same tokens, so each sends and receives the same rows.

    Shapes:
        up_proj    [E, F, D], on a rank [E/R, F/T, D]    Shard(0) on ep, Shard(1) on tp
        down_proj  [E, D, F], on a rank [E/R, D, F/T]    Shard(0) on ep, Shard(2) on tp
    Communication: all-to-all of E counts; two all-to-alls of rows forward (to the
        experts, and back) and two backward. If rows spread evenly, a rank sends k·t·(R
        − 1)/R rows of D elements in each. A token with two experts on one rank is sent
        there twice. Over tp an all-reduce of the rows that arrived, forward (g) and
        backward (f).
    """

    def __init__(self, full: Experts, ep_group, tp_group):
        nn.Module.__init__(self)  # not Experts': it would make all experts
        self.ep_group = ep_group
        self.tp_group = tp_group
        # An attribute, so that RUN can put PyTorch's function here.
        self.exchange = AllToAllRows.apply
        self.up_proj = shard_experts(full.up_proj, ep_group, 1, tp_group)
        self.down_proj = shard_experts(full.down_proj, ep_group, 2, tp_group)

    def forward(self, rows_rD: Tensor, counts_E: Tensor) -> Tensor:
        R = self.ep_group.size()
        local_experts = len(self.up_proj)
        # From each rank: its number of rows for each of this rank's experts.
        arriving = lesson00.all_to_all(counts_E, self.ep_group)
        # Splits are Python numbers; on a GPU .tolist() waits until they are known.
        send = counts_E.view(R, local_experts).sum(1).tolist()
        recv = arriving.view(R, local_experts).sum(1).tolist()
        arrived = self.exchange(rows_rD, send, recv, self.ep_group)
        # They are sorted by sender, and by expert within each sender's rows. Rank 1 of
        # the example: locally 1 0 0 1 1, so order is 1 2 0 3 4.
        expert = torch.arange(local_experts, device=arriving.device).repeat(R)
        order = expert.repeat_interleave(arriving).argsort(stable=True)
        blocks = lesson01.CopyToTP.apply(arrived[order], self.tp_group)  # f
        counts = arriving.view(R, local_experts).sum(0)
        partial_y = Experts.forward(self, blocks, counts)  # as in one process
        y = lesson01.ReduceFromTP.apply(partial_y, self.tp_group)  # g
        y = undo_sort(y, order)
        return self.exchange(y, recv, send, self.ep_group)


def shard_experts(full: Tensor, ep_group, dim: int, tp_group) -> nn.Parameter:
    """This rank's experts, and of each its slice along dim over tp."""
    local = lesson00.shard(lesson00.shard(full, 0, ep_group), dim, tp_group)
    p = nn.Parameter(local)
    p.shardings = ((0, ep_group), (dim, tp_group))
    return p


def ep_moe(full: MoE, groups: dict) -> MoE:
    """A copy with its experts split over ep, and all its MLPs over tp."""
    moe = copy.deepcopy(full)
    moe.experts = ExpertParallel(full.experts, groups["ep"], groups["tp"])
    moe.shared_expert = lesson01.tp_mlp(full.shared_expert, groups["tp"])
    moe.batch_groups = (groups["ep"], groups["dp"])
    return moe


def ep_transformer(full, groups: dict):
    """A copy with its experts split over ep, and its layers over tp as in lesson 02."""
    model = copy.deepcopy(full)
    for layer in model.layers:
        mlp = layer.mlp
        if isinstance(mlp, MoE):
            layer.mlp = mlp.shared_expert  # for parallelize_layer; replaced below
        lesson02.parallelize_layer(layer, groups["tp"])
        if isinstance(mlp, MoE):
            layer.mlp = ep_moe(mlp, groups)
    return model


# ---- Whose tokens, the loss, and which gradients are summed
#
# Ranks of ep and of dp have different tokens; ranks of tp have the same, and there the
# rules of lesson 02 hold. A rank's loss is its part of the mean over all tokens, so
# gradients are sums over ranks, and none is divided by R:
#
#     parameter                         its input on a rank          sum over
#     experts                           all tokens of its ep group   dp
#     all others, also shared experts   tokens of this rank          ep and dp
#
# An expert has seen the tokens of its whole ep group, and backward has brought it dL/dy
# of all of them, each from its own rank's loss: its gradient is complete. A sum over ep
# would add gradients of different experts. In a dp group, replicas of an expert have
# seen different tokens. As one rule: sum over each axis that splits the batch, except
# over one that shards the parameter.


def split_batch(batch: tuple, groups: dict) -> list[Tensor]:
    """This rank's sequences of tokens and targets. Shapes: [B, S] → [b, S]."""
    of_dp = [lesson00.shard(x, 0, groups["dp"]) for x in batch]
    return [lesson00.shard(x, 0, groups["ep"]) for x in of_dp]


def moe_layers(model) -> list[MoE]:
    """All MoE layers, in order."""
    return [module for module in model.modules() if isinstance(module, MoE)]


def ep_loss(logits_bSV: Tensor, target_bS: Tensor, model, balance: float, groups):
    """The mean loss of all ranks' tokens, plus `balance` times the balance losses."""
    logits = logits_bSV.flatten(0, 1)
    loss_sum = F.cross_entropy(logits, target_bS.flatten(), reduction="sum")
    targets = (target_bS != lesson02.IGNORE).sum()
    for axis in ("ep", "dp"):
        targets = lesson00.all_reduce(targets, groups[axis])
    loss = loss_sum / targets + balance * sum(moe.balance for moe in moe_layers(model))
    for axis in ("ep", "dp"):  # g sums the parts; its backward is the identity
        loss = lesson01.ReduceFromTP.apply(loss, groups[axis])
    return loss


def is_sharded_over(p: Tensor, group) -> bool:
    """Does this rank hold only a part of p, and the group's other ranks the rest?"""
    return any(group is other for dim, other in lesson01.shardings_of(p))


def sum_gradients(model, groups: dict) -> None:
    """Sum as in the table. Communication: one all-reduce over ep, one over dp."""
    for axis in ("ep", "dp"):
        to_sum = nn.ParameterList()  # it has parameters(), like a model
        for p in model.parameters():
            is_complete = is_sharded_over(p, groups[axis])
            if not is_complete:
                to_sum.append(p)
        lesson05.all_reduce_gradients(to_sum, groups[axis])


# ==== RUN


def main(args, report: lesson00.Report) -> None:
    """Train the same model in one process and with EP, then compare."""
    mesh = {"dp": args.ranks // (args.ep * args.tp), "ep": args.ep, "tp": args.tp}
    groups = lesson00.mesh_groups(mesh, args.timeout)
    size = letters_of(args)
    report.begin(mesh, size)
    full = make_moe_transformer(args)
    batches = lesson02.make_batches(__doc__, args, args.steps)
    alone, chosen = train_without_ep(full, batches, args)
    check_lesson_model(report, alone, size)
    forwards = [rows_between(expert_tk, groups, args) for expert_tk in chosen]
    show_rows(report, forwards[0])
    runs = {"without EP": alone}
    for name in ("EP", "PyTorch"):
        # If your edit raises an error in one run, the others continue.
        with report.column(name):
            runs[name] = train_ep(name, full, batches, args, groups)
    show_training(report, runs, groups)
    show_gradients(report, runs)
    show_one_layer(report, size, groups)
    show_communication(report, forwards, runs, size, groups)
    show_memory(report, runs, size, groups, batches[0])


def pytorch_exchange(x_rD: Tensor, send: list, recv: list, group) -> Tensor:
    """AllToAllRows.apply by PyTorch 2.13, from a module that is private so far."""
    return all_to_all_single_autograd(x_rD, recv, send, group)


def make_moe_transformer(args):
    """The decoder of lesson 02, with experts next to every second MLP."""
    full = lesson02.make_transformer(args)
    for layer in full.layers[1::2]:
        moe = MoE(layer.mlp, args.experts, args.top_k)
        layer.mlp = moe.to(args.device, getattr(torch, args.dtype))
    return full


def train_without_ep(full, batches, args) -> tuple:
    """The reference; and the experts [t, k] that its routers chose in each forward."""
    model = copy.deepcopy(full)
    layers = moe_layers(model)
    chosen = []

    def record(router, inputs, logits_tE):
        chosen.append(logits_tE.softmax(-1).topk(args.top_k, -1).indices)

    def loss_of(logits, target):
        balance = sum(moe.balance for moe in layers)
        return lesson02.mean_loss(logits, target) + args.balance * balance

    # The experts are chosen inside MoE.forward, from the router's output.
    hooks = [moe.router.register_forward_hook(record) for moe in layers]
    run = lesson02.train_transformer("without EP", model, batches, args, None, loss_of)
    for hook in hooks:
        hook.remove()
    return run, chosen


def train_ep(name, full, batches, args, groups) -> lesson02.TrainingRun:
    """Train on this rank's sequences of each batch, as a data loader would split it."""
    model = ep_transformer(full, groups)
    if name == "PyTorch":
        for moe in moe_layers(model):
            moe.experts.exchange = pytorch_exchange
    batches = [split_batch(batch, groups) for batch in batches]
    return lesson02.train_transformer(
        name, model, batches, args, groups["tp"],
        lambda logits, target: ep_loss(logits, target, model, args.balance, groups),
        after_backward=lambda model: sum_gradients(model, groups),
        # It counts once what several ranks hold (expert_norm.py).
        norm_of=lambda model, tp_group: ep_norm(model, groups),
    )  # fmt: skip


# ---- The sections of the output, in order; the first is show_rows of routed_rows.py


def show_training(report, runs: dict, groups: dict) -> None:
    """Losses; norms, parameters after training and replicas only if they are off."""
    report.section("Losses")
    values = lambda field: lesson01.values_of(runs, field)
    report.compare("losses", values("losses"), allowed=report.allowed_loss)
    # AdamW divides a gradient by its size, so losses could hide a factor; norms do not.
    report.compare("norms", values("norms"), brief="norms")
    report.compare("parameters", values("parameters"), fold=kind_of, brief="parameters")
    # After training, what several ranks hold must be bitwise equal on them.
    rows = []
    for name, (axis, group) in product(runs, groups.items()):
        tensors = {}
        for p_name, p in runs[name].model.named_parameters():
            if group.size() > 1 and not is_sharded_over(p, group):
                tensors[f"{p_name} over {axis}, {name}"] = p
        rows.append(lesson01.replicas_row(report, f"{axis}, {name}", tensors, group))
    compared = sum(row["tensors"] for row in rows)
    report.table("replicas", rows, brief=f"{compared} replicas")
    report.agree("as without EP")


def show_gradients(report, runs: dict) -> None:
    """Gradients of step 1; a row has all parameters of one kind."""
    report.section("Gradients of step 1: norms, and the largest relative difference")
    report.compare("gradients", lesson01.values_of(runs, "gradients"), fold=kind_of)


def kind_of(name: str) -> str:
    """The row of a parameter in the table of gradients."""
    for part in ("router", "shared_expert", "experts", "self_attn", "mlp"):
        if part in name:
            return part
    return "embedding, norms, head"


# ---- One layer on its own

# What its router does, k, and the weight that makes expert 0 attractive to all tokens.
CASES = [
    ("random", 1, 0.0), ("random", 2, 0.0), ("random", 3, 0.0),
    ("none to expert 0", 2, -9.0), ("all to expert 0", 1, 9.0),
]  # fmt: skip


def show_one_layer(report, size: dict, groups: dict) -> None:
    """Output and gradients of one MoE layer for several routers, and what it sends."""
    report.section("One MoE layer, random input: output, all gradients, bytes sent")
    report.say(
        "   sends: bytes of rows to other ranks, forward and backward; 8·E of counts\n"
        "   by y: norm of the router's gradient through y alone, without balance loss"
    )
    R = size["R"]
    rows = []
    with report.column("one layer"):
        for case in CASES:
            if case[1] == 1 or case[1] < size["E"]:
                rows.append(layer_row(report, case, size, groups))
    report.table("one layer", rows, hide=["ok"])
    # For k = 1, and if each rank's experts get 1/R of the rows.
    even = lesson00.evaluate("4·t·(R - 1)/R·D·e", size)
    under_tp = bytes_under_tp(size, groups, report.args)
    report.check("bytes", "the same tokens by TP", abs(under_tp - R * even))
    if R > 1:
        text = f"A rank sends k · {even:,} bytes or so, by TP (all tokens) {under_tp:,}"
        report.conclude(f"{text}: less if k < {R}.")


def layer_row(report, case: tuple, size: dict, groups: dict) -> dict:
    """EP compared with one process; bytes compared with what the router chose."""
    router, k, attraction = case
    name = f"{router}, k {k}"  # as in the table
    alone, tensors = random_layer(k, attraction, size, report.args)
    chosen = alone.router(tensors[0].flatten(0, 1)).topk(k, -1).indices
    rows_RE = rows_between(chosen, groups, report.args)
    moe = ep_moe(alone, groups)
    with lesson00.COMM.label(name, ""):
        found = run_layer(moe, split_batch(tensors, groups))
    expected = run_layer(alone, tensors)
    row = {"router": router, "k": k}
    row["rows by expert"] = by_owner_text(rows_RE.sum(0), size["R"])
    row["sends"] = lesson00.COMM.bytes[lesson00.Call(name, "", "all-to-all", "ep")]
    # Two all-to-alls of rows forward and two backward; 8·E: the counts before them.
    formula = "4·m·D·e + 8·E" if size["R"] > 1 else "0"
    sizes = dict(size, **rows_of_rank([rows_RE], groups))
    predicted = lesson00.evaluate(formula, sizes)
    report.expect(row, "sends", "bytes", f"one layer, {name}, sends", predicted)
    sum_gradients(moe, groups)
    found.update(lesson02.unshard_model(moe, "grad"))
    for what in ("y", "dL/dx"):  # of this rank's tokens
        expected[what] = split_batch([expected[what]], groups)[0]
    expected.update(lesson02.unshard_model(alone, "grad"))
    row["by y"] = router_gradient(alone, tensors)
    compare_layer(report, row, name, found, expected)
    return row


def random_layer(k: int, attraction: float, size: dict, args) -> tuple:
    """An MoE layer, and its input and dL/dy [B, S, D]; the same on every rank."""
    torch.manual_seed(args.seed)
    moe = MoE(lesson01.MLP(size["D"], size["F"]), size["E"], k)
    tensors = torch.randn(2, size["B"], size["S"], size["D"])
    tensors[0, ..., 0] = 1  # one feature is the same in all tokens
    moe.router.weight.data[0, 0] += attraction
    dtype = getattr(torch, args.dtype)
    return moe.to(args.device, dtype), list(tensors.to(args.device, dtype))


# ---- What is sent, and what is stored


def show_communication(report, forwards, runs: dict, size: dict, groups: dict) -> None:
    """Calls and bytes of all steps as counted, against formulas."""
    sizes = dict(size, n=len(forwards), steps=report.args.steps, own=0, rest=0)
    sizes.update(rows_of_rank(forwards, groups))
    for p in runs["EP"].model.parameters() if "EP" in runs else []:
        sizes["own" if is_sharded_over(p, groups["ep"]) else "rest"] += p.numel()
    Calls = lesson00.Calls
    call = lambda phase, collective, axis: lesson00.Call("EP", phase, collective, axis)
    exchanges = [Calls("2·n", "m·D·e")]  # to the experts, and back
    # g or f of attention and MLPs, as in lesson 02; then of the experts' rows.
    under_tp = [Calls("2·L·steps", "b·S·D·e"), Calls("n", "got·D·e")]
    formulas = {
        # First the counts: how many rows will come.
        call("forward", "all-to-all", "ep"): [Calls("n", "8·E")] + exchanges,
        call("backward", "all-to-all", "ep"): exchanges,
        call("forward", "all-reduce", "tp"): under_tp,
        call("backward", "all-reduce", "tp"): under_tp,
        # Gradients: of experts only over dp, of all others over ep as well.
        call("summing", "all-reduce", "ep"): [Calls("steps", "rest·e")],
        call("summing", "all-reduce", "dp"): [Calls("steps", "(rest + own)·e")],
        # One float64, the squares of all gradients.
        call("clipping", "all-reduce", "ep"): [Calls("steps", "8")],
        call("clipping", "all-reduce", "tp"): [Calls("steps", "8")],
    }
    for axis in ("ep", "dp"):
        # Rows per expert for the balance loss; the number of targets, then the loss.
        formulas[call("forward", "all-reduce", axis)] = [Calls("n", "8·E")]
        of_loss = [Calls("steps", "8"), Calls("steps", "e")]
        formulas[call("loss", "all-reduce", axis)] = of_loss
    leave = f"m = {sizes['m']:.2f} rows leave per all-to-all"
    report.section(f"Communication of rank 0: n = {sizes['n']} MoE passes, {leave}")
    report.ledger(formulas, sizes, hide=["run", "ring"])
    if size["R"] > 1:
        text = f"rest = {sizes['rest']:,} elements of gradients are summed over ep"
        report.conclude(f"{text}; own = {sizes['own']:,}, the experts', are not.")


# What is stored → bytes on a rank; every second layer has experts.
PARAMETERS = {
    "embed_tokens, lm_head, norms": "((2·D + 1)·V + (4·L + 2)·D)·e",
    "q, k and v": "L·(D + 2·K·H)·(D + 1)·e/T",
    "o_proj, routers": "L·D·(D/T + 1 + E/2)·e",
    "MLPs, shared experts": "L·((2·D + 1)·F/T + D)·e",
    "experts": "L/2·E/R·2·D·F/T·e",
}
# Parameters of the decoder; in every other layer a router, up_proj and down_proj.
TENSORS = "16·L + 5 + 3·L/2"


def check_lesson_model(report, run: lesson02.TrainingRun, size: dict) -> None:
    """Does the model without EP fit its formulas, or has it been edited?"""
    predicted = lesson02.add_up(PARAMETERS, {"": dict(size, T=1, R=1)})[1][""]
    used = lesson01.nbytes(p.grad for p in run.model.parameters())
    report.is_edited = not isinstance(run.optimizer, torch.optim.AdamW)
    # AdamW stores a 4-byte step count per tensor. Are the tensors the lesson's?
    counts = (4 * len(run.parameters), 4 * lesson00.evaluate(TENSORS, size))
    report.check_model(parameters=(used, predicted), **{"step counts": counts})


def show_memory(report, runs: dict, size: dict, groups: dict, batch) -> None:
    """Bytes that a rank stores: parameters, gradients and AdamW's moments."""
    sizes = {"without EP": dict(size, T=1, R=1), "EP": size}
    measured = {"without EP": lesson02.bytes_stored(runs["without EP"], batch)}
    if "EP" in runs:
        measured["EP"] = lesson02.bytes_stored(runs["EP"], split_batch(batch, groups))
    report.section("Memory per rank in bytes; gradients take as much as parameters")
    rows, sums = lesson02.add_up(PARAMETERS, sizes)
    text = "sum (all parts: --verbose)"
    rows.append(lesson02.measured_row(report, "parameters", text, sums, measured))
    lesson02.measured_row(report, "gradients", text, sums, measured)  # checked only
    tensors = lesson00.evaluate(TENSORS, size)
    # AdamW stores two moments per parameter, and a step count per tensor.
    total = {name: 2 * sums[name] + 4 * tensors for name in sizes}
    text = f"2·sum + 4·{tensors} step counts"
    rows.append(lesson02.measured_row(report, "optimizer state", text, total, measured))
    report.table("memory", rows if report.args.verbose else rows[-3:])
    part = f"{100 * sums['EP'] / sums['without EP']:.0f} % of all parameters"
    report.conclude(f"With R = {size['R']} and T = {size['T']} a rank stores {part}.")


# ==== BREAK IT

BREAKS = {
    "no-backward": dict(
        target="ExpertParallel.__init__",
        old="    self.exchange = AllToAllRows.apply\n",
        new="    self.exchange = all_to_all_rows\n",
        what="rows travel by a plain all-to-all, which autograd does not track",
        symptom="the loss of step 1 is right, and it falls; experts have no gradient",
        why="what arrives is a new tensor without history. Embedding, attention and "
        "shared experts still learn, which is enough for a loss that falls",
        reported="github.com/facebookresearch/fairscale/pull/137 (adds the backward); "
        "pytorch/torchtitan, 989",
    ),
    "router": dict(
        target="MoE.forward",
        old="    weights_tk = probs_tk / probs_tk.sum(-1, keepdim=True)\n",
        new="    weights_tk = probs_tk / probs_tk.sum(-1, keepdim=True)\n"
        "    if self.batch_groups:\n"
        "        weights_tk = weights_tk.detach()\n",
        what="with EP the weights of the experts' outputs have no history",
        symptom="the loss of step 1 is right; the router's gradient is too small",
        why="the choice of experts has no gradient, so only the weights connect the "
        "router with the loss; what is left is the balance loss",
        reported="github.com/NVIDIA-NeMo/Automodel/pull/2995, point 2 (probabilities "
        "were gathered by a plain all-gather); huggingface/transformers, 48687",
    ),
    "balance": dict(
        target="balance_loss",
        old="    share_E = all_counts_E.to(probs_tE.dtype) / rows\n",
        new="    share_E = counts_E.to(probs_tE.dtype) / counts_E.sum()\n",
        what="the balance loss uses the shares of this rank's rows",
        symptom="the loss is slightly too large, and the router's gradient is wrong",
        why="each rank is pushed to spread its own tokens evenly, although the batch "
        "may be balanced; a mean of products is not the product of means",
        reported="arXiv:2501.11873 (the usual implementation); "
        "github.com/pytorch/torchtitan/pull/4772",
    ),
    "divided": dict(
        target="sum_gradients",
        old='    for axis in ("ep", "dp"):\n',
        new="    for p in model.parameters():\n"
        '        if is_sharded_over(p, groups["ep"]):\n'
        '            p.grad /= groups["ep"].size()\n'
        '    for axis in ("ep", "dp"):\n',
        what="gradients of experts are divided by the number of ep ranks",
        symptom="step 1's loss is right; gradients of experts are not",
        why="the division is right if each rank's loss is the mean of its own tokens "
        "and all other gradients are averaged; here the loss is divided by all tokens",
        reported="github.com/pytorch/pytorch/issues/160285 (a factor of R); "
        "databricks/megablocks, 86; NVIDIA/Megatron-LM, 5956",
    ),
    "all": dict(
        target="sum_gradients",
        old="            is_complete = is_sharded_over(p, groups[axis])\n",
        new="            is_complete = False\n",
        what="all gradients are summed over ep, as plain data parallelism does",
        symptom="the loss of step 1 is right; experts get each other's gradients",
        why="the ranks of ep hold different experts under the same name and shape, so "
        "nothing complains",
        reported="github.com/NVIDIA/Megatron-LM/pull/5916 (gradients mix)",
    ),
    "replicas": dict(
        target="sum_gradients",
        old="            is_complete = is_sharded_over(p, groups[axis])\n",
        new='            is_complete = is_sharded_over(p, groups["ep"])\n',
        what="replicas of an expert on several dp ranks keep their own gradients",
        symptom="the loss of step 1 is right; then replicas of experts differ",
        why="if ep is smaller than the ranks that split the batch, several ranks hold "
        "the same expert, and each has the gradient of its own ep group's tokens",
        reported="github.com/NVIDIA-NeMo/Automodel/pull/3135; "
        "facebookresearch/fairseq, 4220",
    ),
    "shared": dict(
        target="sum_gradients",
        old="        for p in model.parameters():\n"
        "            is_complete = is_sharded_over(p, groups[axis])\n",
        new="        for name, p in model.named_parameters():\n"
        '            is_complete = "expert" in name\n',
        what="experts are found by name, and shared_expert has the word in its name",
        symptom="the loss of step 1 is right; replicas of the shared expert diverge",
        why="a shared expert is replicated on all ranks of ep, and each applies it to "
        "its own tokens, so its gradient has to be summed",
        reported="github.com/NVIDIA-NeMo/Automodel/pull/3817 (experts by name); "
        "alibaba/Pai-Megatron-Patch, 397 (a shared expert's gate)",
    ),
    "twice": dict(
        target="ep_moe",
        old="    return moe\n",
        new="    moe.shared_expert.register_forward_hook(\n"
        '        lambda mlp, x, y: lesson01.ReduceFromTP.apply(y, groups["tp"])\n'
        "    )\n"
        "    return moe\n",
        what="under TP the output of the shared expert is summed over tp a second time",
        symptom="the loss of step 1 is wrong: the shared expert counts T times",
        why="its down_proj has summed the partial outputs already, so all ranks of tp "
        "hold the complete output",
        reported="github.com/RBLN-SW/vllm-rbln/pull/960",
    ),
    "inverse": dict(
        target="ExpertParallel.forward",
        old="    y = undo_sort(y, order)\n",
        new="    y = y[order]\n",
        what="rows are sorted a second time by `order`, instead of by its inverse",
        symptom="no error; losses are wrong: tokens get the outputs of other tokens",
        why="y[order] undoes a sort only if order is its own inverse. With one expert "
        "per rank nothing is sorted, so a small test passes",
        reported="github.com/tile-ai/TileOPs/pull/640",
    ),
    "empty": dict(
        target="ExpertParallel.forward",
        old="    y = lesson01.ReduceFromTP.apply(partial_y, self.tp_group)  # g\n",
        new="    y = lesson01.ReduceFromTP.apply(partial_y, self.tp_group)  # g\n"
        "    if len(y) == 0:\n"
        "        y = y.new_empty(y.shape)\n",
        what="a rank whose experts get no rows returns a new, empty tensor",
        symptom="training works until a rank gets no rows; then backward hangs",
        why="the new tensor has no history, so this rank does not call the all-to-alls "
        "of backward, and the others wait for it",
        reported="github.com/PaddlePaddle/PaddleFormers/pull/3010; NVIDIA/Megatron-LM, "
        "4851",
    ),
    "norm": dict(
        target="ep_norm",
        old='    for axis in ("ep", "tp"):\n'
        "        total = lesson00.all_reduce(total, groups[axis])\n",
        new='    total = lesson00.all_reduce(total, groups["tp"])\n',
        what="squares are not summed over ep: a norm lacks a part of the gradient",
        symptom="gradients are right; norms differ between ranks, so replicas diverge",
        why="the squares of an expert's gradient are on its owner, and those of a "
        "replicated one are divided by R on each rank: the sum over ep completes both",
        reported="github.com/NVIDIA-NeMo/Automodel/pull/3817; NVIDIA/Megatron-LM, 5916",
    ),
}


# ==== FLAGS
# region


def parse_args(ranks: int) -> argparse.Namespace:
    """The flags of the model. ValueError if it cannot be built or split."""
    sizes = {"steps": 3, "layers": 2, "batch_size": 0, "seq_len": 32, "vocab_size": 257}
    parser = lesson00.lesson_parser(__doc__, BREAKS, sections=6, **sizes)
    add = parser.add_argument
    positive = lesson00.positive
    add("--ep", type=positive, help="R, ranks that split the experts (ranks / tp)")
    add("--tp", type=positive, default=1, help="TP ranks for each ep rank (1)")
    add("--experts", type=positive, help="E (8, or the next multiple of R)")
    add("--top-k", type=positive, default=2, help="k, experts per token (2)")
    add("--balance", type=float, default=0.01, help="weight of the balance loss (0.01)")
    add("--hidden", type=positive, help="D (8 per head)")
    add("--heads", type=positive, help="N (2·K)")
    add("--kv-heads", type=positive, help="K (4, or the next multiple of T)")
    add("--clip", type=float, default=0.5, help="largest norm of a gradient (0.5)")
    args = parser.parse_args()
    args.dropout = 0.0  # each rank would have to sample its part of one mask
    fill_mesh(args, ranks)
    R, batch_ranks = args.ep, ranks // args.tp
    args.experts = args.experts or R * math.ceil(8 / R)
    args.batch_size = args.batch_size or batch_ranks * math.ceil(8 / batch_ranks)
    args.kv_heads = args.kv_heads or args.tp * math.ceil(4 / args.tp)
    args.heads = args.heads or 2 * args.kv_heads
    args.hidden = args.hidden or 8 * args.heads
    lesson01.must_divide(args, "experts", R, "(--ep)")
    lesson01.must_divide(args, "batch_size", batch_ranks, "ranks of dp × ep")
    lesson01.must_divide(args, "layers", 2, "(every second layer has experts)")
    lesson01.must_divide(args, "kv_heads", args.tp, "(--tp)")
    lesson01.must_divide(args, "heads", args.kv_heads, "(--kv-heads)")
    lesson01.must_divide(args, "hidden", 2 * args.heads, "(2 · --heads: rotary pairs)")
    lesson01.raise_refused(args)
    if args.top_k > args.experts:
        text = f"there are {args.experts} experts; take --top-k {args.experts}"
        raise ValueError(f"--top-k {args.top_k}: {text}")
    if args.bug == "inverse" and args.experts == R:
        text = f"one expert per rank, so nothing is sorted; take --experts {2 * R}"
        raise ValueError(f"--break inverse with --experts {R}: {text}")
    lesson02.raise_wrong_sizes(args)
    if not args.balance >= 0:
        raise ValueError(f"--balance {args.balance}: must be at least 0")
    if args.balance == 0 and args.top_k == 1:
        text = "nothing trains the router; take --balance 0.01"
        raise ValueError(f"--balance 0 with --top-k 1: {text}")
    return args


def fill_mesh(args, ranks: int) -> None:
    """Fill in --ep and --tp. ValueError if the ranks cannot be split like this."""
    if args.bug == "twice" and args.tp == 1 and ranks > 1:
        if ranks % 2 != 0:
            raise ValueError("--break twice needs an even number of ranks")
        args.tp = 2  # with one rank in a TP group a second sum changes nothing
    if args.bug == "replicas" and not args.ep:
        args.ep = max(1, ranks // (2 * args.tp))  # so that dp has 2 ranks
    args.ep = args.ep or max(1, ranks // args.tp)
    if ranks % (args.ep * args.tp) != 0:
        product = f"{args.ep} · {args.tp} = {args.ep * args.tp}"
        tp = math.gcd(ranks, args.tp)
        take = f"take --ep {math.gcd(ranks // tp, args.ep)} --tp {tp}"
        text = f"--ep · --tp: {product} does not divide {ranks} ranks"
        raise ValueError(f"{text}; {take}")
    if args.bug == "replicas" and args.ep * args.tp == ranks > 1:
        text = "no expert has a replica; take --ep 1 --tp 1"
        raise ValueError(f"--break replicas with --ep {args.ep} --tp {args.tp}: {text}")


def letters_of(args) -> dict[str, int]:
    """The letters of the shape legend."""
    size = lesson02.sizes_of(args)
    b = args.batch_size * args.tp // args.ranks
    size.update(T=args.tp, R=args.ep, E=args.experts, k=args.top_k)
    size.update(b=b, t=b * args.seq_len)
    return size


# endregion


if __name__ == "__main__":
    lesson00.launch(main, parse_args, globals())
