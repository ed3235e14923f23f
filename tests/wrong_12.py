"""Wrong answers to the exercises of notebook 12, and what they are told."""

LOCAL = "bool(all_reduce(bad, tp_group) > 0)"
HALVED = "            squares = squares / tp_group.size()\n"
SUM = "all_reduce(total, tp_group).sqrt().item()"

WRONG = [  # number of the exercise, an answer or edits of the solution, what it is told
    (1, {"CopyToTP": "ReduceFromTP"}, "forward must not change the weight"),
    (1, {"CopyToTP.apply(weight, tp_group)": "weight.detach()"},
     "does not require grad"),
    (1, {"CopyToTP.apply(weight, tp_group)":
         "CopyToTP.apply(CopyToTP.apply(weight, tp_group), tp_group)"},
     "weight.grad is not the sum over the ranks"),
    (2, {LOCAL: "bool(bad > 0)"}, "rank 1 has inf: must_skip returns False"),
    (2, {LOCAL: "all_reduce(bad, tp_group) > 0"}, "not True or False"),
    (2, {"> 0": "== tp_group.size()"}, "rank 1 has inf: must_skip returns False"),
    (2, {"torch.isfinite(grad)": "(~torch.isinf(grad))"},
     "rank 1 has nan: must_skip returns False"),
    (3, {SUM: "total.sqrt().item()"}, "norm_of returns"),
    (3, {HALVED: "            pass\n"}, "norm_of returns"),
    (3, {SUM: "all_reduce(total.sqrt(), tp_group).item()"}, "norm_of returns"),
    (3, {SUM: "all_reduce(total, tp_group).sqrt()"}, "not a float"),
    (3, {"squares = p.grad.square().sum()\n":
         "squares = all_reduce(p.grad.square().sum(), tp_group)\n",
         HALVED: "            squares = squares / tp_group.size()\n",
         SUM: "total.sqrt().item()"}, "4 collectives were called, not 1"),
]  # fmt: skip
