"""Models and machines that `tools/plan.py` and the page with sliders know by name."""

# What else a model is, and what lesson 05's model is. biases: of "all" linears and
# LayerNorms; of the q, k and v projections only, with RMSNorm ("qkv"); "none", with
# RMSNorm. gated: an MLP of three matrices (gate, up, down). tie: one vocabulary matrix.
# qk_norm: an RMSNorm of each query and key head. experts: MLPs of a layer, of which
# each token takes top_k, expert_ffn wide (0: one MLP); then ffn is the width of the
# shared expert, 0 if there is none.
STYLE = {"gated": False, "biases": "all", "tie": False, "qk_norm": False}
EXPERTS = {"experts": 0, "top_k": 0, "expert_ffn": 0}
BIASES = "all", "qkv", "none"


def model(
    layers, hidden, heads, kv_heads, vocab_size, seq_len, batch_size, ffn=None, **more
) -> dict:
    """Sizes of a model. ffn: width of the MLP (default 4·hidden); more: head_dim
    (default hidden / heads), STYLE, EXPERTS."""
    sizes = dict(layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads)
    sizes.update(head_dim=hidden // heads, ffn=4 * hidden if ffn is None else ffn)
    sizes.update(vocab_size=vocab_size, seq_len=seq_len, batch_size=batch_size)
    sizes.update(STYLE)
    sizes.update(EXPERTS)
    sizes.update(more)
    return sizes


def of_table_1(heads, hidden, layers, tp, pp, gpus, batch_size) -> dict:
    """A row of arXiv:2104.04473, Table 1: the model, and its layout on A100 GPUs."""
    sizes = model(layers, hidden, heads, heads, 51200, 2048, batch_size, tie=True)
    sizes.update(gpus=gpus, published=(gpus // pp // tp, pp, tp))
    return sizes


def llama(layers, hidden, heads, ffn, batch_size) -> dict:
    """arXiv:2407.21783, Table 3; 128,256 tokens as in the published weights."""
    sizes = (layers, hidden, heads, 8, 128256, 8192, batch_size)
    return model(*sizes, ffn, gated=True, biases="none")


def qwen(layers, hidden, heads, kv_heads, ffn, vocab_size=152064, tie=False) -> dict:
    """arXiv:2412.15115, Table 1, and the config.json of the published weights."""
    sizes = (layers, hidden, heads, kv_heads, vocab_size, 4096, 1024)
    return model(*sizes, ffn, gated=True, biases="qkv", tie=tie)


def mixture(sizes: tuple, experts, top_k, expert_ffn, **more) -> dict:
    """A mixture of experts in every layer, without a shared one."""
    more.update(experts=experts, top_k=top_k, expert_ffn=expert_ffn)
    return model(*sizes, 4096, 1024, 0, gated=True, biases="none", **more)


# Sequences and batches of Qwen, Mistral and Mixtral are examples; the others are
# published. Mixtral: arXiv:2401.04088, Table 1. Qwen3: the config.json of its weights.
MODELS = {
    # 2005.14165; the vocabulary is padded.
    "gpt3": model(96, 12288, 96, 96, 51200, 2048, 1536, tie=True),
    "llama-3-8b": llama(32, 4096, 32, 14336, 512),
    "llama-3-70b": llama(80, 8192, 64, 28672, 512),
    "llama-3-405b": llama(126, 16384, 128, 53248, 2048),
    "mistral-7b": model(  # arXiv:2310.06825, Table 1
        32, 4096, 32, 8, 32000, 8192, 512, 14336, gated=True, biases="none"
    ),
    "qwen2.5-1.5b": qwen(28, 1536, 12, 2, 8960, 151936, tie=True),
    "qwen2.5-7b": qwen(28, 3584, 28, 4, 18944),
    "qwen2.5-32b": qwen(64, 5120, 40, 8, 27648),
    "qwen2.5-72b": qwen(80, 8192, 64, 8, 29568),
    "mixtral-8x7b": mixture((32, 4096, 32, 8, 32000), 8, 2, 14336),
    "qwen3-30b-a3b": mixture(
        (48, 2048, 32, 4, 151936), 128, 8, 768, head_dim=128, qk_norm=True
    ),
    "qwen3-235b-a22b": mixture(
        (94, 4096, 64, 4, 151936), 128, 8, 1536, head_dim=128, qk_norm=True
    ),
    "gpt-1.7b": of_table_1(24, 2304, 24, 1, 1, 32, 512),
    "gpt-3.6b": of_table_1(32, 3072, 30, 2, 1, 64, 512),
    "gpt-7.5b": of_table_1(32, 4096, 36, 4, 1, 128, 512),
    "gpt-18.4b": of_table_1(48, 6144, 40, 8, 1, 256, 1024),
    "gpt-39.1b": of_table_1(64, 8192, 48, 8, 2, 512, 1536),
    "gpt-76.1b": of_table_1(80, 10240, 60, 8, 4, 1024, 1792),
    "gpt-145.6b": of_table_1(96, 12288, 80, 8, 8, 1536, 2304),
    "gpt-310.1b": of_table_1(128, 16384, 96, 8, 16, 1920, 2160),
    "gpt-529.6b": of_table_1(128, 20480, 105, 8, 35, 2520, 2520),
    "gpt-1008b": of_table_1(160, 25600, 128, 8, 64, 3072, 3072),
}


def machine(gpu_memory, tera_flops, inside, between, node=8) -> dict:
    """node: GPUs with fast links to each other. gpu_memory: 10⁹ bytes per GPU.
    tera_flops: its peak, 16 bits, dense. inside, between: GB/s in one direction per
    GPU."""
    found = dict(node=node, gpu_memory=float(gpu_memory), reserve=0.1)
    found.update(gpu_flops=tera_flops * 1e12, inside=inside * 1e9)
    found.update(between=between * 1e9, alpha_inside=2e-6, alpha_between=10e-6)
    return found


# Source: the makers' data sheets; 400 Gb/s per GPU between nodes from H100 on.
# Memory is what PyTorch's out-of-memory messages call the total capacity, in public
# logs: 79.1 to 79.3 GiB of a card that is sold as 80 GB, 39.4 to 39.6 of 40, 139.7 to
# 139.8 of 141 (H200), 178.4 of 180 (B200), 184.3 of 186 (GB200), 191.7 to 192.0 of 192
# (MI300X). A GiB is 1.074 GB.
# reserve: share of the memory that a layout leaves free, for what is not counted here:
# CUDA's and NCCL's own buffers, fragmentation, temporary tensors. An assumption.
# alpha: seconds per step of a ring inside a node, and of one that leaves it. Also
# assumptions.
MACHINES = {
    "dgx-a100": machine(85, 312, 300, 25),
    "dgx-a100-40gb": machine(42.4, 312, 300, 25),
    "dgx-h100": machine(85, 989, 450, 50),
    "dgx-h200": machine(150, 989, 450, 50),
    "dgx-b200": machine(191.5, 2250, 900, 50),
    "gb200-nvl72": machine(197.9, 2500, 900, 50, node=72),
    "mi300x": machine(206, 1307.4, 448, 50),
}
