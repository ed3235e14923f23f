"""Small wrong edits of what each lesson adds: is each of them caught?

    make mutants ARGS="--lesson 02"    (or some by number: ARGS="3 17"; or all)

An edit survives if what is named with it does not fail: a run of the lesson, by default
on two ranks, or a test. Before, all these must pass on the lessons as they are.
"""

import argparse
import inspect
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import jobs

PATHS = {stem[:2]: path for stem, path in jobs.PATHS.items()}
TESTS = "wrappers", "mlp_equality", "transformer", "vocab", "sequence", "3d"
TESTS = {lesson: f"tests/test_{name}.py" for lesson, name in zip(PATHS, TESTS)}
TESTS["08"] = "tests/test_same_bits.py"
TESTS["09"] = "tests/test_shared_heads.py"
TESTS["10"] = "tests/test_checkpoints.py"
TESTS["11"] = "tests/test_context_parallel.py"
TESTS["13"] = "tests/test_mlp_equality.py"
TESTS["14"] = "tests/test_schedules.py"
TESTS["16"] = "tests/test_experts.py"
TESTS["15"] = "tests/test_zero.py"
TESTS["18"] = "tests/test_in_pieces.py"
LATE = r"Timeout|[Tt]imed out|killed after|did not meet|exit code -9"  # a busy machine


class Mutant(NamedTuple):
    lesson: str
    target: str  # a function, a class or Class.method
    what: str
    old: str  # exactly once in the target
    new: str
    by: str = "2"  # what catches it: ranks, and flags; or a test


