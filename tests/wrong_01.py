"""Wrong answers to the exercises of notebook 01, and what they are told."""

WRONG = [  # number of the exercise, what someone filled in, what the check says
    (1, "class GatedTPMLP(nn.Module):\n    def __init__(self, gate, up, down, g):\n"
        "        super().__init__()\n"
        "        self.gate = ColumnParallelLinear(gate, g)\n"
        "        self.up = ColumnParallelLinear(up, g)\n"
        "        self.down = RowParallelLinear(down, g)\n"
        "    def forward(self, x):\n"
        "        return self.down(F.silu(self.gate(x)) * self.up(x))",
     "f once, for both layers"),
    (1, "class GatedTPMLP(nn.Module):\n    def __init__(self, gate, up, down, g):\n"
        "        super().__init__()\n"
        "        self.all = nn.ModuleList([gate, up, down])\n"
        "    def forward(self, x):\n        gate, up, down = self.all\n"
        "        return down(F.silu(gate(x)) * up(x))",
     "parameters on this rank"),
    (2, "bytes_of_tp = lambda B, S, D, F: 4 * B * S * D", "gives 96; counted"),
    (3, "same = different = AllGather", "`same`: the gradient is [2.0, 4.0]"),
    (3, "same = different = GatherFromTP", "`different`: the gradient is"),
]  # fmt: skip
