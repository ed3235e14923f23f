"""Lesson 04's plan on a model of another library: Hugging Face's Qwen2.

PyTorch's plan for the lesson's model fits a model that was not written for this course:
the modules have the same names. It needs two additions, gate_proj and lm_head's place.

    torchrun --standalone --nproc_per_node=2 beyond/hugging_face.py

It needs the packages of requirements-extra.txt, and downloads nothing: weights are
random. You will see the loss and all gradients of one step, in one process and with the
sequence and all matrices split.
"""

import argparse
import copy
import os
import sys
import time
from functools import partial
from importlib.util import find_spec

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import parallel

try:
    from course import lesson00, lesson01, lesson02, lesson04
except ModuleNotFoundError as error:  # a copy of this file, without its repository
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(60)  # rank 0 says why, and torchrun ends all
    print(f"error: this script imports the course's lessons: {error}", file=sys.stderr)
    sys.exit(2)


def make_qwen2(args) -> nn.Module:
    """Qwen2 of the lesson's size, with random weights; the same on every rank."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=args.vocab_size, hidden_size=args.hidden,
        intermediate_size=4 * args.hidden, num_hidden_layers=args.layers,
        num_attention_heads=args.heads, num_key_value_heads=args.kv_heads,
        max_position_embeddings=args.seq_len, tie_word_embeddings=args.tie,
        attn_implementation="eager", use_cache=False,
    )  # fmt: skip
    torch.manual_seed(args.seed)
    return Qwen2ForCausalLM(config).to(args.device).eval()  # float32, as in its norms


def qwen2_plan() -> dict:
    """Lesson 04's plan, by Qwen2's names."""
    # x stays a DTensor between modules: Qwen2 derives positions and the causal mask
    # from the shape of x, which must be S there and not s.
    styles = lesson04.sp_plan("hidden_states", local=False)
    plan = {f"model.{name}": style for name, style in styles.items()}
    plan["model.layers.*.mlp.gate_proj"] = parallel.ColwiseParallel()
    plan["lm_head"] = plan.pop("model.lm_head")
    return plan


# ==== RUN


def main(args, report: lesson00.Report) -> None:
    """One step in one process and by PyTorch's plan."""
    tp_group = lesson00.mesh_groups({"tp": args.ranks}, args.timeout)["tp"]
    batches = []
    for batch in lesson02.make_batches(lesson04.__doc__, args, 1):
        batches.append(lesson04.pad_batch(*batch, args.ranks))
    args.seq_len = report.size["S"]  # from here on T divides it
    full = make_qwen2(args)

    train = partial(lesson02.train_transformer, "Qwen2", batches=batches, args=args)
    runs = {}
    loss_of = lambda output, target_BS: lesson02.mean_loss(output.logits, target_BS)
    runs["without TP"] = train(copy.deepcopy(full), loss_of=loss_of)
    with report.guard("DTensor"), parallel.loss_parallel():
        device = full.device.type
        mesh = DeviceMesh.from_group(tp_group, device, mesh_dim_names=("tp",))
        model = parallel.parallelize_module(copy.deepcopy(full), mesh, qwen2_plan())
        if args.tie:  # the plan sharded one weight twice
            model.lm_head.weight = model.model.embed_tokens.weight
        planned = lambda output, target: lesson04.planned_loss(output.logits, target)
        runs["DTensor"] = train(model, loss_of=planned)

    values = lambda field: lesson01.values_of(runs, field)
    report.section("Lesson 04's plan on Qwen2 of Hugging Face: loss, one step")
    report.compare("losses", values("losses"), lesson00.ALLOWED_LOSS["float32"])
    report.section("Gradients: norms; diff: the largest of any element, relative")
    allowed = lesson00.ALLOWED["float32"]
    gradients = values("gradients")
    report.compare("gradients", gradients, allowed, fold=lesson02.module_of)


def sizes(args) -> dict[str, int]:
    """Lesson 04's letters of shapes. ValueError if transformers is not there."""
    if not find_spec("transformers"):
        raise ValueError("it needs Hugging Face's: pip install transformers==5.20.2")
    if args.dtype != "float32":
        text = "Qwen2's norms compute in float32"
        raise ValueError(f"--dtype {args.dtype}: {text}; take --dtype float32")
    size = lesson04.sequence_sizes(args)
    for letter in "Xp":  # of formulas, which this script does not have
        del size[letter]
    return size


if __name__ == "__main__":
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    lesson02.add_model_flags(parser)
    text = "embedding and head share one weight"
    parser.add_argument("--tie", action="store_true", help=text)
    lesson00.launch(main, sizes, parser)
