"""Wrong answers to the exercises of notebook 06, and what they are told."""

WRONG = [  # number of the exercise, edits of the solution, what the check says
    (1, {'psum(partial_y_BD, "tp") + b_D': 'psum(partial_y_BD + b_D, "tp")'},
     "the bias has been added on each device"),
    (1, {'jax.lax.psum(partial_y_BD, "tp")': "partial_y_BD"},
     "not yet: ValueError: shard_map applied to the function"),
    (1, {"psum(": "pmean("}, "y is not X Wᵀ + b"),
    (1, {"x_Bf @ w_Df.T": 'jax.lax.all_gather(x_Bf, "tp", axis=1, tiled=True) @ '
         'jax.lax.all_gather(w_Df, "tp", axis=1, tiled=True).T / 4'},
     "one all-reduce is enough; found: ['all-gather', 'all-gather', 'all-reduce']"),
    (2, {'P(None, "dp")': "P()"}, "of up_proj.weight a device holds 128 of 128"),
    (2, {'where_x = P("dp")': "where_x = P()"}, "of x a device holds 96 of 96"),
    (2, {'where_x = P("dp")': 'where_x = P(None, None, "dp")'},
     "x is not split over the batch"),
    (3, {"(B // 2)": "B"}, "the compiled program has 3,072"),
    (3, {" + D)": ")"}, "bytes_over_dp of B 4, S 3, D 32, F 64 gives 16640"),
]  # fmt: skip