# fmt: off
MUTANTS = [Mutant(*row) for row in [
    # 00
    ("00", "all_reduce", "op is ignored",
     "(out, op, group=group)", "(out, group=group)", "test_random_cases"),
    ("00", "all_reduce", "the result keeps a history",
     "x.detach().clone(", "x.clone(", "test_random_cases"),
    ("00", "broadcast", "always from rank 0", "group_src=src", "group_src=0"),
    ("00", "broadcast", "a group's rank taken for a global one",
     "(out, group_src=src,", "(out, src,", "test_random_cases"),
    ("00", "all_to_all", "joined along dim 0", "(list(out), dim)", "(list(out))",
     "test_random_cases"),
    ("00", "all_gather", "slices come in another order",
     "torch.cat(slices, dim)", "torch.cat(slices[::-1], dim)"),
    ("00", "split", "dims that do not divide are cut, too",
     "x.shape[dim] % parts:", "x.shape[dim] < parts:", "test_dims_that_do_not_divide"),
    ("00", "shard", "a view of the whole, not a copy",
     "[group.rank()].clone()", "[group.rank()]", "test_random_cases"),
    ("00", "send_recv", "receives into strides of a view",
     "torch.empty_like(like, memory_format=torch.contiguous_format)",
     "torch.empty_like(like)", "test_random_cases"),
    ("00", "ring_all_reduce", "right and left exchanged",
     "right = (rank + 1) % T\n    left = (rank - 1) % T",
     "right = (rank - 1) % T\n    left = (rank + 1) % T", "3"),
    ("00", "ring_all_reduce", "chunk, which makes less than T of a few",
     ".tensor_split(T)", ".chunk(T)", "test_random_cases"),
    ("00", "ring_all_reduce", "adds into its input",
     "chunks[recv_chunk] = chunks[recv_chunk] + arrived",
     "chunks[recv_chunk] += arrived"),
    ("00", "async_all_reduce", "overwrites its input", "out = x.clone()", "out = x",
     "test_random_cases"),
    ("00", "mesh_groups", "the groups of an outer axis are neighbours",
     "ranks.movedim(dim, -1).reshape", "ranks.reshape", "test_groups_of_a_mesh"),
    ("00", "two_all_reduces", "the second sum is the first one again",
     "sum_y = all_reduce(y, group)", "sum_y = sum_x"),
    ("00", "matmul_case_3_reduce_scatter", "the sum is split along the other dim",
     "(partial_c_IK, 1, group)", "(partial_c_IK, 0, group)"),
    # 01
    ("01", "shard_parameter", "does not record how it was sharded",
     "None if dim is None else (dim, group)", "None"),
    ("01", "shard_parameter", "shares its memory with the full parameter",
     "full.detach().clone()", "full.detach()"),
    ("01", "CopyToTP.backward", "mean for sum",
     "ctx.tp_group),", "ctx.tp_group) / ctx.tp_group.size(),"),
    ("01", "GatherFromTP.backward", "sums a gradient that is complete on each rank",
     "shard(grad,", "reduce_scatter(grad,"),
    ("01", "AllGatherWithGrad.backward", "slices, and does not sum",
     "reduce_scatter(partial_grad,", "shard(partial_grad,", "test_float64_equality"),
    ("01", "ReduceScatterWithGrad.forward", "mean for sum",
     "(partial_y, dim, group)", "(partial_y / group.size(), dim, group)",
     "test_float64_equality"),
    ("01", "ColumnParallelLinear.forward", "f after the product",
     "    if self.copy_input:\n        x_BSD = CopyToTP.apply(x_BSD, self.tp_group)\n"
     "    y_BSf = F.linear(x_BSD, self.weight, self.bias)\n",
     "    y_BSf = F.linear(x_BSD, self.weight, self.bias)\n"
     "    if self.copy_input:\n        y_BSf = CopyToTP.apply(y_BSf, self.tp_group)\n"),
    ("01", "RowParallelLinear.forward", "GELU of partial sums",
     "x_BSf, self.weight)\n", "x_BSf, self.weight)\n"
     "    partial_y_BSD = F.gelu(partial_y_BSD)\n"),
    ("01", "average_gradients", "the mean of the means, divided once more",
     "/ dp_group.size()", "/ dp_group.size() ** 2"),
    ("01", "MLP.forward", "another GELU, in the reference as well",
     "(x_BSD))", '(x_BSD), approximate="tanh")', "test_float64_equality"),
    # 02
    ("02", "rotate", "the wrong sign", "[-second, first]", "[second, -first]",
     "test_rotate_turns_complex_numbers"),
    ("02", "Transformer", "a token sees the next one", ".triu(1)", ".triu(2)",
     "test_attention_is_pytorchs"),
    ("02", "CoreAttention.forward", "future scores are 0, not −∞",
     'float("-inf")', "0.0", "test_attention_is_pytorchs"),
    ("02", "CoreAttention.forward", "divides by the root of all heads' features",
     "math.sqrt(self.head_size)", "math.sqrt(q.shape[-1])"),
    ("02", "CoreAttention.forward", "a query head uses another key head",
     "k_BKSH.repeat_interleave(queries_per_kv, 1)",
     "k_BKSH.repeat(1, queries_per_kv, 1, 1)"),
    ("02", "Dropout.forward", "what is kept is not scaled up", " / (1 - self.p)", ""),
    ("02", "ShardedDropout.forward", "also drops when nothing is trained",
     "self.p == 0 or not self.training", "self.p == 0", "test_float64_equality"),
    ("02", "copy_then_apply_each", "an f each for q, k and v",
     "    x_BSD = CopyToTP.apply(x_BSD, linears[0].tp_group)\n"
     "    return apply_each(x_BSD, *linears)",
     "    return [p(CopyToTP.apply(x_BSD, p.tp_group)) for p in linears]"),
    ("02", "parallelize_layer", "f twice before q", "attn.q_proj, tp_group, copy_input",
     "attn.q_proj, tp_group, gather_output"),
    ("02", "parallelize_layer", "features must divide, not heads",
     "kv_heads % T", "attn.k_proj.out_features % T", "test_heads_that_do_not_divide"),
    ("02", "parallelize_layer", "the attention weights' masks are sharded by position",
     "core.dropout.p, 1, tp_group", "core.dropout.p, 2, tp_group",
     "test_float64_equality"),
    ("02", "dtensor_transformer", "DTensor's heads on all ranks drop the same",
     "ShardedDropout(p, 1, tp_group)", "Dropout(p)"),
    ("02", "tp_plan", "DTensor: o by column", 'o_proj": row', 'o_proj": column'),
    ("02", "DecoderLayer.forward", "the residual is taken after the norm",
     "self.input_layernorm(x_BSD)", "(x_BSD := self.input_layernorm(x_BSD))",
     "test_layer_and_model_are_what_they_say"),
    ("02", "global_norm", "replicated squares count once a rank",
     "squares /= tp_group.size()", "squares /= 1"),
    ("02", "clip_gradients", "small gradients are scaled up",
     "min(1.0,", "max(0.0,", "test_float64_equality"),
    # 03
    ("03", "add_spare_rows", "as many rows are added as are too many",
     "-len(p) % ranks", "len(p) % ranks", "3"),
    ("03", "check_tokens", "one token too many", "< vocab_size:", "<= vocab_size:",
     "test_tokens_outside_the_vocabulary_are_refused"),
    ("03", "to_local", "a rank lacks its first row",
     "index >= 0", "index > 0", "test_embedding_and_head"),
    ("03", "vocab_transformer", "the embedding is still replicated",
     "    model.embed_tokens = VocabParallelEmbedding(full.embed_tokens, tp_group)\n",
     ""),
    ("03", "VocabParallelCrossEntropy.forward", "spare −∞ in the sum of logits",
     "x_BSv.masked_fill(spare_v, 0).sum(-1)", "x_BSv.sum(-1)"),
    ("03", "VocabParallelCrossEntropy.forward", "smoothing: spare columns are targets",
     "ctx.smooth_target * x_BSv",
     "smoothing / (v * tp_group.size()) * x_BSv"),
    ("03", "VocabParallelCrossEntropy.backward", "smoothing's gradient, spare columns",
     "(softmax_BSv - ctx.smooth_target).masked_fill(spare_v, 0)",
     "softmax_BSv - ctx.smooth_target"),
    ("03", "VocabParallelCrossEntropy.backward", "the target's weight is not 1 − ε",
     "(1 - ctx.smoothing) * is_local_BS", "is_local_BS"),
    ("03", "VocabParallelCrossEntropy.forward", "the sum of the ranks' largest logits",
     "x_BSv.amax(-1), tp_group, dist.ReduceOp.MAX", "x_BSv.amax(-1), tp_group"),
    ("03", "VocabParallelCrossEntropy.forward", "bfloat16 stays bfloat16",
     "x_BSv.to(torch.promote_types(x_BSv.dtype, torch.float32))",
     "x_BSv", "test_loss_and_gradient"),
    ("03", "VocabParallelCrossEntropy.forward", "another ignore_index has no effect",
     "target_BS != ignore", "target_BS != IGNORE", "test_loss_and_gradient"),
    ("03", "VocabParallelCrossEntropy.forward", "a z-loss in forward only",
     "all_reduce(partial_qx_BS, tp_group)",
     "all_reduce(partial_qx_BS, tp_group) + 1e-3 * sum_BS.log().square()"),
    ("03", "simplest_cross_entropy", "every rank adds a logit",
     "picked_BS.where(is_local_BS, 0)", "picked_BS"),
    ("03", "gathered_loss", "spare columns are left in",
     "[..., :vocab_size]", ""),
    ("03", "dtensor_vocab_transformer", "the tied weight is not tied again",
     "model.lm_head.weight = model.embed_tokens.weight", "pass", "2 --tie"),
    ("03", "sample_sharded", "a rank's column is used as a token",
     "scores_v.argmax() + tp_group.rank() * v", "scores_v.argmax()"),
    ("03", "sample_sharded", "of equal scores the last",
     "vocab_size)\n    return int(all_reduce(token, tp_group, dist.ReduceOp.MIN))",
     "-1)\n    return int(all_reduce(token, tp_group, dist.ReduceOp.MAX))",
     "test_draws_are_those_of_one_process"),
    # 04
    ("04", "pad_batch", "padding has targets", "value=IGNORE", "value=PAD"),
    ("04", "pad_batch", "pads a length that T divides",
     "= -tokens", "= ranks - tokens", "test_padding_is_behind_the_sequence"),
    ("04", "GatherThenLinear.backward", "the mean for a bias",
     "flat_grad.sum(0)", "flat_grad.mean(0)"),
    ("04", "GatherThenLinear.backward", "dL/dx of the last linear only",
     "partial_grad_BSD += grad_BSf @ weight", "partial_grad_BSD = grad_BSf @ weight"),
    ("04", "GatherThenLinear.backward", "slices are joined along the batch",
     "all_gather(x_BsD, 1, ctx.tp_group)", "all_gather(x_BsD, 0, ctx.tp_group)"),
    ("04", "GatherThenLinear.forward", "saves the gathered input, too",
     "    return tuple(", "    ctx.save_for_backward(x_BsD, *weights, x_BSD)\n"
     "    return tuple("),
    ("04", "GatherThenLinear.backward", "a linear without bias gets a gradient for one",
     "if has_bias else None", "", "test_linears_without_biases"),
    ("04", "gather_and_save", "its backward does not sum",
     "AllGatherWithGrad.apply", "GatherFromTP.apply", "2 --save-gathered"),
    ("04", "split_sequence", "attention saves what was gathered",
     "layer.self_attn.project_qkv = gather",
     "layer.self_attn.project_qkv = gather_and_save"),
    ("04", "all_reduce_replicated_gradients", "norms only, and no biases",
     "if p.grad is not None and not sharding_of(p):",
     "if p.grad is not None and not shardings_of(p) and len(replicated) < 4:"),
    ("04", "all_reduce_replicated_gradients", "the sum is added to a rank's own part",
     "p.grad.copy_(", "p.grad.add_("),
    ("04", "Checkpointed.forward", "other masks when it computes again",
     "=False", "=False, preserve_rng_state=False", "test_recomputed_bitwise"),
    ("04", "sp_plan", "the last norm is left out", '        "norm": norm,\n', ""),
    ("04", "planned_transformer", "tied weights are two",
     "model.lm_head.weight = model.embed_tokens.weight", "pass", "2 --tie"),
    # 05
    ("05", "tied_stages.embedding_group", "the weight is on the first two stages",
     "{line[0], line[-1]}", "{*line[:2]}", "test_equal_to_one_process"),
    ("05", "slice_stage", "chunk, which leaves a stage without a layer",
     ".tensor_split(", ".chunk(", "test_layers_are_dealt_out_once_and_evenly"),
    ("05", "schedule", "one forward pass more before the first backward pass",
     "num_stages - stage - 1", "num_stages - stage"),
    ("05", "schedule", "the last backward passes in the other order",
     "range(M - warm_up, M)", "reversed(range(M - warm_up, M))", "4 --pp 4"),
    ("05", "slice_stage", "the last stages get the extra layer",
     ".tensor_split(num_stages)[stage]",
     ".flip(0).tensor_split(num_stages)[num_stages - 1 - stage].flip(0)",
     "test_layers_are_dealt_out_once_and_evenly"),
    ("05", "Pipeline.compute_forward", "the last micro-batch's loss only",
     "self.loss + y.detach()", "y.detach()"),
    ("05", "receive", "another message is not noticed",
     "if got != label:", "if False:", "test_a_message_says_what_it_carries"),
    ("05", "make_microbatches", "every replica takes the full batch",
     'shard(torch.stack(batch), 1, groups["dp"])', "torch.stack(batch)",
     "test_a_batch_is_dealt_out_once"),
    ("05", "make_microbatches", "as long as the shortest row",
     ".any(0)", ".all(0)", "2 --ragged"),
    ("05", "all_reduce_gradients", "the sum is taken, and left",
     "p.grad.copy_(grad.view_as(p))", "pass", "2 --dp 2"),
    ("05", "MeshTraining.train_step", "the parameters are not updated",
     "norm = self.update()", "norm = self.norm()"),
    ("05", "MeshTraining.forward_backward", "partial gradients are not summed",
     "    self.sum_gradients()\n", "", "2 --dp 2"),
    ("05", "MeshTraining.sum_gradients", "replicated gradients are summed over dp",
     '(self.stage_module, self.groups["tp"])',
     '(self.stage_module, self.groups["dp"])', "2 --tp 2"),
    ("05", "MeshTraining.norm", "each stage clips by its own norm",
     'all_reduce(square.to(self.args.device), self.groups["pp"])', "square"),
    ("05", "MeshTraining.update", "does not clip",
     "    clip_gradients(self.stage_module, self.args.clip, norm)\n", ""),
    ("05", "tied_stages.TiedTraining.sum_gradients", "the copy is updated, too",
     "self.tied.grad = None  # AdamW, norm and sums skip the copy", "pass",
     "test_a_tied_weight"),
    ("05", "tied_stages.TiedTraining.renew_copy", "the copy is not renewed",
     'broadcast(self.tied, 0, self.groups["embedding"])', "self.tied",
     "test_a_tied_weight"),
    # 09
    ("09", "kv_groups", "the axes of the mesh are exchanged",
     '{"kv": kv_heads, "replica": ranks // kv_heads}',
     '{"replica": ranks // kv_heads, "kv": kv_heads}', "4"),
    ("09", "repeat_heads", "features are repeated, not heads",
     "heads.repeat_interleave(copies, 0)", "heads.repeat_interleave(copies, 1)"),
    ("09", "repeat_heads", "the linear says that it has as many outputs as before",
     "copies * full.out_features", "full.out_features"),
    ("09", "repeat_kv_heads", "values have the weights of keys",
     "repeat_heads(attn.v_proj", "repeat_heads(attn.k_proj"),
    ("09", "sum_over_replicas", "sums over the kv group",
     "all_reduce(partial_grad, replica_group)", "all_reduce(partial_grad, kv_group)",
     "4"),
    ("09", "sum_over_replicas", "the mean of the partial gradients",
     "all_reduce(partial_grad, replica_group)",
     "all_reduce(partial_grad, replica_group) / replica_group.size()"),
    ("09", "sum_over_replicas", "sharded over the TP group, as before",
     "    p.sharding = (0, kv_group)\n", ""),
    ("09", "shared_heads_transformer", "the gradients of values are not summed",
     "sum_over_replicas(layer.self_attn.v_proj", "(lambda *_: None)(None"),
    ("09", "global_norm_shared", "replicated squares count once a rank", " / c", ""),
    # 10
    ("10", "to_dtensor", "spare rows are saved as well",
     "        x = x[: max(0, p.rows - first_row)]\n        full_shape[0] = p.rows\n",
     "        pass\n"),
    ("10", "moments_of", "the first moment, twice", "adam[kind]", 'adam["exp_avg"]'),
    ("10", "state_to_save", "moments have the names of weights",
     'state[f"{kind}/{name}"]', 'state[f"weight/{name}"]'),
    ("10", "save_checkpoint", "without what others need in order to resume",
     "dict(about, step=step, files=files)", "dict(step=step, files=files)",
     "test_losses_continue_as_if_nothing_had_happened"),
    ("10", "save_checkpoint", "the folder is copied, which takes a while",
     "part.rename(folder", "shutil.copytree(part, folder"),
    ("10", "full_state", "AdamW's own copy of the weights is not looked at",
     "optimizer.unflatten(optimizer.vector)", "training.parameters"),
    ("10", "latest_checkpoint", "the oldest one", "max(", "min(",
     "test_losses_continue_as_if_nothing_had_happened"),
    ("10", "verify_checkpoint", "checksums are not compared",
     "checksum(path / name) != expected", "not (path / name).exists()",
     "test_what_cannot_be_resumed_from"),
    ("10", "reason_not_written", "the system is not asked",
     "file.write(bytes(nbytes_of_rank))", "pass",
     "test_a_full_disk_is_named_as_the_system_does"),
    ("10", "failure_in", "a failure without words has none",
     'str(failure) or "no message"', "failure",
     "test_a_truncated_file_with_a_forged_checksum"),
    # 11
    ("11", "chunks_of", "zigzag without the turn", "2 * ranks - 1 - rank",
     "ranks + rank"),
    ("11", "masked_scores", "a query does not see its own key", "key_at > query_at",
     "key_at >= query_at"),
    ("11", "blocks_of", "blocks of later keys are computed, too",
     "key_chunk <= query_chunk", "True"),
    ("11", "merge", "the larger Σ exp for the sum of both", "torch.logaddexp",
     "torch.maximum"),
    ("11", "attend_backward", "one query head for all that a key served",
     ".sum(3)", "[:, :, :, 0]"),
    ("11", "RingFunction.forward", "the keys go the other way",
     "(rank - step) % C", "(rank + step) % C", "3"),
    ("11", "RingFunction.backward", "the last hop is missing",
     "        grad_kv = pass_on(grad_kv, ctx.cp_group)\n",
     "        if step < C - 1:\n"
     "            grad_kv = pass_on(grad_kv, ctx.cp_group)\n"),
    ("11", "RingFunction.forward", "saves the keys that arrived last",
     "ctx.save_for_backward(q_BNsH, kv_2BKsH,", "ctx.save_for_backward(q_BNsH, kv,"),
    ("11", "attend_backward", "the softmax's backward without its sum",
     " - delta)", ")"),
    ("11", "repeat_for_queries", "query heads get another key/value head",
     "repeat_interleave(q_BNiH.shape[1] // kv_2BKjH.shape[2], 2)",
     "repeat(1, 1, q_BNiH.shape[1] // kv_2BKjH.shape[2], 1, 1)"),
    ("11", "ulysses.Exchange.backward", "not the way back",
     "exchange(grad, join_dim, split_dim", "exchange(grad, split_dim, join_dim"),
    # 13
    ("13", "matmul_2d", "the slice of A is gathered over the wrong axis",
     "all_gather(a_ij, 1, inner)", "all_gather(a_ij, 1, outer)"),
    ("13", "shard_2d", "records the first split only",
     "p.shardings = shardings", "p.shardings = shardings[:1]", "4"),
    ("13", "shard_2d", "records the splits in the other order",
     "p.shardings = shardings", "p.shardings = shardings[::-1]", "4"),
    ("13", "GatheredMatmul.backward", "the slice of dL/dW, not summed",
     "lesson00.reduce_scatter(partial_grad_w,", "lesson00.shard(partial_grad_w,"),
    ("13", "UpLinear2D", "the bias is split in the other order",
     "(full.bias, (0, inner), (0, outer))",
     "(full.bias, (0, outer), (0, inner))", "4"),
    ("13", "DownLinear2D.forward", "the bias is gathered over the other axis",
     "(self.bias, 0, self.outer)", "(self.bias, 0, self.inner)"),
    # 14
    ("14", "interleaved", "backward takes the first chunk first",
     "(v - 1 - chunk, i) for", "(chunk, i) for"),
    ("14", "interleaved", "one forward pass more at first",
     "2 * (P - rank - 1)", "2 * (P - rank - 1) + 1"),
    ("14", "zero_bubble", "weight passes wait one micro-batch longer",
     'phase == "backward" and i >= rank:\n'
     '            actions.append(("weight", (0, i - rank)))',
     'phase == "backward" and i > rank:\n'
     '            actions.append(("weight", (0, i - rank - 1)))',
     "test_lists_are_complete_and_as_short_as_the_formula"),
    ("14", "zero_bubble", "the last weight pass is left out",
     "range(max(0, M - rank), M)", "range(max(0, M - rank), M - 1)"),
    ("14", "VirtualPipeline.become", "always the same chunk",
     "self.stage_module = self.chunks[chunk]", "self.stage_module = self.chunks[0]"),
    ("14", "InputGradient.backward", "dL/dx of a linear without its weight",
     "grad_y @ ctx.linear.weight", "grad_y @ ctx.linear.weight.abs()"),
    ("14", "SplitLinear.add_weight_gradient", "no gradient for biases",
     "    add_gradient(self.bias, grad_y.sum(0))\n", ""),
    ("14", "add_gradient", "the last micro-batch's gradient only",
     "p.grad + grad", "grad"),
    ("14", "needed_by", "a backward pass needs no other stage",
     'return ("backward", stage + 1, i) if stage < last else ("forward", last, i)',
     'return ("forward", stage, i)',
     "test_lists_are_complete_and_as_short_as_the_formula"),
    # 16
    ("16", "sort_by_expert", "a row is of another token",
     "order // k", "order % len(x_tD)",
     "test_layers_of_random_shapes"),
    ("16", "undo_sort", "sorted once more", "[order.argsort()]", "[order]",
     "test_layers_of_random_shapes"),
    ("16", "MoE.forward", "weights over all experts, so they do not sum to 1",
     "probs_tk / probs_tk.sum(-1, keepdim=True)", "probs_tk",
     "test_layers_of_random_shapes"),
    ("16", "MoE.forward", "the weights of another expert",
     "(weights_tk[..., None]", "(weights_tk.flip(1)[..., None]",
     "test_layers_of_random_shapes"),
    ("16", "balance_loss", "the mean over this rank's tokens",
     "probs_tE.sum(0) * top_k / rows", "probs_tE.mean(0)"),
    ("16", "balance_loss", "shares in the default dtype",
     "all_counts_E.to(probs_tE.dtype) / rows",
     "(all_counts_E / rows).to(probs_tE.dtype)", "test_layers_of_random_shapes"),
    ("16", "AllToAllRows.backward", "not the way back",
     "(grad, recv, send, ctx.group)", "(grad.flip(0), recv, send, ctx.group)"),
    ("16", "leaving_rows.CountLeaving", "counts the rows that stay",
     "x[own:].nbytes", "x.nbytes", "test_bytes_are_those_of_the_rows"),
    ("16", "ExpertParallel.forward", "rows that arrive are not sorted by expert",
     "arrived[order]", "arrived"),
    ("16", "ExpertParallel.forward", "an unstable order of senders and experts",
     ".repeat(R)", ".repeat_interleave(R)"),
    ("16", "ExpertParallel.forward", "no f", "lesson01.CopyToTP.apply(arrived[order], "
     "self.tp_group)", "arrived[order]", "2 --tp 2"),
    ("16", "ExpertParallel.forward", "no g", "lesson01.ReduceFromTP.apply(partial_y, "
     "self.tp_group)", "partial_y", "2 --tp 2"),
    ("16", "shard_experts", "the experts of another rank",
     "lesson00.shard(full, 0, ep_group)", "lesson00.shard(full.flip(0), 0, ep_group)"),
    ("16", "ep_loss", "the mean of this rank's targets",
     "        targets = lesson00.all_reduce(targets, groups[axis])\n",
     "        targets = targets * groups[axis].size()\n"),
    ("16", "ep_norm", "replicas count on each rank",
     "copies *= groups[axis].size()", "copies *= 1"),
    ("16", "ep_norm", "experts count once per ep rank, as replicas do",
     "if groups[axis] not in sharded_over:", "if True:"),
    ("16", "split_batch", "dp ranks get the same rows",
     'lesson00.shard(x, 0, groups["dp"])', 'x[: len(x) // groups["dp"].size()]',
     "2 --ep 1"),
    # 08
    ("08", "tree_sum", "halves are not equal", "len(terms) // 2", "1"),
    ("08", "CopyToBlocks.backward", "no sum over ranks",
     "tree_all_reduce(tree_sum(list(partial_grads)), ctx.tp_group)",
     "tree_sum(list(partial_grads))"),
    ("08", "ReduceFromBlocks.backward", "a part of the gradient for each block",
     "(grad for _", "(grad / ctx.blocks for _"),
    ("08", "blocked_column_linears", "blocks in the wrong order",
     "weights = lesson00.split(linear.weight, 0, len(copies))",
     "weights = lesson00.split(linear.weight, 0, len(copies))[::-1]"),
    ("08", "same_bits_transformer", "attention's o_proj stays as it was",
     "        attn.o_proj = BlockedLinear(attn.o_proj, blocked_row_linear)\n", ""),
    ("08", "same_bits_transformer", "q, k and v stay as they were",
     "        attn.project_qkv = blocked_column_linears\n", ""),
    ("08", "tree_norm", "the norm is a plain sum of a rank's blocks",
     "tree_all_reduce(tree_sum(of_blocks), tp_group)",
     "lesson00.all_reduce(sum(of_blocks), tp_group)", "4 --dtype float64"),
    ("08", "digest", "a hash of the shapes only",
     "torch.as_tensor(x, dtype=torch.float64)",
     "torch.zeros_like(torch.as_tensor(x, dtype=torch.float64))",
     "test_a_hash_sees_one_bit"),
    # 15
    ("15", "units_of", "the last norm is in no unit", "[[model.norm, model.lm_head]]",
     "[[model.lm_head]]"),
    ("15", "flatten", "no zeros at the end of a vector",
     "F.pad(flat, (0, -len(flat) % parts))", "flat"),
    ("15", "views_of", "parameters are copies of parts of the vector",
     "x.numel()].view", "x.numel()].clone().view"),
    ("15", "ShardedStates", "the shard is a copy in every dtype",
     "copies_shard = False", "copies_shard = True",
     "test_a_shard_is_a_part_of_the_vector"),
    ("15", "ShardedStates.slice_of", "slices in the order of other ranks",
     '[self.groups["shard"].rank()]', '[-1 - self.groups["shard"].rank()]'),
    ("15", "ShardedStates.sum_gradients", "summed in the dtype of the parameters",
     "partial_flat = partial_flat.to(self.shard.dtype)",
     "partial_flat = partial_flat.to(self.flat.dtype)", "2 --bf16"),
    ("15", "ShardedGradients.on_gradient", "one gradient too early",
     "== len(self.parameters)", "== len(self.parameters) - 1"),
    ("15", "ShardedParameters.unshard", "gathers what is there already",
     "storage.nbytes() == 0", "storage.nbytes() >= 0"),
    ("15", "ShardedParameters.after_forward", "not freed after forward",
     "if self.keep", "if True"),
    ("15", "ShardedParameters.sum_gradients", "not freed after backward",
     "if not self.keep", "if self.keep"),
    ("15", "ZeroTraining.forward_backward", "a replica divides by its own targets",
     "lesson05.count_targets(micro_batches, data)",
     "sum((y != -100).sum() for _, y in micro_batches) * data.size()"),
    ("15", "ZeroTraining.update", "sums of gradients are kept for the next step",
     "    self.adamw.zero_grad(set_to_none=False)\n", ""),
    # 18
    ("18", "gather_in_pieces", "only the first piece", "i * x.shape[1]", "0"),
    ("18", "gather_in_pieces", "this rank's own slice comes first",
     "tp_group.rank() * s", "0"),
    ("18", "gather_in_pieces", "waits for all pieces before it multiplies one",
     "    multiply(x_BsD, tp_group.rank() * s)\n",
     "    for _, work in started:\n        work.wait()\n"
     "    multiply(x_BsD, tp_group.rank() * s)\n"),
    ("18", "start_scatters", "waits for a piece before the next product",
     "async_op=True)\n", "async_op=True)\n        work.wait()\n"),
    ("18", "finish_scatters", "pieces are joined along the batch",
     "torch.cat(sums, 1)", "torch.cat(sums, 0)"),
    ("18", "GatherThenMultiply.backward", "dL/dW from this rank's slice of x alone",
     "x_BSD = torch.cat(slices, 1)",
     "x_BSD = x_BsD.repeat(1, ctx.tp_group.size(), 1)"),
    ("18", "GatherThenMultiply.backward", "the second gather waits for itself",
     "    sums = start_scatters", "    gathered.wait()\n    sums = start_scatters"),
    ("18", "MultiplyThenScatter.backward", "dL/dW from one rank's dL/dy",
     "grad_BSD.flatten(0, 1).T @ x_BSf.flatten(0, 1)",
     "grad_BsD.flatten(0, 1).T @ x_BSf[:, : grad_BsD.shape[1]].flatten(0, 1)"),
    ("18", "apply_in_pieces", "the bias of the first linear for all",
     "output + linear.bias", "output + linears[0].bias",
     "test_linears_with_and_without_biases"),
    ("18", "RowParallelInPieces.forward", "no bias",
     "y_BsD if self.bias is None else y_BsD + self.bias", "y_BsD"),
    ("18", "transformer_in_pieces", "the head's product is not in pieces",
     "    model.lm_head.gather = gather\n", ""),
    ("18", "chunked_cross_entropy", "a mean of the pieces' means",
     "count = (target_BS != lesson02.IGNORE).sum()", "count = target_BS.numel()",
     "test_head_and_loss_in_pieces"),
]]
# fmt: on


