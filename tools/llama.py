"""Llama in torchtitan's manner, as a case for tools/peak.py: TP + SP and loss_parallel,
fully_shard over the replicas, recomputation, AdamW in float32.

    LAYERS=4 TP=8 B=16 python tools/peak.py tools/llama.py --ranks 256

Environment: MODEL (llama-3-70b or another name of tools/presets.py without experts),
LAYERS, TP, B (sequences per rank), S, RECOMPUTE (none, half, full).
"""

import os

import torch
import torch.nn.functional as F
from presets import MODELS
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

at = torch.ops.aten
# Outputs that "half" saves, besides those of every second product.
SAVED = {
    at._scaled_dot_product_flash_attention.default,
    at._scaled_dot_product_flash_attention_for_cpu.default,
    at._scaled_dot_product_efficient_attention.default,
    torch.ops._c10d_functional.reduce_scatter_tensor.default,
}


def setting(name: str, default):
    return type(default)(os.environ.get(name, default))


def sizes() -> dict:
    found = dict(MODELS[setting("MODEL", "llama-3-70b")])
    found["layers"] = setting("LAYERS", found["layers"])
    found["seq_len"] = setting("S", found["seq_len"])
    return found


def rotary(x, cos, sin):
    one, two = x.float().chunk(2, -1)
    return torch.cat([one * cos - two * sin, two * cos + one * sin], -1).type_as(x)


class OneKernel(torch.autograd.Function):
    """RMSNorm that saves its input and 1/σ, as the kernel of a GPU."""

    @staticmethod
    def forward(ctx, x, weight):
        scale = x.square().mean(-1, keepdim=True, dtype=torch.float32).rsqrt()
        ctx.save_for_backward(x, weight, scale)
        return (x * scale.to(x.dtype)).mul_(weight)

    @staticmethod
    def backward(ctx, grad):
        x, weight, scale = ctx.saved_tensors
        normed = x * scale.to(x.dtype)
        grad_weight = (grad * normed).flatten(0, -2).sum(0)
        inner = grad * weight
        mean = (inner * normed).mean(-1, keepdim=True)
        return inner.sub_(normed.mul_(mean)).mul_(scale.to(x.dtype)), grad_weight


class RMSNorm(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x):
        return OneKernel.apply(x, self.weight)


class Attention(nn.Module):
    def __init__(self, hidden, heads, kv_heads, head_dim):
        super().__init__()
        self.head_dim = head_dim
        self.q_proj = nn.Linear(hidden, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(hidden, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(hidden, kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, hidden, bias=False)

    def forward(self, x, cos, sin):
        B, S, _ = x.shape
        heads = [p(x).view(B, S, -1, self.head_dim) for p in self.projections()]
        q, k = (rotary(each, cos, sin).transpose(1, 2) for each in heads[:2])
        v = heads[2].transpose(1, 2)
        is_grouped = k.shape[1] < q.shape[1]
        o = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, enable_gqa=is_grouped
        )
        return self.o_proj(o.transpose(1, 2).reshape(B, S, -1))

    def projections(self):
        return self.q_proj, self.k_proj, self.v_proj


class MLP(nn.Module):
    def __init__(self, hidden, ffn):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, ffn, bias=False)
        self.up_proj = nn.Linear(hidden, ffn, bias=False)
        self.down_proj = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, hidden, heads, kv_heads, head_dim, ffn):
        super().__init__()
        self.input_layernorm = RMSNorm(hidden)
        self.self_attn = Attention(hidden, heads, kv_heads, head_dim)
        self.post_attention_layernorm = RMSNorm(hidden)
        self.mlp = MLP(hidden, ffn)

    def forward(self, x, cos, sin):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


def every_second_product():
    """torchtitan's selective recomputation, as `context_fn` of a checkpoint."""
    products = {False: 0, True: 0}  # is it recomputed → how many

    def policy(context, op, *args, **kwargs):
        is_saved = op in SAVED
        if op == at.mm.default:
            products[context.is_recompute] += 1
            is_saved = products[context.is_recompute] % 2 == 1
        kind = CheckpointPolicy
        return kind.MUST_SAVE if is_saved else kind.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class Llama(nn.Module):
    """recompute: none, half, full."""

    def __init__(self, sizes: dict, recompute="none"):
        super().__init__()
        hidden = sizes["hidden"]
        names = "hidden", "heads", "kv_heads", "head_dim", "ffn"
        of_layer = [sizes[name] for name in names]
        self.embed_tokens = nn.Embedding(sizes["vocab_size"], hidden)
        self.layers = nn.ModuleList(Layer(*of_layer) for _ in range(sizes["layers"]))
        self.norm = RMSNorm(hidden)
        self.lm_head = nn.Linear(hidden, sizes["vocab_size"], bias=False)
        self.head_dim = sizes["head_dim"]
        self.again = {"none": None, "full": {}}.get(recompute, {})
        if recompute == "half":
            self.again = {"context_fn": every_second_product}

    def forward(self, tokens_BS):
        S, H = tokens_BS.shape[1], self.head_dim
        rate = 10000 ** (-torch.arange(0, H, 2).float() / H)
        angles = torch.outer(torch.arange(S).float(), rate)[None, :, None]
        tables = angles.cos(), angles.sin()
        x = self.embed_tokens(tokens_BS)
        for layer in self.layers:
            if self.again is None:
                x = layer(x, *tables)
            else:
                more = dict(use_reentrant=False, preserve_rng_state=False)
                x = checkpoint(layer, x, *tables, **more, **self.again)
        return self.lm_head(self.norm(x))


def build():
    return Llama(sizes(), setting("RECOMPUTE", "full"))


def plan_of_layer() -> dict:
    whole = (Replicate(), None, None)
    plan = {
        "input_layernorm": SequenceParallel(),
        "post_attention_layernorm": SequenceParallel(),
        "self_attn": PrepareModuleInput(
            input_layouts=(Shard(1), None, None), desired_input_layouts=whole
        ),
        "mlp": PrepareModuleInput(
            input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
        ),
    }
    for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
        plan[name] = ColwiseParallel()
    for name in ("mlp.gate_proj", "mlp.up_proj"):
        plan[name] = ColwiseParallel()
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        plan[name] = RowwiseParallel(output_layouts=Shard(1))
    return plan


def plan_of_ends() -> dict:
    return {
        "embed_tokens": RowwiseParallel(
            input_layouts=Replicate(), output_layouts=Shard(1)
        ),
        "norm": SequenceParallel(),
        "lm_head": ColwiseParallel(
            input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
        ),
    }


def parallelize(model, group):
    tp = setting("TP", 1)
    shape = group.size() // tp, tp
    device = torch.get_default_device().type
    mesh = init_device_mesh(device, shape, mesh_dim_names=("dp", "tp"))
    if tp > 1:
        parallelize_module(model, mesh["tp"], plan_of_ends())
        for layer in model.layers:
            parallelize_module(layer, mesh["tp"], plan_of_layer())
        loss_parallel().__enter__()  # up to the end: backward needs it as well
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh["dp"], mp_policy=policy)
    return model


def batch(step):
    size = sizes()
    shape = 2, setting("B", 1), size["seq_len"]
    return torch.randint(size["vocab_size"], shape).unbind()


def loss(logits, target):
    return F.cross_entropy(logits.flatten(0, 1).float(), target.flatten())


def optimizer(parameters):
    return torch.optim.AdamW(parameters, fused=True)
