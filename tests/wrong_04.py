"""Wrong answers to the exercises of notebook 04, and what they are told."""

GATED_SP = """class GatedSPMLP(nn.Module):
    def __init__(self, gate, up, down, g):
        super().__init__()
        self.g = g
        self.gate = ColumnParallelLinear(gate, g, copy_input=False)
        self.up = ColumnParallelLinear(up, g, copy_input=False)
        self.down = RowParallelLinear(down, g)
        self.down.reduce = reduce_scatter_sequence
    def forward(self, x):
"""
GATED_SP_END = """        gate, up = gather_then_project(x, self.gate, self.up)
        return self.down(F.silu(gate) * up)
"""

WRONG = [  # number of the exercise, what someone filled in, what the check says
    (1, GATED_SP +
        "        (a,) = gather_then_project(x, self.gate)\n"
        "        (b,) = gather_then_project(x, self.up)\n"
        "        return self.down(F.silu(a) * b)",
     "forward: {'all-gather': 2, 'reduce-scatter': 1}"),
    (1, GATED_SP +
        "        x = all_gather(x, 1, self.g).requires_grad_()\n"
        "        return self.down(F.silu(self.gate(x)) * self.up(x))",
     "dL/dx is missing"),
    (1, GATED_SP +
        "        x = GatherFromTP.apply(x, 1, self.g)\n"
        "        return self.down(F.silu(self.gate(x)) * self.up(x))",
     "dL/dx is wrong: which backward"),
    (1, GATED_SP.replace(", copy_input=False", "") +
        "        x = AllGather.apply(x, 1, self.g)\n"
        "        return self.down(F.silu(self.gate(x)) * self.up(x))",
     "an all-reduce too; f is still in your column-parallel layers (copy_input"),
    (1, GATED_SP.replace(", copy_input=False", "") +
        "        x = GatherFromTP.apply(x, 1, self.g)\n"
        "        return self.down(F.silu(self.gate(x)) * self.up(x))",
     "backward: {'all-gather': 1, 'all-reduce': 2}, not a reduce-scatter and"),
    (1, GATED_SP +
        "        x, f = AllGather.apply(x, 1, self.g), CopyToTP.apply\n"
        "        gate, up = (F.linear(x, f(one.weight, self.g), one.bias)\n"
        "                    for one in (self.gate, self.up))\n"
        "        return self.down(F.silu(gate) * up)",
     "dL/d gate.weight is wrong"),
    (1, GATED_SP.replace("    def forward",
        "        self.gate.weight.register_hook(lambda grad: 2 * grad)\n"
        "    def forward") + GATED_SP_END,
     "dL/d gate.weight is wrong"),
    (1, GATED_SP.replace("    def forward",  # added T times, of 1/T: y is right
        "        self.down.bias = nn.Parameter(down.bias / g.size())\n"
        "    def forward") +
        "        gate, up = gather_then_project(x, self.gate, self.up)\n"
        "        h = F.silu(gate) * up\n"
        "        y = F.linear(h, self.down.weight, self.down.bias)\n"
        "        return reduce_scatter_sequence(y, self.g)",
     "dL/d down.bias is wrong"),
    (1, GATED_SP +  # the bias by one rank: the sum over ranks could not take it
        "        gate, up = gather_then_project(x, self.gate, self.up)\n"
        "        bias = self.down.bias if rank == 0 else None\n"
        "        y = F.linear(F.silu(gate) * up, self.down.weight, bias)\n"
        "        return reduce_scatter_sequence(y, self.g)",
     "`down.bias` has no gradient on rank 1"),
    (1, "class Rows(nn.Module):\n    def __init__(self, full, g):\n"
        "        super().__init__()\n        self.g = g\n"
        "        self.weight = nn.Parameter(shard(full.weight, 1, g))\n"
        "        self.bias = copy.deepcopy(full.bias)\n"
        "    def forward(self, h):\n"
        "        return reduce_scatter_sequence(F.linear(h, self.weight), self.g)"
        " + self.bias\n" +
        GATED_SP.replace("RowParallelLinear", "Rows") + GATED_SP_END,
     "expected [[6], [6, 8], [8], [8], [8, 6], [8, 6]]: a cut parameter needs"),
    (1, "class GatedSPMLP(nn.Module):\n    def __init__(self, gate, up, down, g):\n"
        "        super().__init__()\n"
        "        self.all = nn.ModuleList([gate, up, down])\n"
        "    def forward(self, x):\n        gate, up, down = self.all\n"
        "        return down(F.silu(gate(x)) * up(x))",
     "parameters on this rank"),
    (2, "needs_sum = {f'{n}_layernorm.{w}' for n in ('input', 'post_attention')"
        " for w in ('weight', 'bias')}",
     "self_attn.o_proj.bias is not in your set"),
    (2, "needs_sum = {'input_layernorm.weight', 'input_layernorm.bias',"
        " 'self_attn.q_proj.bias'}",
     "self_attn.q_proj.bias is in your set, but its gradient is right"),
    (2, "needs_sum = {'norm'}", "'norm' is not the name of a parameter"),
    (3, "def mean_over_slices(loss_Bs, target_Bs, tp_group):\n"
        "    mean = loss_Bs.sum() / (target_Bs != IGNORE).sum().clamp(1)\n"
        "    return ReduceFromTP.apply(mean, tp_group) / tp_group.size()",
     "with 2 of 8 targets IGNORE the mean is"),
    (3, "def mean_over_slices(loss_Bs, target_Bs, tp_group):\n"
        "    total = ReduceFromTP.apply(loss_Bs.sum(), tp_group)\n"
        "    count = (target_Bs != IGNORE).sum().clamp(1)\n"
        "    return total / all_reduce(count, tp_group)",
     "with 5 of 8 targets IGNORE the mean is"),
    (3, "def mean_over_slices(loss_Bs, target_Bs, tp_group):\n"
        "    count = all_reduce((target_Bs != IGNORE).sum(), tp_group)\n"
        "    return all_reduce(loss_Bs.sum(), tp_group) / count",
     "the result has no gradient"),
    (3, "def mean_over_slices(loss_Bs, target_Bs, tp_group):\n"
        "    total = CopyToTP.apply(ReduceFromTP.apply(loss_Bs.sum(), tp_group),"
        " tp_group)\n"
        "    count = all_reduce((target_Bs != IGNORE).sum(), tp_group)\n"
        "    return total / count",
     "dL/d loss of one token is"),
]  # fmt: skip