def edited(mutant: Mutant) -> tuple[Path, str]:
    """A file and its text with the edit: NEW or RUN of a lesson, or a helper of it."""
    script = jobs.load(PATHS[mutant.lesson].stem)
    helper, _, name = mutant.target.partition(".")
    if hasattr(script, helper):
        target = attrgetter(mutant.target)(script)
    else:  # a definition that only a helper uses
        target = attrgetter(name)(jobs.load(helper))
    path = Path(inspect.getsourcefile(target))
    text = path.read_text("utf-8")
    source = inspect.getsource(target)
    new = text
    if "# ==== NEW" in text:
        new = re.split("# ==== (?:CARRIED|MEASURE)", text.partition("# ==== NEW")[2])[0]
    plain = textwrap.dedent(source)
    assert new.count(source) == 1, f"not in NEW or RUN: {mutant}"
    assert plain.count(mutant.old) == 1, f"not exactly once: {mutant}"
    depth = source.index(plain[0]) * " "
    changed = textwrap.indent(plain.replace(mutant.old, mutant.new), depth)
    return path, text.replace(source, changed)


def problem(lesson: str, by: str, edit: tuple = ()) -> str:
    """What a run, or a test, finds wrong with a lesson; edit: a file and its text."""
    with tempfile.TemporaryDirectory() as copy:
        for folder in ("tests", "tools", "bugs"):  # tests import from all of them
            shutil.copytree(jobs.ROOT / folder, Path(copy, folder))
        Path(copy, "beyond").mkdir()
        helpers = (jobs.ROOT / "beyond").glob("[a-z]*.py")  # course.py, and others
        for path in (*PATHS.values(), jobs.ROOT / "pyproject.toml", *helpers):
            shutil.copy(path, Path(copy, path.relative_to(jobs.ROOT)))
        script = Path(copy, PATHS[lesson].relative_to(jobs.ROOT))
        if edit:
            path, text = edit
            Path(copy, path.relative_to(jobs.ROOT)).write_text(text, "utf-8")
        if by.startswith("test_"):
            command = [sys.executable, "-m", "pytest", f"{TESTS[lesson]}::{by}"]
            done = subprocess.run(command, cwd=copy, capture_output=True, text=True)
            late = re.search(LATE, done.stdout)
            said = late[0] if late else (done.stdout + done.stderr).splitlines()[-1]
            return said if done.returncode else ""
        ranks, *flags = by.split()
        done = jobs.launch(script, int(ranks), *flags, limit=600)
    # A formula that does not hold (≠) is said; the verdict may be PASS.
    said = re.findall("^(?:FAIL|≠|error: ).*", done.text, re.M)
    if done.code == 0 and "PASS" in done.text:
        return said[0] if said else ""
    return said[0] if said else f"exit code {done.code}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("numbers", type=int, nargs="*", help="of mutants; all if none")
    parser.add_argument("--lesson", default="", help="two digits: its mutants alone")
    args, survivors = parser.parse_args(), []
    numbers = args.numbers or range(1, len(MUTANTS) + 1)
    chosen = {number: MUTANTS[number - 1] for number in numbers}
    chosen = {n: mutant for n, mutant in chosen.items() if args.lesson in mutant.lesson}
    edits = [(mutant.lesson, mutant.by, edited(mutant)) for mutant in chosen.values()]
    unedited = sorted({(lesson, by) for lesson, by, _ in edits})
    with ThreadPoolExecutor(2) as pool:
        for how, said in zip(unedited, pool.map(problem, *zip(*unedited))):
            print(*how, f"without an edit: {said or 'passes'}", flush=True)
            if said:
                print("FAIL  what is to catch edits fails without one")
                return 1
        for number, said in zip(chosen, pool.map(problem, *zip(*edits))):
            lesson, target, what, *_, by = chosen[number]
            if not said or re.search(LATE, said):
                said = "SURVIVED"
                survivors.append(number)
            print(f"{number:3}  {lesson}  {target}: {what} | {by}: {said}", flush=True)
    end = f"{len(survivors)} survived: {survivors}" if survivors else "all caught"
    print(f"{'FAIL' if survivors else 'PASS'}  {len(chosen)} mutants, {end}")
    return bool(survivors)


if __name__ == "__main__":
    try:
        code = main()
    finally:
        for mark in [*jobs.RUNNING]:
            jobs.end(mark)
    sys.exit(code)
