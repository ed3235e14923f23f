"""Wrong answers to the exercises of notebook 03, and what the checks say."""

MASK = '.masked_fill(token_v >= vocab_size, float("-inf"))'
SUM = "ReduceFromTP.apply(partial_z_BS, tp_group)"
BY_HAND = """{}
    slices = [x.detach().clone() for _ in range(2)]
    dist.all_gather(slices, x.detach().contiguous(), group=group)
    slices[group.rank()] = x
    return torch.cat(slices, 2)[..., :V].{}(-1)
"""

WRONG = [  # exercise, an answer or edits of the solution, what the check says
    (1, "likeliest = lambda x, group, V: all_gather(x, 2, group)[..., :V].argmax(-1)",
     "two all-reduces are enough"),
    (1, {MASK: ""}, "9 is spare: V is 9"),
    (1, {"m_BS, vocab_size": "m_BS, 0", "MIN": "MAX"}, "V = 10: "),
    (1, BY_HAND.format("def likeliest(x, group, V):", "argmax"),
     "1 calls of {'all-gather'}; two all-reduces are enough"),
    (1, "def likeliest(x, group, V):\n"
        "    v, first = x.shape[-1], group.rank() * x.shape[-1]\n"
        "    whole = torch.full((*x.shape[:-1], 2 * v), float('-inf'))\n"
        "    whole[..., first : first + v] = x\n"
        "    whole = all_reduce(whole, group, dist.ReduceOp.MAX)\n"
        "    return whole[..., :V].argmax(-1)",
     "sent 6,000 bytes; 12 per token are enough"),
    (1, {"MIN)": "MIN).float()"}, "its dtype is torch.float32, not torch.int64"),
    (1, {"return all_reduce(mine_BS,": "return 6 + all_reduce(mine_BS,"},
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
    (3, "log_z = lambda x, group, V: "
        "GatherFromTP.apply(x, 2, group)[..., :V].logsumexp(-1)",
     "sent 384 bytes; 16 per token are enough"),
    (3, BY_HAND.format("def log_z(x, group, V):", "logsumexp"),
     "bytes; 16 per token are enough"),
    (3, {SUM: "all_reduce(partial_z_BS, tp_group)"},
     "no gradient: autograd does not track `all_reduce`"),
    (3, {MASK: ""}, "the value is wrong (V = 7"),
    (3, {"(x_BSv - m_BS.unsqueeze(-1))": "x_BSv", "return m_BS +": "return"},
     "the value is wrong (V = 7, logits of about 1000)"),
    (3, {SUM: f"CopyToTP.apply({SUM}, tp_group)"},
     "the gradient is wrong, 2.00 times as large"),
]  # fmt: skip
