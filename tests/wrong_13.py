"""Wrong answers to the exercises of notebook 13, and what they are told."""

WRONG = [  # number of the exercise, edits of the solution, what the check says
    (1, {"lesson00.shard(lesson00.shard(full, 0, outer), 1, inner)":
         "lesson00.shard(lesson00.shard(full, 1, outer), 0, inner)"},
     "the first element is "),
    (1, {"lesson00.shard(lesson00.shard(full, 0, outer), 1, inner)":
         "lesson00.shard(full, 0, outer)"}, "place gives [2, 8], not [2, 4]"),
    (1, {"(block, 1, inner), 0, outer)": "(block, 1, outer), 0, inner)"},
     "join does not give the full matrix"),
    (2, {"3 * weights": "2 * weights"}, "counted were ("),
    (2, {"// inner if outer > 1": "if outer > 1"}, "counted were ("),
    (2, {" if inner > 1 else 0": ""}, "counted were ("),
    (3, {"save_for_backward(x, gathered)": "save_for_backward(x, weight)",
         "x, gathered = ctx.saved_tensors": "x, weight = ctx.saved_tensors\n        "
         "gathered = lesson00.all_gather(weight, ctx.dim, ctx.group)"}, "calls: {"),
    (3, {"lesson00.reduce_scatter(partial_grad_w": "lesson00.shard(partial_grad_w"},
     "dL/dW is wrong"),
    (3, {"return grad_y @ gathered, grad_w": "return grad_y @ gathered / 2, grad_w"},
     "dL/dx is wrong"),
]  # fmt: skip
