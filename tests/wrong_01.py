"""Wrong answers to the exercises of notebook 01, and what they are told."""

WRONG = [  # number of the exercise, edits of the solution, what the check says
    (1, {", copy_input=False": "", "x = CopyToTP.apply(x, self.tp_group)": "pass"},
     "f once, for both layers"),
    (1, {"ColumnParallelLinear(gate, tp_group, copy_input=False)": "gate",
         "ColumnParallelLinear(up, tp_group, copy_input=False)": "up",
         "RowParallelLinear(down, tp_group)": "down"}, "parameters on this rank"),
    (1, {"self.up(x)": "self.up(x).detach()"},
     "dL/d up.weight is not that of one process"),
    (1, {"self.gate": "self.first"}, "no parameter is called gate.weight"),
    (1, {"    self.up =": "    self.gate.weight.sharding = None\n        self.up ="},
     "dL/d gate.weight, unsharded, has the shape [4, 6]: shard_parameter records"),
    (1, {"CopyToTP.apply(x, self.tp_group)": "x.clone()"},
     "dL/dx is wrong: where is f?"),
    (2, {"4 * 2 * B * S * D": "4 * B * S * D"}, "gives 96; counted"),
    (3, {"same = GatherFromTP": "same = AllGatherWithGrad"},
     "`same`: the gradient is [2.0, 4.0]"),
    (3, {"different = AllGatherWithGrad": "different = GatherFromTP"},
     "`different`: the gradient is"),
]  # fmt: skip
