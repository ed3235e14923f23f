"""Beyond the lessons 16: expert parallelism.

A mixture of experts has E MLPs instead of one, and a router that sends each token to
the k best of them. With expert parallelism (EP) each rank owns some of the experts, and
tokens travel: to the ranks that own their experts, and back. EP needs no ranks of its
own, it borrows those of data parallelism. So a rank's attention sees its own tokens,
its experts see those of all ranks of its group, and only some gradients are summed.

Run it on 4 ranks (1, 2 and 8 also work):

    torchrun --standalone --nproc_per_node=4 beyond/16_expert_parallel.py

What you will see: who owns which experts, and how many rows each rank sends to whom; a
small decoder, trained in one process, with EP, and with EP by PyTorch's all-to-all (the
rest is the same code), with equal losses, gradients and parameters; one layer for k =
1, 2, 3 and for unbalanced routers; what is sent, compared with TP; memory.

Try one change at a time. notebooks/16_expert_parallel.ipynb, section 9, answers.
    1. --ep 2, so that two ranks hold each expert. Which calls are new?
    2. Weigh outputs by the probability itself, as Switch does: in MoE.forward, delete
       the division by the sum. All values agree. What changes in section 4 for k = 1?
    3. --tp 2, so that a rank has twice as many tokens. What is sent in addition, and
       why do all-to-alls not send twice as much?

How to read this file: NEW is the lesson, RUN trains and prints. Bugs to try:
`python tools/bug.py 16`. Short of time? Read MoE, ExpertParallel and sum_gradients.

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
    from harness import cell, on_axes, sizes_without_dropout, take_calls
    from leaving_rows import CountLeaving
    from one_moe_layer import bytes_under_tp, compare_layer, router_gradient, run_layer
    from routed_rows import by_owner_text, rows_between, rows_of_rank, show_rows
    from shardings import shardings_of, unshard, unshard_model
    from stored_bytes import memory_rows
except ModuleNotFoundError as error:  # a copy of this file, without its repository
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(60)  # rank 0 says why, and torchrun ends all
    print(f"error: this script imports the course's lessons: {error}", file=sys.stderr)
    sys.exit(2)

# ==== NEW in 16: expert parallelism
# Read lines 73 to 339, in about 27 minutes. Stop at RUN.

# From lesson 00: shard is this rank's slice, all_to_all sends part j to rank j, and
# mesh_groups returns this rank's group along each axis of a mesh. From lesson 01:
# CopyToTP (f) is the identity forward and an all-reduce backward, and ReduceFromTP (g)
# is the reverse. From lesson 02: the decoder, IGNORE (the target of a position without
# loss), and parallelize_layer, which splits attention and an MLP. From 05:
# all_reduce_gradients, a sum over a group. shardings_of(p) of shardings.py is
# ((dim, group), …): how p is split.

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
    """
    x_rD = x_rD.detach().contiguous()
    if group.size() == 1:
        return x_rD.clone()
    arrived = x_rD.new_empty(sum(recv), x_rD.shape[1])
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
    return any(group is other for _, other in shardings_of(p))


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
    mesh = {"dp": args.dp, "ep": args.ep, "tp": args.tp}
    groups = lesson00.mesh_groups(mesh, args.timeout)
    full = make_moe_transformer(args)
    batches = lesson02.make_batches(__doc__, args, args.steps)
    alone, chosen = train_without_ep(full, batches, args)
    forwards = [rows_between(expert_tk, groups, args) for expert_tk in chosen]
    show_rows(report, forwards[0])
    runs = {"without EP": alone}
    for name in ("EP", "PyTorch"):
        # If your edit raises an error in one run, the others continue.
        with report.guard(name), CountLeaving():
            runs[name] = train_ep(name, full, batches, args, groups)
    show_training(report, runs, args, groups)
    show_one_layer(report, args, groups)
    show_communication(report, forwards, runs, args, groups)
    show_memory(report, runs)


