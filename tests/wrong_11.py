"""Wrong answers to the exercises of notebook 11, and what they are told."""

ALL_SCORES = """def gather_in_blocks(q, kv, cp_group, layout):
    held = [positions_of(r, ranks, layout, q.shape[2] * ranks) for r in range(ranks)]
    k, v = repeat_for_queries(lesson00.all_gather(kv, 3, cp_group), q)
    return masked_scores(q, k, held[rank], torch.cat(held)).softmax(-1) @ v
"""
HOPS = "min(C - 1, reach)"
OWNERS = "list(range(max(0, rank - reach), rank + 1))"
OVER_TP = "    lesson04.all_reduce_replicated_gradients(model, tp_group)\n"

WRONG = [  # number of the exercise, an answer or edits of the solution, what it is told
    (1, ALL_SCORES, "contiguous: 64 scores per head, 16 are enough"),
    (1, {"lesson00.all_gather(kv, 3, cp_group).chunk(C, 3)": "[kv] * C"},
     "contiguous: {}, not one all-gather"),
    (1, {"merge(y[:, :, at], lse[:, :, at], *part)": "part"}, "contiguous: y is wrong"),
    (1, {"C, layout, s)": "C, 'contiguous', s)"}, "zigzag: y is wrong"),
    (2, {"(W - 1) / s": "W / s"}, "W 1: rank 0: 0 hops are needed, not 1"),
    (2, {HOPS: "C - 1"}, "W 1: rank 0: 0 hops are needed, not 3"),
    (2, {HOPS: "reach"}, "W 100: rank 0: 3 hops are needed, not 13"),
    (2, {"max(0, rank - reach)": "rank - reach"}, "keys of [0], not [-1, 0]"),
    (2, {f"{HOPS}, {OWNERS}": "reach"}, "return a number and a list"),
    (3, {"gather = 3 *": "gather = 2 *"}, "gather, S 8, N 4"),
    (3, {"ring = 2 *": "ring ="}, "ring, S 8, N 4"),
    (3, {" * kv // C\n": " * kv\n"}, "Ulysses, S 8, N 4"),
    (3, {"return gather, ring, ulysses": "return gather, ring"}, "three numbers"),
    (4, {OVER_TP: ""}, "layers.0.input_layernorm.weight is wrong"),
    (4, {"    sum_over_cp(model, cp_group)\n": ""}, "embed_tokens.weight is wrong"),
    (4, {"cp_group)\n": "tp_group)\n"}, "embed_tokens.weight is wrong"),
]  # fmt: skip
