"""Wrong answers to the exercises of notebook 04, and what each check says."""

WITH_F = {", copy_input=False": ""}
GATHER = "gate_BSf, up_BSf = gather_again(x_BsD, self.gate, self.up)"
REDUCE = "self.down.reduce = reduce_scatter_sequence"
END = "return self.down(F.silu(gate_BSf) * up_BSf)"
MY_END = """y = F.linear(F.silu(gate_BSf) * up_BSf, self.down.weight, bias)
        return reduce_scatter_sequence(y, tp_group)"""


def gathered_by(call: str) -> dict[str, str]:
    return {GATHER: f"x_BSD = {call}\n"
            "        gate_BSf, up_BSf = self.gate(x_BSD), self.up(x_BSD)"}  # fmt: skip


WRONG = [  # number of the exercise, an answer or edits of the solution, the check
    (1, {GATHER: "(gate_BSf,) = gather_again(x_BsD, self.gate)\n"
         "        (up_BSf,) = gather_again(x_BsD, self.up)"},
     "forward: {'all-gather': 2, 'reduce-scatter': 1}"),
    (1, gathered_by("all_gather(x_BsD, 1, tp_group).requires_grad_()"),
     "dL/dx is missing"),
    (1, gathered_by("GatherFromTP.apply(x_BsD, 1, tp_group)"),
     "dL/dx is wrong: which backward"),
    (1, WITH_F | gathered_by("AllGatherWithGrad.apply(x_BsD, 1, tp_group)"),
     "an all-reduce too; f is still in your column-parallel layers (copy_input"),
    (1, WITH_F | gathered_by("GatherFromTP.apply(x_BsD, 1, tp_group)"),
     "backward: {'all-gather': 1, 'all-reduce': 2}, not a reduce-scatter and"),
    (1, {REDUCE: f"{REDUCE}\n        self.gate.weight.register_hook(lambda g: 2 * g)"},
     "dL/d gate.weight is wrong"),
    (1, {REDUCE: "self.down.bias = nn.Parameter(down.bias / tp_group.size())",
         END: f"bias = self.down.bias\n        {MY_END}"},  # T times 1/T: y is right
     "dL/d down.bias is wrong"),
    (1, {END: f"bias = self.down.bias if rank == 0 else None\n        {MY_END}"},
     "`down.bias` has no gradient on rank 1"),  # so no sum over ranks could take it
    (1, {REDUCE: f"{REDUCE}\n"
         "        self.down.weight = nn.Parameter(shard(down.weight, 1, tp_group))"},
     "expected [[6], [6, 8], [8], [8], [8, 6], [8, 6]]: a sharded parameter needs"),
    (1, {"ColumnParallelLinear(gate, tp_group, copy_input=False)": "gate",
         "ColumnParallelLinear(up, tp_group, copy_input=False)": "up",
         "RowParallelLinear(down, tp_group)": "down"} | gathered_by("x_BsD"),
     "parameters on this rank"),
    (2, {"needs_sum |=": "of_biases ="}, "self_attn.o_proj.bias is not in your set"),
    (2, "needs_sum = {'input_layernorm.weight', 'input_layernorm.bias',"
        " 'self_attn.q_proj.bias'}",
     "self_attn.q_proj.bias is in your set, but its gradient is already"),
    (2, "needs_sum = {'norm'}", "'norm' is not the name of a parameter"),
    (2, {"layer.post_attention_layernorm = nn.RMSNorm(D)": "return layer"},
     "post_attention_layernorm(x) is not w · x / √(mean of x² over D)"),
    (2, {'"mlp.down_proj.bias"}': '"mlp.down_proj.bias", "input_layernorm.bias"}'},
     "input_layernorm.bias is in your set, but an RMSNorm has no bias"),
    (3, {"loss_Bs.sum()": "loss_Bs.sum() / (target_Bs != IGNORE).sum().clamp(1)",
         "total / count": "total / tp_group.size()"},
     "with 2 of 8 targets IGNORE the mean is"),
    (3, {"IGNORE).sum()": "IGNORE).sum().clamp(1)"},
     "with 5 of 8 targets IGNORE the mean is"),
    (3, {"ReduceFromTP.apply(": "all_reduce("}, "the result has no gradient"),
    (3, {"return total": "return CopyToTP.apply(total, tp_group)"},
     "dL/d loss of one token is"),
]  # fmt: skip