def sizes(args) -> dict[str, int]:
    """The letters of the legend. ValueError if the model cannot be built or split."""
    fill_mesh(args)
    R = args.ep
    batch_ranks = args.ranks // args.tp
    args.experts = args.experts or R * math.ceil(8 / R)
    args.batch_size = args.batch_size or batch_ranks * math.ceil(8 / batch_ranks)
    lesson00.must_divide(args, "experts", R, "(--ep)")
    lesson00.must_divide(args, "batch_size", batch_ranks, "ranks of dp × ep")
    lesson00.must_divide(args, "layers", 2, "(every second layer has experts)")
    size = sizes_without_dropout(args)
    if args.top_k > args.experts:
        text = f"there are {args.experts} experts; take --top-k {args.experts}"
        raise ValueError(f"--top-k {args.top_k}: {text}")
    if not 0 <= args.balance < math.inf:
        text = "must be a number from 0 on; take --balance 0.01"
        raise ValueError(f"--balance {args.balance}: {text}")
    if args.balance == 0 and args.top_k == 1:
        text = "nothing trains the router; take --balance 0.01"
        raise ValueError(f"--balance 0 with --top-k 1: {text}")
    b = args.batch_size // batch_ranks
    size.update(T=args.tp, R=R, E=args.experts, k=args.top_k)
    return dict(size, b=b, t=b * args.seq_len)


