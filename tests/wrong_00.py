"""Wrong answers to the exercises of notebook 00, and what they are told."""

WRONG = [  # number of the exercise, what someone filled in, what the check says
    (1, "mean_over_ranks = all_reduce", "that is the sum"),
    (1, "def mean_over_ranks(x, group):\n    dist.all_reduce(x, group=group)\n"
        "    return x / group.size()", "x has changed"),
    (1, "def mean_over_ranks(x, group):\n    return x.mean()", "its shape is []"),
    (2, "def gather_by_adding(x, group):\n    return all_gather(x, 0, group)",
     "collectives used: {'all-gather': 1}"),
    (2, "def gather_by_adding(x, group):\n    return all_reduce(x, group)",
     "its shape is [2], not [4]"),
    (2, "def gather_by_adding(x, group):\n    full = torch.zeros(2, 2)\n"
        "    full[group.rank()] = x\n    return all_reduce(full, group)",
     "its shape is [2, 2], not [4]"),
    (3, "def product_by_rows(a, b, group):\n"
        "    return shard(all_reduce(a @ b, group), 1, group)\n"
        "predicted = lambda I, J, K, T, size: 0",
     "the shape is [8, 10], not [4, 20]"),
    (3, "def product_by_rows(a, b, group):\n"
        "    return reduce_scatter(a @ b, 0, group)\n"
        "predicted = lambda I, J, K, T, size: size * I * K // T",
     "float32: you predicted 320 bytes, counted were 640"),
    (3, "def product_by_rows(a, b, group):\n"  # no bytes; right by chance at first
        "    return reduce_scatter(a @ b, 0, group)\n"
        "predicted = lambda I, J, K, T, size: 2 * T * I * K",
     "float64: you predicted 192 bytes, counted were 384"),
]  # fmt: skip
