"""Wrong answers to the exercises of notebook 02, and what they are told."""

END = "return all_reduce(mine, tp_group, dist.ReduceOp.MAX).item()"
MLP = "copy.deepcopy(whole.mlp)"
HOOK = f"{MLP}\n        layer.mlp.register_forward"

WRONG = [  # number of the exercise, an answer or edits of the solution, what it is told
    (1, {END: "return mine.item()"},
     "rank 0  not yet: got 1.0, expected 7.0: the largest is −7 at the end of "),
    (1, {".abs()": "", ".item()": ""}, "got 1.0, expected 7.0"),
    (1, {END: "return mine", "p.grad.abs().max()":
         "all_reduce(p.grad.abs().max(), tp_group, dist.ReduceOp.MAX)"},
     "21 collectives were called, not 1"),
    (2, {"return calls, calls": "return calls"},
     "sent_in_a_step gives 768: return two numbers"),
    (2, {"4 * L": "2 * L"}, "gives (2, 384); (4, 768) were counted"),
    (2, {"(3 + 4) * D // T + 2 * D": "9 * D // T", "4 * D\n": "4 * D // T\n"},
     "gives 1640; 1688 were counted"),
    (3, "split_gated = lambda full, group: copy.deepcopy(full)",
     "gate_proj.weight is not sharded: ["),
    (3, {", copy_input=False": "", "    mlp.project = copy_then_apply_each\n": ""},
     "2 all-reduces backward, not 1"),
    (3, {"    mlp.project = copy_then_apply_each\n": ""},
     "dL/dx is wrong: is it summed once?"),
    (3, {", copy_input=False": ""}, "dL/dx is wrong: is it summed once?"),
    (3, {"mlp = copy.deepcopy(full)": "mlp = full"},
     "`full` and your MLP share parameters: copy the modules"),
    (4, "attention_split = tp_transformer",
     "layers.0.mlp.up_proj.weight is sharded: [64, 32] on a rank"),
    (4, "attention_split = lambda full, tp_group: copy.deepcopy(full)",
     "layers.0.self_attn.q_proj.weight is not sharded: [32, 32] on a rank"),
    (4, {MLP: "whole.mlp"},
     "`full` and your model share parameters: copy the modules"),
    (4, {MLP: f"{HOOK}_pre_hook(lambda _, x: CopyToTP.apply(*x, tp_group))"},
     "dL/d layers.1.post_attention_layernorm.bias is wrong, 2.00 times as large"),
    (4, {MLP: f"{HOOK}_hook(lambda *x: ReduceFromTP.apply(x[2], tp_group))"},
     "not yet: loss, step 1: "),
    (4, {"L, L, 2 * L": "2 * L, 2 * L, 4 * L"},
     "sent_by_it gives (4, 4, 32768); (2, 2, 16384) were counted"),
]  # fmt: skip