def fill_mesh(args) -> None:
    """Fill in --ep and --dp. ValueError if the ranks cannot be split like this."""
    ranks = args.ranks
    args.ep = args.ep or max(1, ranks // args.tp)
    if ranks % (args.ep * args.tp) != 0:
        product = f"{args.ep} · {args.tp} = {args.ep * args.tp}"
        tp = math.gcd(ranks, args.tp)
        take = f"take --ep {math.gcd(ranks // tp, args.ep)} --tp {tp}"
        text = f"--ep · --tp: {product} does not divide {ranks} ranks"
        raise ValueError(f"{text}; {take}")
    args.dp = ranks // (args.ep * args.tp)
    args.mesh = f"dp {args.dp} × ep {args.ep} × tp {args.tp}"


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
    run = lesson02.train_transformer(
        name, model, batches, args, groups["tp"],
        lambda logits, target: ep_loss(logits, target, model, args.balance, groups),
        after_backward=lambda model: sum_gradients(model, groups),
        # It counts once what several ranks hold (expert_norm.py).
        norm_of=lambda model, tp_group: ep_norm(model, groups),
    )  # fmt: skip
    for p_name, p in model.named_parameters():
        for tensors in (run.gradients, run.parameters):
            # Lesson 02 has gathered what is split over one group. Experts are left.
            if hasattr(p, "shardings") and tensors[p_name].numel():
                tensors[p_name] = unshard(tensors[p_name], p.shardings)
    return run


# ---- The sections of the output, in order; the first is show_rows of routed_rows.py


def show_training(report: lesson00.Report, runs: dict, args, groups: dict) -> None:
    """Losses, norms, parameters after training, replicas; gradients of step 1."""
    allowed = lesson00.ALLOWED[args.dtype]
    values = lambda field: lesson01.values_of(runs, field)
    report.section("Losses")
    report.compare("losses", values("losses"), lesson00.ALLOWED_LOSS[args.dtype])
    # AdamW divides a gradient by its size, so losses could hide a factor; norms do not.
    report.compare("norms", values("norms"), allowed, brief=True)
    report.compare("parameters", values("parameters"), allowed, brief=True)
    # After training, what several ranks hold must be bitwise equal on them.
    equal = []
    for name, (axis, group) in product(runs, groups.items()):
        for p_name, p in runs[name].model.named_parameters():
            if group.size() > 1 and not is_sharded_over(p, group):
                replicas = lesson00.all_gather(p[None], 0, group)
                diff = max(lesson00.rel_diff(x, replicas[0]) for x in replicas)
                check = f"replicas: {p_name} over {axis}, {name}"
                equal.append(report.check(check, diff))
    report.say(f"{sum(equal)} of {len(equal)} replicas are bitwise identical")
    report.section("Gradients of step 1: norms, and the largest relative difference")
    report.compare("gradients", values("gradients"), allowed, fold=kind_of)


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


def show_one_layer(report: lesson00.Report, args, groups: dict) -> None:
    """Output and gradients of one MoE layer for several routers, and what it sends."""
    size = report.size
    R = size["R"]
    report.section("One MoE layer, random input: output, all gradients, bytes sent")
    report.say(
        "sends: bytes, forward and backward. ‖g‖ by y: router's, without balance loss."
    )
    rows = []
    with report.guard("one layer"):
        for case in CASES:
            if case[1] == 1 or case[1] < size["E"]:
                rows.append(layer_row(report, case, args, groups))
    report.table(rows)
    # For k = 1, and if each rank's experts get 1/R of the rows.
    even = lesson00.evaluate("4·t·(R - 1)/R·D·e", size)
    under_tp = bytes_under_tp(size, groups, args)
    cell(report, "bytes: the same tokens by TP", under_tp, str(R * even))
    if R > 1:
        text = f"With even rows a rank sends k · {even:,} bytes, under TP {under_tp:,}"
        report.say(f"{text}: less if k < {R}.")


def layer_row(report: lesson00.Report, case: tuple, args, groups: dict) -> dict:
    """EP compared with one process; bytes compared with what the router chose."""
    router, k = case[:2]
    name = f"{router}, k {k}"  # as in the table
    alone, tensors = random_layer(case, report.size, args)
    chosen = alone.router(tensors[0].flatten(0, 1)).topk(k, -1).indices
    rows_RE = rows_between(chosen, groups, args)
    moe = ep_moe(alone, groups)
    with CountLeaving(), lesson00.METER.phase(name, ""):
        found = run_layer(moe, split_batch(tensors, groups))
    sent = take_calls(name).get((name, "", "all-to-all-v", "ep"), [])
    expected = run_layer(alone, tensors)
    row = {"router": router, "k": k}
    row["rows by expert"] = by_owner_text(rows_RE.sum(0), args.ep)
    # Two all-to-alls of rows forward and two backward; 8·E: the counts before them.
    formula = "4·m·D·e + 8·E" if args.ep > 1 else "0"
    check = f"bytes: one layer, {name}, sends"
    letters = rows_of_rank([rows_RE], groups)
    row["sends"] = cell(report, check, sum(sent), formula, **letters)
    sum_gradients(moe, groups)
    found.update(unshard_model(moe, "grad"))
    for what in ("y", "dL/dx"):  # of this rank's tokens
        expected[what] = split_batch([expected[what]], groups)[0]
    expected.update(unshard_model(alone, "grad"))
    row["‖g‖ by y"] = router_gradient(alone, tensors)
    row["diff"] = compare_layer(
        report, name, found, expected, lesson00.ALLOWED[args.dtype]
    )
    return row


def random_layer(case: tuple, size: dict, args) -> tuple:
    """An MoE layer, and its input and dL/dy [B, S, D]; the same on every rank."""
    _, k, attraction = case
    torch.manual_seed(args.seed)
    moe = MoE(lesson01.MLP(size["D"], size["F"]), size["E"], k)
    tensors = torch.randn(2, size["B"], size["S"], size["D"])
    tensors[0, ..., 0] = 1  # one feature is the same in all tokens
    moe.router.weight.data[0, 0] += attraction
    dtype = getattr(torch, args.dtype)
    return moe.to(args.device, dtype), list(tensors.to(args.device, dtype))


# ---- What is sent, and what is stored


def show_communication(report, forwards, runs: dict, args, groups: dict) -> None:
    """Calls and bytes of all steps as counted, against formulas."""
    take_calls("PyTorch")  # they are PyTorch's own: no row
    size = report.size
    n = len(forwards)
    steps = args.steps
    size.update(n=n, steps=steps, own=0, rest=0)
    size.update(rows_of_rank(forwards, groups))
    for p in runs["EP"].model.parameters() if "EP" in runs else []:
        size["own" if is_sharded_over(p, groups["ep"]) else "rest"] += p.numel()
    # g or f of attention and MLPs, as in lesson 02; then of the experts' rows.
    size["z"] = lesson00.evaluate("2·L·steps·t + n·arrived", size)
    under_tp = (2 * size["L"] * steps + n, "z·D·e")
    formulas = {
        # First the counts: how many rows will come. Then to the experts, and back.
        ("EP", "forward", "all-to-all-v", "ep"): (3 * n, "n·8·E + 2·n·m·D·e"),
        ("EP", "backward", "all-to-all-v", "ep"): (2 * n, "2·n·m·D·e"),
        ("EP", "forward", "all-reduce", "tp"): under_tp,
        ("EP", "backward", "all-reduce", "tp"): under_tp,
        # Gradients: of experts only over dp, of all others over ep as well.
        ("EP", "summing", "all-reduce", "ep"): (steps, "steps·rest·e"),
        ("EP", "summing", "all-reduce", "dp"): (steps, "steps·(rest+own)·e"),
        # One float64, the squares of all gradients.
        ("EP", "clipping", "all-reduce", "ep"): (steps, "steps·8"),
        ("EP", "clipping", "all-reduce", "tp"): (steps, "steps·8"),
    }
    for axis in ("ep", "dp"):
        # Rows per expert for the balance loss; the number of targets, then the loss.
        formulas["EP", "forward", "all-reduce", axis] = (n, "n·8·E")
        formulas["EP", "loss", "all-reduce", axis] = (2 * steps, "steps·(8 + e)")
    leave = f"m = {size['m']:.2f} rows per all-to-all"
    report.section(
        f"Communication of rank 0, {steps} steps: n = {n} MoE passes, {leave}"
    )
    report.steps = 1  # the rows differ from step to step, so these are of all steps
    mesh = {"dp": args.dp, "ep": args.ep, "tp": args.tp}
    report.ledger(on_axes(formulas, mesh))
    if args.tp > 1:
        text = "z = 2·L·steps·t + n·arrived: rows that f or g sum; arrived: at experts"
        report.say(text)
    if args.ep > 1:
        text = f"rest = {size['rest']:,} elements are summed over ep; own = "
        report.say(f"{text}{size['own']:,}, the experts', are not.")


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


def show_memory(report: lesson00.Report, runs: dict) -> None:
    """Bytes that a rank stores: parameters, gradients and AdamW's moments."""
    size = report.size
    letters = {"without EP": dict(size, T=1, R=1), "EP": size}
    terms = f"sum: the {len(PARAMETERS)} terms in PARAMETERS of this script"
    report.section(f"Memory per rank in bytes; {terms}")
    rows, sums = memory_rows(report, PARAMETERS, letters, runs, TENSORS)
    report.table(rows[len(PARAMETERS) :])  # the terms would fill the screen
    part = f"{100 * sums['EP'] / sums['without EP']:.0f} % of all parameters"
    report.say(f"With R = {size['R']} and T = {size['T']} a rank stores {part}.")


if __name__ == "__main__":
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    lesson02.add_model_flags(parser)
    add = parser.add_argument
    positive = lesson00.positive
    add("--ep", type=positive, help="R, ranks that split the experts (ranks / tp)")
    add("--tp", type=positive, default=1, help="TP ranks for each ep rank (1)")
    add("--experts", type=positive, help="E (8, or the next multiple of R)")
    add("--top-k", type=positive, default=2, help="k, experts per token (2)")
    add("--balance", type=float, default=0.01, help="weight of the balance loss (0.01)")
    parser.set_defaults(
        dropout=0.0, batch_size=None, clip=0.5
    )  # B: 8, or more if R·dp needs it
    lesson00.launch(main, sizes, parser)
