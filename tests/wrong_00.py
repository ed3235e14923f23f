"""Wrong answers to the exercises of notebook 00, and what they are told."""

WRONG = [  # number of the exercise, edits of the solution, what the check says
    (1, {" / group.size()": ""}, "that is the sum"),
    (1, {"return all_reduce(x, group)":
         "dist.all_reduce(x, group=group)\n    return x"}, "x has changed"),
    (1, {"all_reduce(x, group) / group.size()": "x.mean()"}, "its shape is []"),
    (2, {"all_reduce(full, group)": "all_gather(x, 0, group)"},
     "collectives used: {'all-gather': 1}"),
    (2, {"all_reduce(full, group)": "all_reduce(x, group)"},
     "its shape is [2], not [4]"),
    (3, {"reduce_scatter(partial_c_IK, 0, group)":
         "shard(all_reduce(partial_c_IK, group), 1, group)"},
     "the shape is [8, 10], not [4, 20]"),
    (3, {"I * K * size": "size * I * K // T"},
     "float32: you predicted 320 bytes, counted were 640"),
    (3, {"I * K * size": "2 * T * I * K"},  # no bytes; right by chance at first
     "float64: you predicted 192 bytes, counted were 384"),
]  # fmt: skip
