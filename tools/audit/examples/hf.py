"""A small random model under the tensor parallelism of Hugging Face transformers.

    MODEL=qwen3 python tools/audit.py --example hf --ranks 2

MODEL is a model type of transformers with a plan: qwen2 (the default), qwen3, llama, …
"""

import os

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

VOCABULARY = 64
SIZES = dict(
    vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64,
    moe_intermediate_size=32, num_experts=4, num_local_experts=4, num_experts_per_tok=2,
    num_hidden_layers=int(os.environ.get("LAYERS", "2")), num_attention_heads=4,
    head_dim=8, num_key_value_heads=4, max_position_embeddings=32, pad_token_id=0,
    tie_word_embeddings=False, attn_implementation="eager", use_cache=False,
)  # fmt: skip


def build():
    config = AutoConfig.for_model(os.environ.get("MODEL", "qwen2"), **SIZES)
    config = getattr(config, "text_config", config)
    return AutoModelForCausalLM.from_config(config)


def parallelize(model, tp_group):
    """The plan that comes with the model, applied as from_pretrained applies it.

    from_pretrained shards empty parameters and loads weights into the shards; here the
    weights are those of the full model.
    """
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    mesh = DeviceMesh.from_group(tp_group, "cpu", mesh_dim_names=("tp",))
    apply_tensor_parallelism(model, mesh)
    for name, p in model.named_parameters():
        if isinstance(p, DTensor):
            shard = distribute_tensor(weights[name], mesh, p.placements)
            p.data.to_local().copy_(shard.to_local())
    return model


def batch(step):
    tokens = torch.randint(VOCABULARY, (2, 3, 12))
    return tokens[0], tokens[1]
