"""Wrong answers to the exercises of notebook 09, and what they are told."""

F = "lesson01.CopyToTP.apply("
WEIGHT, BIAS = (f"{F}self.{x}, self.tp_group)" for x in ("weight", "bias"))
FLAT = "lesson00.all_reduce(partial_flat, replica_group)"

WRONG = [  # number of the exercise, an answer or edits of the solution, what it is told
    (1, "SharedLinear = lambda full, group: full",
     "dL/d k_proj.weight is wrong: each rank has a partial one"),
    (1, {BIAS: "self.bias"}, "dL/d k_proj.bias is wrong"),
    (1, {WEIGHT: "self.weight", BIAS: "self.bias",
         "linear(x,": f"linear({F}x, self.tp_group),"},
     "dL/dx is wrong: is x summed twice?"),
    (2, {"return 4 * L, 2 * L": "return 2 * L, 2 * L"}, "counted (4, "),
    (2, {"return 4 * L, 2 * L": "return 2 * L"},
     "sums_of_a_backward gives 144: return two numbers"),
    (2, {"max(K // T, 1)": "K / T"}, "bytes_of_heads of D 8, H 2, K 1, T 2: 72.0;"),
    (2, {"H * (D + 1) * 4\n\n": "H * D * 4\n\n"}, "(4, 128); counted (4, 144)"),
    (3, {FLAT: "partial_flat"}, "no collective was called"),
    (3, {"(layer.self_attn.k_proj, layer.self_attn.v_proj)":
         "(layer.self_attn.k_proj,)"}, "v_proj.weight is wrong"),
    (3, {FLAT: f"{FLAT} / 2"}, "k_proj.weight is wrong, 0.50 times as large"),
    (3, {"replica_group)\n    sizes": "tp_group)\n    sizes"},
     "collectives over ['tp'], not the replicas"),
    (3, {"    partial_flat = torch.cat([p.grad.flatten() for p in parameters])\n"
         f"    flat = {FLAT}\n": "    flat = torch.cat([lesson00.all_reduce(p.grad, "
         "replica_group).flatten() for p in parameters])\n"},
     "8 collectives were called, not 1"),
]  # fmt: skip
