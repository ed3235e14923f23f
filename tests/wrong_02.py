"""Wrong answers to the exercises of notebook 02, and what they are told."""

WRONG = [  # number of the exercise, what someone filled in, what the check says
    (1, "def largest_gradient(model, tp_group):\n"
        "    return max(p.grad.abs().max() for p in model.parameters()).item()",
     "rank 0: got 1.0, wanted 7.0: the largest is −7 at the end of layers.0.mlp"),
    (1, "def largest_gradient(model, tp_group):\n"
        "    mine = max(p.grad.max() for p in model.parameters())\n"
        "    return all_reduce(mine, tp_group, dist.ReduceOp.MAX)",
     "got 1.0, wanted 7.0"),
    (1, "def largest_gradient(model, tp_group):\n"
        "    return max(all_reduce(p.grad.abs().max(), tp_group, "
        "dist.ReduceOp.MAX)\n               for p in model.parameters())",
     "21 collectives were called, not 1"),
    (1, "def largest_gradient(model, tp_group):\n"
        "    mine = max(p.grad.abs().max() for p in model.parameters())\n"
        "    dist.all_reduce(mine, dist.ReduceOp.MAX, group=tp_group)\n"
        "    return mine.item()",
     "counted were 0 collectives: use the lesson's `all_reduce`"),
    (1, "def largest_gradient(model, tp_group):\n"
        "    mine = max(p.grad.abs().max() for p in model.parameters())\n"
        "    return all_reduce(mine, tp_group, op='max').item()",
     "every rank  not yet: TypeError: (): incompatible function arguments"),
    (2, "sent_in_a_step = lambda B, S, D, L: 16 * L * B * S * D",
     "sent_in_a_step gives 768: return two numbers"),
    (2, "sent_in_a_step = lambda B, S, D, L: (2 * L, 8 * L * B * S * D)",
     "gives (2, 384); counted were (4, 768)"),
    (2, "sent_in_a_step = lambda B, S, D, L: (4 * L, 16 * L * B * S * D)\n"
        "parameters_on_a_rank = lambda D, T: (12 * D * D + 13 * D) // T",
     "gives 1640; counted were 1688"),
    (3, "SharedLinear = lambda full, group: copy.deepcopy(full)",
     "dL/d k_proj.weight is wrong: every rank has a term of it"),
    (3, "def SharedLinear(full, tp_group): return full",
     "dL/d k_proj.weight is wrong: every rank has a term of it"),
    (3, "class SharedLinear(nn.Module):\n    def __init__(self, full, group):\n"
        "        super().__init__()\n"
        "        self.weight, self.bias = full.weight, full.bias\n"
        "    def forward(self, x):\n"
        "        return F.linear(x, self.weight, self.bias)",
     "dL/d k_proj.weight is wrong: every rank has a term of it"),
    (3, "class SharedLinear(nn.Module):\n    def __init__(self, full, group):\n"
        "        super().__init__()\n        self.group = group\n"
        "        self.weight, self.bias = map(copy.deepcopy, full.parameters())\n"
        "    def forward(self, x):\n"
        "        weight = CopyToTP.apply(self.weight, self.group)\n"
        "        return F.linear(x, weight, self.bias)",
     "dL/d k_proj.bias is wrong"),
    (3, "class SharedLinear(nn.Module):\n    def __init__(self, full, group):\n"
        "        super().__init__()\n        self.group = group\n"
        "        self.full = copy.deepcopy(full)\n"
        "    def forward(self, x):\n"
        "        return self.full(CopyToTP.apply(x, self.group))",
     "dL/dx is wrong: is x summed twice?"),
]  # fmt: skip
