"""Wrong answers to the exercises of notebook 16, and what they are told."""

WRONG = [  # number of the exercise, an answer or edits of the solution, what it is told
    (1, {"rows[order.argsort()]": "rows[order]"}, "y is wrong, t = 5, k = 2"),
    (1, {"rows[order.argsort()]": "rows"}, "y is wrong"),
    (1, {"(weights[..., None] * unsorted)": "unsorted"}, "y is wrong"),
    (1, {".sum(1)": ".sum(0)"}, "y has the shape [2, 6], t = 5"),
    (2, {".experts.": "expert"}, "layers.1.mlp.shared_expert."),
    (2, {'["dp"]': "[]"}, "layers.1.mlp.experts.up_proj: not []"),
    (2, {'["dp", "ep"]': '["dp"]'}, "embed_tokens.weight: not ['dp']"),
    (3, {"4 * k * t": "2 * k * t"}, "EP, t "),
    (3, {"t * (R - 1) // R * D": "t * D"}, "EP, t "),
    (3, {"(R * t * D * e)": "(t * D * e)"}, "TP, t "),
    (3, {"2 * 2 *": "2 *"}, "TP, t "),
    (4, {"<= capacity": "< capacity"}, "capacity 1: not"),
    (4, {"cumsum(0)": "flip(0).cumsum(0).flip(0)"}, "capacity 1: not"),
    (4, {"chosen.flatten()": "chosen.T.flatten()"}, "capacity 1: not"),
    (4, {"(place <= capacity)": "place"}, "its dtype is torch.int64, not bool"),
]  # fmt: skip
