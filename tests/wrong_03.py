"""Wrong answers to the exercises of notebook 03, and what they are told."""

WRONG = [  # number of the exercise, what someone filled in, what the check says
    (1, "def likeliest(x, group, V):\n    return x.argmax(-1)",
     "tokens are wrong"),
    (1, "def likeliest(x, group, V):\n    return all_gather(x, 2, group)"
        "[..., :V].argmax(-1)", "two all-reduces are enough"),
    (1, "def likeliest(x, group, V):\n"
        "    m = all_reduce(x.amax(-1), group, dist.ReduceOp.MAX)\n"
        "    mine = x.argmax(-1) + group.rank() * x.shape[-1]\n"
        "    mine = mine.where(x.amax(-1) == m, 2 * V)\n"
        "    return all_reduce(mine, group, dist.ReduceOp.MIN)",
     "9 is padding: V is 9"),
    (1, "def likeliest(x, group, V):\n"
        "    token = group.rank() * x.shape[-1] + torch.arange(x.shape[-1])\n"
        "    x = x.masked_fill(token >= V, float('-inf'))\n"
        "    m = all_reduce(x.amax(-1), group, dist.ReduceOp.MAX)\n"
        "    mine = token[x.argmax(-1)].where(x.amax(-1) == m, 0)\n"
        "    return all_reduce(mine, group, dist.ReduceOp.MAX)",
     "V = 10: "),
    (1, "def likeliest(x, group, V):\n    parts = [x.clone().contiguous()"
        " for _ in range(2)]\n"
        "    dist.all_gather(parts, x.contiguous(), group=group)\n"
        "    return torch.cat(parts, 2)[..., :V].argmax(-1)",
     "counted were 0 collectives: use the lesson's `all_reduce`"),
    (1, "def likeliest(x, group, V):\n"
        "    v, first = x.shape[-1], group.rank() * x.shape[-1]\n"
        "    whole = torch.full((*x.shape[:-1], 2 * v), float('-inf'))\n"
        "    whole[..., first : first + v] = x\n"
        "    whole = all_reduce(whole, group, dist.ReduceOp.MAX)\n"
        "    return whole[..., :V].argmax(-1)",
     "sent 6,000 bytes; 12 for each token are enough"),
    (1, "def likeliest(x, group, V):\n"
        "    return all_gather(x, 2, group)[..., :V].argmax(-1).float()",
     "its dtype is torch.float32, not torch.int64"),
    (1, "def likeliest(x, group, V):\n"
        "    return all_reduce(x.argmax(-1) + 2 * group.rank() + 6, group)",
     " is no token"),
    (2, "rows_on_a_rank = lambda V, T: -(-V // T)",
     "rows_on_a_rank gives 4: return two numbers"),
    (2, "rows_on_a_rank = lambda V, T: (V // T, V % T)",
     "rows_on_a_rank of V 9, T 2 gives (4, 1); there are (5, 1)"),
    (2, "rows_on_a_rank = lambda V, T: (-(-V // T), -V % T)\n"
        "sent_by_loss = lambda B, S, V, T: (12 * B * S, 4 * B * S * V)",
     "gives (120, 360); counted were (120, 400)"),
    (2, "sent_by_loss = lambda B, S, V, T: 12 * B * S",
     "sent_by_loss gives 36: return two numbers"),
    (3, "def log_z(x, group, V):\n"
        "    return GatherFromTP.apply(x, 2, group)[..., :V].logsumexp(-1)",
     "sent 384 bytes; 16 for each token are enough"),
    (3, "def log_z(x, group, V):\n    parts = [x.detach().clone()"
        " for _ in range(2)]\n"
        "    dist.all_gather(parts, x.detach().contiguous(), group=group)\n"
        "    parts[group.rank()] = x\n"
        "    return torch.cat(parts, 2)[..., :V].logsumexp(-1)",
     "counted were 0 collectives: use the lesson's functions"),
    (3, "def log_z(x, group, V):\n"
        "    token = group.rank() * x.shape[-1] + torch.arange(x.shape[-1])\n"
        "    x = x.masked_fill(token >= V, float('-inf'))\n"
        "    m = all_reduce(x.amax(-1), group, dist.ReduceOp.MAX)\n"
        "    return m + all_reduce((x - m[..., None]).exp().sum(-1), group).log()",
     "no gradient: `all_reduce` is not known to autograd"),
    (3, "def log_z(x, group, V):\n"
        "    m = all_reduce(x.amax(-1), group, dist.ReduceOp.MAX)\n"
        "    z = (x - m[..., None]).exp().sum(-1)\n"
        "    return m + ReduceFromTP.apply(z, group).log()",
     "the value is wrong (V = 7"),
    (3, "def log_z(x, group, V):\n"
        "    token = group.rank() * x.shape[-1] + torch.arange(x.shape[-1])\n"
        "    x = x.masked_fill(token >= V, float('-inf'))\n"
        "    return ReduceFromTP.apply(x.exp().sum(-1), group).log()",
     "the value is wrong (V = 7, logits of about 1000)"),
    (3, "def log_z(x, group, V):\n"
        "    token = group.rank() * x.shape[-1] + torch.arange(x.shape[-1])\n"
        "    x = x.masked_fill(token >= V, float('-inf'))\n"
        "    m = all_reduce(x.amax(-1), group, dist.ReduceOp.MAX)\n"
        "    z = CopyToTP.apply((x - m[..., None]).exp().sum(-1), group)\n"
        "    return m + ReduceFromTP.apply(z, group).log()",
     "the gradient is wrong, 2.00 times as long"),
]  # fmt: skip
