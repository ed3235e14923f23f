"""A case for tools/peak.py: a model of Hugging Face transformers, by its config.

    python tools/peak.py --config qwen3 --ranks 64 --tp 8
    python tools/peak.py --config my_model/config.json --ranks 8 --recompute full

The config is a config.json, a folder that has one, a model type of transformers (with
its default sizes), or a name on the Hub, of which nothing else is loaded. tp ranks
share the model by the plan that comes with it. The other ranks are replicas:
fully_shard over them, per layer, with 16-bit weights and gradients in float32; AdamW.
"""

import math
import warnings
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from audit.command import WrongUse
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def read_config(name: str, layers: int | None):
    """The config of a file, a folder, a model type or a name on the Hub."""
    try:
        from transformers import CONFIG_MAPPING, AutoConfig
    except ImportError:
        text = "needs transformers, which cannot be imported; call make setup EXTRA=1"
        raise WrongUse(f"--config {name}: {text}") from None
    path = Path(name)
    if path.suffix == ".json" and not path.is_file():
        raise WrongUse(f"--config {name}: no such file")
    if path.is_dir() and not (path / "config.json").is_file():
        raise WrongUse(f"--config {name}: the folder has no config.json")
    try:
        if name in CONFIG_MAPPING and not path.exists():
            config = AutoConfig.for_model(name)
        else:
            config = AutoConfig.from_pretrained(name)
    except Exception as error:
        raise WrongUse(f"--config {name}: {first_line(error)}") from None
    config = getattr(config, "text_config", config)
    config.use_cache = False
    if layers is not None:
        config.num_hidden_layers = layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:layers]
    return config


def check_tp(config, tp: int, ranks: int) -> None:
    """WrongUse if tp does not divide the ranks or the heads, or there is no plan."""
    if ranks % tp:
        raise WrongUse(f"--tp {tp}: must divide --ranks {ranks}")
    if tp == 1:
        return
    if not getattr(config, "base_model_tp_plan", None):
        text = f"transformers has no plan for {config.model_type}; take --tp 1"
        raise WrongUse(f"--tp {tp}: {text}")
    kinds = ("num_attention_heads", "num_key_value_heads")
    both = math.gcd(*(getattr(config, name, None) or 0 for name in kinds))
    for name in kinds:
        heads = getattr(config, name, None)
        if heads and heads % tp:
            largest = max(n for n in range(1, tp) if math.gcd(both, ranks) % n == 0)
            text = f"{name} {heads} % {tp} is not 0; take --tp {largest}"
            raise WrongUse(f"--tp {tp}: {text}")


def decoder_layers(model: nn.Module, config) -> nn.ModuleList:
    for module in model.modules():
        is_list = isinstance(module, nn.ModuleList)
        if is_list and len(module) == config.num_hidden_layers:
            return module
    raise WrongUse(f"{type(model).__name__}: no list of its layers was found")


def case_of(args) -> SimpleNamespace:
    """build, parallelize and so on, as a case of the audit has them.

    args: config, layers, ranks, tp, batch, seq_len, recompute."""
    # Nothing here changes the output in place.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
    config = read_config(args.config, args.layers)
    check_tp(config, args.tp, args.ranks)
    from transformers import AutoModelForCausalLM

    def build():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        if args.recompute == "full":
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return model.train()

    def parallelize(model, group):
        shape = args.ranks // args.tp, args.tp
        device = torch.get_default_device().type
        mesh = init_device_mesh(device, shape, mesh_dim_names=("dp", "tp"))
        layers = decoder_layers(model, config)
        if args.tp > 1:
            from transformers.distributed.tensor_parallel import (
                apply_tensor_parallelism,
            )

            apply_tensor_parallelism(model, mesh["tp"])
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        for module in (*layers, model):
            fully_shard(module, mesh=mesh["dp"], mp_policy=policy)
        return model

    def batch(step):
        tokens = torch.randint(config.vocab_size, (2, args.batch, args.seq_len))
        return tokens[0], tokens[1]

    def loss(output, target):
        return F.cross_entropy(output.logits.flatten(0, 1).float(), target.flatten())

    def optimizer(parameters):
        return torch.optim.AdamW(parameters, fused=True)

    return SimpleNamespace(
        build=build,
        parallelize=parallelize,
        batch=batch,
        loss=loss,
        optimizer=optimizer,
    )
