"""Wrong answers to the exercises of notebook 17, and what the checks say."""

GATHERED = """def top_tokens(logits_v, k, tp_group, V):
    return all_gather(logits_v, 0, tp_group)[:V].topk(k).indices
"""

WRONG = [  # exercise, an answer or edits of the solution, what the check says
    (1, GATHERED, "payload"),
    (1, {'.masked_fill(token_v >= vocab_size, float("-inf"))': ""}, "is spare"),
    (1, {"token_v[best.indices]": "best.indices"}, "expected"),
    (1, {"tokens[values.topk(k).indices]": "tokens[:k]"}, "expected"),
    (1, {"return tokens": "return tokens.float()"}, "its dtype is torch.float32"),
    (1, {"values.topk(k)": "values.topk(k + 1)"}, "its shape is"),
    (2, "cache_bytes = lambda L, B, S, K, H, T, e: L * B * S * K // T * H * e",
     "counted were"),
    (2, {"heads = max(1, K // T)": "heads = K"}, "counted were"),
    (2, "cache_bytes = lambda L, B, S, K, H, T, e: 2 * L * B * S * K * H * e // T",
     "heads are not split"),
    (3, "fastest = lambda nbytes, bandwidth, calls, alpha: 16", "return T and seconds"),
    (3, {"2 * (T - 1) * alpha": "2 * alpha"}, "it should be 7.46"),
    (3, {"2 * (T - 1) * alpha": "(T - 1) * alpha"}, "it should be"),
    (3, {"nbytes / (T * bandwidth)": "nbytes / bandwidth"}, "is faster"),
]  # fmt: skip
