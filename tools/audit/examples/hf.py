"""A small random Qwen2 under the tensor parallelism of Hugging Face transformers."""

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.distributed.tensor_parallel import apply_tensor_parallelism

VOCABULARY = 64


def build():
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        max_position_embeddings=32, tie_word_embeddings=False,
        attn_implementation="eager", use_cache=False,
    )  # fmt: skip
    return Qwen2ForCausalLM(config)


def parallelize(model, tp_group):
    """The plan that comes with Qwen2, applied as from_pretrained applies it.

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
