"""Wrong answers to the exercises of notebook 15, and what they are told."""

WRONG = [  # number of the exercise, an answer or edits of the solution, what it is told
    (1, {"-(-n // DP)": "n // DP"}, "n = 10, DP = 4, replica"),
    (1, {"min(n, replica * size), min(n, (replica + 1) * size)":
         "replica * size, (replica + 1) * size"}, "n = 10, DP = 4, replica 3: (9, 12)"),
    (1, {"min(n, replica * size)": "replica * size"}, "n = 3, DP = 8, replica 4"),
    (1, {"return min(n, replica * size),": "return"}, "return two numbers"),
    (2, {"return 2 + 4 + 12": "return 2 + 2 + 12"}, "DP, DP = 4, unit = 0.25: 16"),
    (2, {"2 + 2 + 12 / DP": "2 + (2 + 12) / DP"}, "ZeRO-1, DP = 4"),
    (2, {"gradients = 2 * unit + 4 / DP": "gradients = 4 / DP"}, "ZeRO-2, DP = 4"),
    (2, {"(2 * unit + 4 / DP) + gradients": "2 / DP + gradients"}, "ZeRO-3, DP = 4"),
    (3, {' * weights': ""}, "over 'tp'"),
    (3, {'groups["shard"]': 'groups["replicate"]'}, "over 'shard'"),
    (3, {'    squares = lesson00.all_reduce(squares, groups["shard"])\n':
         '    for axis in ("shard", "replicate"):\n'
         '        squares = lesson00.all_reduce(squares, groups[axis])\n'},
     "over 'replicate'"),
    (4, {"lesson00.all_reduce(x.abs().max(), group, dist.ReduceOp.MAX)":
         "x.abs().max()"}, "what is gathered is not what one process rounds to"),
    (4, {", dist.ReduceOp.MAX": ""}, "random: "),
    (4, {" if amax > 0 else torch.ones(())": ""}, "zeros: nan"),
    (4, {"amax / 448": "amax / 4480"}, "random: "),
    (4, {".to(torch.float8_e4m3fn)": ".to(torch.float8_e5m2)"}, "float8_e5m2"),
]  # fmt: skip
