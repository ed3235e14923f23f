"""Script 10: checkpoints, saved under one mesh of ranks and loaded under another.

Files that are named by rank are useless to a mesh of another shape. Here each rank
writes its parts with their place in the full tensors, and any other mesh reads the
parts that it needs. A checkpoint gets its final name after its last byte was written,
so a checkpoint that a load can see is complete.

Run it on 1, 2, 4 or 8 ranks (3 and 6 take more heads, so they train another model):

    torchrun --standalone --nproc_per_node=2 beyond/10_checkpoints.py

What you will see: mesh A trains the model of lesson 05 and saves after each step. Then
A and two other meshes load the checkpoint from halfway. Weights and AdamW's moments
must be bitwise those that were saved; losses, gradient norms, parameters and moments
must match one process that was never interrupted. At the end: what is refused.

Exercises (answers: notebooks/10_checkpoints.ipynb, section 4): save with --save ck
--steps 2, resume with --load ck --steps 4 on another number of ranks; kill a rank of
torchrun --max-restarts=1 … --save ck (which step is trained again?); flip one byte of a
file in ck; let state_to_save leave out exp_avg_sq (which check fails first?).

How to read this file: NEW is the lesson, RUN trains and prints. Bugs: tools/bug.py.
Short of time? Read to_dtensor, save_checkpoint and load_checkpoint.

Shapes: B batch, S sequence, D hidden, F MLP width (4·D), N heads, K key/value heads,
    H = D/N head size, V vocabulary, L layers, T ranks in a TP group, M micro-batches, Ψ
    parameters of the model, e bytes per element. PyTorch calls a tensor that every rank
    holds in full Replicate(), and one that is split along a dim Shard(dim).

Sources: docs.pytorch.org, torch.distributed.checkpoint; ZeRO, arXiv:1910.02054;
    ByteCheckpoint, arXiv:2407.20143 (one format for every mesh).
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import re
import shutil
import sys
import tempfile
import time
import zlib
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

try:
    from course import lesson00, lesson01, lesson02, lesson03, lesson04, lesson05
    from flat_adamw import MOMENTS, FlatAdamW, FlatTraining
    from harness import gather_objects, marked
    from meshes import choose_meshes, fill_sizes_for, flag_for
    from rows_of_runs import count_equal
    from save_folder import check_folder, folder_path, rows_of_files
    from scratch_disk import full_disk, temporary_folder
    from tied_stages import embedding_group
except ModuleNotFoundError as error:  # a copy of this file, without its repository
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(60)  # rank 0 says why, and torchrun ends all
    print(f"error: this script imports the course's lessons: {error}", file=sys.stderr)
    sys.exit(2)

# ==== NEW in 10: saved under one mesh, loaded under another
# Read lines 76 to 321, in about 25 minutes. Stop at RUN.

# From earlier lessons: sharding_of(p) is (dim, group), or None of a replicated p (01);
# p.rows is the number of rows of a split vocabulary without spare ones (03).
# FlatTraining is lesson 05's MeshTraining with FlatAdamW as its optimizer: AdamW on one
# vector of all parameters of the rank. unflatten makes a tensor per parameter of such a
# vector, local_slice does the reverse. MOMENTS: exp_avg and exp_avg_sq.

COMPLETE = "complete.json"  # the last file of a checkpoint


# ---- What is saved: tensors that know their place


def to_dtensor(x: Tensor, p: nn.Parameter, tp_mesh: DeviceMesh) -> DTensor:
    """Return this rank's shard as a part of the full tensor: a DTensor.

    A DTensor knows the full shape, and which rows or columns of it this rank holds.
    Rows that only pad the vocabulary are left out: for another T their number differs.

    Args:
        x: a tensor that is sharded as the parameter p is: p itself, or a moment of it.
        tp_mesh: the TP group, in the form that DTensor takes.
    Shapes: p.weight of up_proj, T = 2: [F/2, D] → global [F, D], Shard(0).
    Communication: none. The memory is shared with x, so that a load can fill it.
    """
    x = x.detach()
    full_shape = list(x.shape)
    placement = Replicate()
    if lesson01.sharding_of(p):  # over the TP group
        dim, _ = lesson01.sharding_of(p)
        placement = Shard(dim)
        full_shape[dim] *= tp_mesh.size()
    if hasattr(p, "rows"):
        first_row = tp_mesh.get_local_rank() * len(x)
        x = x[: max(0, p.rows - first_row)]
        full_shape[0] = p.rows
    stride = torch.empty(full_shape, device="meta").stride()
    full_shape = torch.Size(full_shape)
    return DTensor.from_local(
        x, tp_mesh, [placement], run_check=False, shape=full_shape, stride=stride
    )


def moments_of(optimizer: FlatAdamW) -> dict[str, dict[str, Tensor]]:
    """AdamW's moments of this rank's parameters: exp_avg → name → tensor.

    Communication: with ZeRO two all-gathers over dp of all parameters of the rank, so
        that every replica has both moments in full. At real sizes they do not fit: a
        real system saves the slices, each with its place in the vector.
    """
    adam = optimizer.adamw.state.get(optimizer.vector, {})  # empty before step 1
    moments = {}
    for kind in MOMENTS:
        if kind in adam:
            moments[kind] = optimizer.unflatten(adam[kind])
    return moments


def state_to_save(training: FlatTraining, moments: dict) -> dict[str, DTensor]:
    """Name each tensor of this rank: weight/norm.bias, exp_avg/norm.bias, …

    Several ranks hold the same part: replicas over dp, TP ranks of a replicated
    parameter, and the first and last stage of a tied weight. On all of them it has the
    same name and place, so dcp writes it once, and on a load fills all of them.
    """
    device = training.pipeline.like.device.type
    tp_mesh = DeviceMesh.from_group(training.groups["tp"], device)
    state = {}
    for name, p in training.parameters.items():
        state[f"weight/{name}"] = to_dtensor(p, p, tp_mesh)
    for kind, tensors in moments.items():
        for name, x in tensors.items():
            p = training.parameters[name]
            state[f"{kind}/{name}"] = to_dtensor(x, p, tp_mesh)
    return state


def parts_in(path: Path) -> list[dict]:
    """All parts of tensors in a checkpoint, from dcp's index, the file .metadata."""
    metadata = dcp.FileSystemReader(path).read_metadata()
    parts = []
    for name, tensor in metadata.state_dict_metadata.items():
        for chunk in tensor.chunks:
            place = metadata.storage_data[MetadataIndex(name, chunk.offsets)]
            part = {"tensor": name, "full": list(tensor.size)}
            part["shape"] = list(chunk.sizes)
            part["file"] = place.relative_path
            part["bytes"] = math.prod(chunk.sizes) * tensor.properties.dtype.itemsize
            parts.append(part)
    return parts


# ---- Save: complete, or not at all


def save_checkpoint(folder: Path, step: int, training, about: dict):
    """Write folder/step_NNNNNN atomically.

    All ranks write into part_NNNNNN, and rank 0 renames it when all are done. An
    interrupted save leaves only a part_NNNNNN folder, which no load considers.

    Args:
        folder: one that all ranks share: on several machines a network file system.
        about: the mesh, and the settings that a run needs in order to resume.
    Raises: OSError with the reason on every rank if one of them cannot write.
    """
    part = folder / f"part_{step:06}"
    is_first = dist.get_rank() == 0
    if is_first:
        shutil.rmtree(part, ignore_errors=True)  # of a save that was interrupted
    state = state_to_save(training, moments_of(training.optimizer))
    try:
        dcp.save(state, checkpoint_id=part)
    except CheckpointException as error:
        reason = reason_not_written(error, part, state)
        raise OSError(f"step {step} is not saved: {reason}") from None
    if is_first:
        files = {file.name: checksum(file) for file in part.iterdir()}
        contents = dict(about, step=step, files=files)
        (part / COMPLETE).write_text(json.dumps(contents))
        part.rename(folder / f"step_{step:06}")
    dist.barrier()  # from here on every rank can load it


def checksum(file: Path) -> int:
    """CRC-32 of a file's bytes."""
    return zlib.crc32(file.read_bytes())


def reason_not_written(error: CheckpointException, part: Path, state: dict) -> str:
    """The system's reason, found by writing again: dcp's message does not have it.

    Communication: a gather of one string; all ranks must call it.
    """
    nbytes_of_rank = sum(x.to_local().nbytes for x in state.values())
    reason = ""
    try:
        with tempfile.TemporaryFile(dir=part) as file:
            file.write(bytes(nbytes_of_rank))
    except OSError as system_error:
        reason = system_error.strerror
    for rank, text in enumerate(gather_objects(reason)):
        if text:
            return f"rank {rank}, {part}: {text}"
    return failure_in(error)


def failure_in(error: CheckpointException) -> str:
    """The first rank's failure; dcp's own text has many lines, for all of them."""
    rank, (failure, _) = next(iter(error.failures.items()))
    text = str(failure) or "no message"
    return f"rank {rank}: {type(failure).__name__}: {text}"


# ---- Load: on any mesh


def load_checkpoint(path: Path, step: int, training: FlatTraining) -> None:
    """Fill this rank's parameters and moments from a checkpoint of any mesh.

    Raises: OSError with the reason on every rank if a file cannot be read.
    """
    optimizer = training.optimizer
    moments = {}
    for kind in MOMENTS:
        moments[kind] = {}  # dcp fills what exists; spare rows, in no file, stay 0
        for name, p in optimizer.parameters.items():
            moments[kind][name] = torch.zeros_like(p)
    state = state_to_save(training, moments)
    try:
        dcp.load(state, checkpoint_id=path)  # in place
    except CheckpointException as error:
        raise OSError(f"{path} cannot be read: {failure_in(error)}") from None
    # AdamW updates its own vector of the weights, so the vector must get them as well.
    optimizer.vector.data = optimizer.local_slice(training.parameters)
    adam = {}
    for kind in MOMENTS:
        adam[kind] = optimizer.local_slice(moments[kind])
    # AdamW's bias correction uses the step number: another one scales the updates.
    adam["step"] = torch.tensor(float(step))
    optimizer.adamw.state[optimizer.vector] = adam


def full_state(training: FlatTraining) -> dict[str, Tensor]:
    """All that the next step depends on, unsharded, to compare it between meshes.

    Names: weight/norm.bias, vector/norm.bias, exp_avg/norm.bias, …, step/of AdamW.
    Communication: the report's own; all ranks must call it.
    """
    optimizer = training.optimizer
    # AdamW has its own vector of the weights, and moments, of what this rank owns.
    kinds = {"weight": training.parameters}
    kinds["vector"] = optimizer.unflatten(optimizer.vector)
    kinds.update(moments_of(optimizer))
    state = {}
    for kind, tensors in kinds.items():
        for name, x in lesson05.gather_stages(training, tensors).items():
            state[f"{kind}/{name}"] = x.clone()
    adam = optimizer.adamw.state.get(optimizer.vector, {})
    state["step/of AdamW"] = adam.get("step", torch.zeros(())).clone()
    return state


def latest_checkpoint(folder: Path) -> Path | None:
    """The checkpoint of the last step; a part_NNNNNN is none."""
    return max(folder.glob("step_" + 6 * "[0-9]"), default=None)


def verify_checkpoint(path: Path, settings: dict) -> dict:
    """Return what complete.json says, if a run with these settings can resume from it.

    Raises: ValueError that says what is wrong with the files, or which setting differs.
    """
    try:
        contents = json.loads((path / COMPLETE).read_text())
        if not isinstance(contents, dict) or not isinstance(contents["files"], dict):
            raise ValueError(f"{COMPLETE} is not what save_checkpoint writes")
        for name, expected in contents["files"].items():
            if checksum(path / name) != expected:
                raise ValueError(f"{name} is damaged: its checksum has changed")
        for name, here in dict(settings, step=int(path.name[5:])).items():
            there = contents[name]
            if there != here and name == "text":
                text = "the docstring, which is the training text, has been edited"
                raise ValueError(f"{text}; undo that, or train without --load")
            if there != here:
                text = f"{name} is {there} in the checkpoint, {here} in this run"
                raise ValueError(f"{text}; take {flag_for(name, there)}")
        contents["mesh"]  # shown when training resumes
    except OSError as error:
        file = Path(error.filename).name
        raise ValueError(f"{file}: {error.strerror}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{COMPLETE} is damaged: {error}") from None
    except KeyError as error:
        raise ValueError(f"{COMPLETE} has no {error}") from None
    return contents


# Restart after a lost rank. `torchrun --max-restarts=1 … --save ck` starts all ranks
# again when one is lost. `sizes` sees that it is a restart and loads from ck. Steps
# after the latest complete checkpoint are trained again. The batches follow from seed
# and step, so they are the same ones. A real data loader has a position to be saved.


# ==== RUN


class MeshRun(NamedTuple):
    training: FlatTraining | None
    values: dict[str, dict]  # batches, losses and norms: each by name of the step
    halfway: dict[str, Tensor]  # the full state as it was saved, or loaded
    end: dict[str, Tensor]  # the full state after the last step


def main(args, report: lesson00.Report) -> None:
    """Train and save on mesh A, resume on other meshes, compare with one process."""
    # A wrong load causes wrong norms and losses: name it before them.
    lesson00.CAUSES[1:1] = ["saved", "loaded", "batches"]
    batches = []
    for tokens_BS, target_BS in lesson02.make_batches(__doc__, args, args.steps):
        batches.append(lesson04.pad_batch(tokens_BS, target_BS, args.multiple))
    args.seq_len = report.size["S"]  # from here on every T divides it
    # The same seed on every rank, so all have the same full model before they shard it.
    full = lesson03.make_tied(args)
    report.size["Ψ"] = sum(p.numel() for p in full.parameters())

    show_meshes(report, args)
    runs = {"one process": train_uninterrupted(full, batches, args)}
    # Without --save the checkpoints go to a folder that is removed at the end.
    with nullcontext(args.save) if args.save else temporary_folder() as folder:
        first = args.meshes[0]
        runs["A"] = train_on(
            first, full, batches, args, args.begin, args.checkpoint, folder
        )
        path = folder / f"step_{args.halfway:06}"
        show_contents(report, path, runs["A"].training, args)
        for mesh in args.meshes:
            name = "A again" if mesh.name == "A" else mesh.name
            with report.guard(name):
                runs[name] = train_on(mesh, full, batches, args, args.halfway, path)
        show_loaded(report, runs)
        report.section("Training resumed, compared with one process that never stopped")
        show_steps(report, runs, ["one process", "A"], args.begin, args.halfway, args)
        if args.halfway < args.steps:
            show_steps(report, runs, list(runs), args.halfway, args.steps, args)
        show_states(report, runs, args)
        show_interrupted(report, path, runs["A"].training, args)


def sizes(args) -> dict[str, int]:
    """The letters of the legend. ValueError for a wrong flag or checkpoint."""
    args.schedule = "1f1b"
    args.ragged = False
    args.dropout = 0.0
    if not (args.pp or args.dp or args.tp) and args.ranks % 2 == 0:
        args.tp = 2  # so that tensors are sharded
    lesson05.fill_mesh(args)
    args.left_out = []
    args.meshes = fill_sizes_for(args, choose_meshes(args))
    args.mesh = args.meshes[0].text()
    check_checkpoints(args)
    size = lesson02.transformer_sizes(args)
    args.multiple = math.lcm(*[mesh.tp for mesh in args.meshes])  # S must be one of it
    size["S"] += -size["S"] % args.multiple  # pad_batch does it
    return dict(size, M=args.microbatches)


def make_parser() -> argparse.ArgumentParser:
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    add = parser.add_argument
    text = "by default a size that fits the meshes"
    flags = "pp dp tp microbatches layers batch-size seq-len hidden heads kv-heads"
    for flag in flags.split():
        add(f"--{flag}", type=lesson00.positive, help=text)
    add("--vocab-size", type=lesson00.positive, default=257)
    add("--steps", type=lesson00.positive, default=4)
    add("--zero", action="store_true", help="mesh A shards the moments, others do not")
    add("--tie", action="store_true", help="embedding and head share their weight")
    add("--clip", type=float, default=1.0, help="largest norm of a gradient (1)")
    text = "save here after each step; a restart by torchrun resumes from here"
    add("--save", type=folder_path, metavar="DIR", help=text)
    text = "mesh A resumes from here; only from sources you trust: it has a pickle"
    add("--load", type=folder_path, metavar="DIR", help=text)
    return parser


def check_checkpoints(args) -> None:
    """Find out from which step this run starts. ValueError if it cannot."""
    names = "hidden heads kv_heads layers batch_size seq_len vocab_size seed dtype tie"
    args.settings = {name: getattr(args, name) for name in names.split()}
    args.settings["clip"] = args.clip
    args.settings["text"] = zlib.crc32(__doc__.encode())  # what it trains on
    args.begin = 0
    args.checkpoint = None
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    if restarts > 0 and args.save and latest_checkpoint(args.save):
        args.load = args.save  # a rank was lost
    if args.load:
        choose_checkpoint(args)
    if args.save:
        check_folder(args)
    args.halfway = args.begin + max(1, (args.steps - args.begin) // 2)


def choose_checkpoint(args) -> None:
    """Take the latest checkpoint in --load."""
    path = latest_checkpoint(args.load)
    if path is None:
        text = f"--load {args.load}: no complete checkpoint step_NNNNNN in this folder"
        if re.fullmatch(r"(step|part)_\d{6}", args.load.resolve().name):
            text += f"; take the folder above it: --load {args.load.parent}"
        raise ValueError(text)
    try:
        contents = verify_checkpoint(path, args.settings)
    except ValueError as error:
        raise ValueError(f"--load {path}: cannot resume: {error}") from None
    args.checkpoint = path
    args.begin = contents["step"]
    args.made_by = contents["mesh"]
    if args.begin >= args.steps:
        text = f"it is of step {args.begin}, and the last one is --steps {args.steps}"
        more = args.begin + args.steps
        raise ValueError(f"--load {path}: {text}; take --steps {more}")


# ---- Training


def train_uninterrupted(full: lesson02.Transformer, batches: list, args) -> MeshRun:
    """The reference: one process, all steps, by lesson 02's loop."""
    model = copy.deepcopy(full)
    run = lesson02.train_transformer("one process", model, batches, args)
    end = {}
    for name, p in model.named_parameters():
        end[f"weight/{name}"] = p.detach()
        for kind in MOMENTS:
            end[f"{kind}/{name}"] = run.optimizer.state[p][kind]
    values = {"batches": {}, "losses": run.losses, "norms": run.norms}
    for step, (tokens_BS, _) in enumerate(batches, 1):
        values["batches"][f"batch of step {step}"] = int(tokens_BS.sum())
    return MeshRun(None, values, {}, end)


def train_on(mesh, full, batches, args, begin=0, load=None, folder=None) -> MeshRun:
    """Train a new model on a mesh, after step `begin`. All ranks must call it.

    Args:
        load: the checkpoint of step `begin`, or None.
        folder: where each step is saved, or None.
    """
    mesh_args = copy.copy(args)
    vars(mesh_args).update(mesh.sizes(), zero=mesh.zero)
    groups = lesson05.make_mesh(mesh.sizes(), args.timeout)
    groups["embedding"] = embedding_group(mesh.sizes(), args.timeout)
    training = FlatTraining(full, groups, mesh_args)
    about = dict(args.settings, mesh=mesh.text())
    halfway = {}
    if load is not None:
        load_checkpoint(load, begin, training)
        halfway.update(full_state(training))

    def after_step(step: int) -> None:
        if folder is not None:
            save_checkpoint(folder, step, training, about)
        if step == args.halfway:
            halfway.update(full_state(training))

    values = train_steps(training, batches, begin, after_step)
    return MeshRun(training, values, halfway, full_state(training))


def train_steps(training, batches: list, begin: int, after_step=None):
    """Train on all batches after step `begin`. Return batches, losses and norms."""
    values = {"batches": {}, "losses": {}, "norms": {}}
    for step in range(begin + 1, len(batches) + 1):
        batch = batches[step - 1]
        loss, norm = training.train_step(batch)
        for axis in ("dp", "pp"):  # replicas' parts add up; only the last stage has one
            loss = lesson00.all_reduce(loss, training.groups[axis])
        # A sum of token ids shows which batch it was.
        values["batches"][f"batch of step {step}"] = int(batch[0].sum())
        values["losses"][f"loss, step {step}"] = loss.item()
        values["norms"][f"‖g‖, step {step}"] = norm
        if after_step is not None:
            after_step(step)
    return values


# ---- The sections of the output, in order


def show_meshes(report: lesson00.Report, args) -> None:
    """Which mesh saves, and which ones load."""
    rows = []
    for mesh in args.meshes:
        row = {"mesh": mesh.name, "pp": mesh.pp, "dp": mesh.dp, "tp": mesh.tp}
        row["AdamW's moments"] = "as the weights"
        if mesh.zero and mesh.dp > 1:
            row["AdamW's moments"] = "sharded over dp"
        row["what it does"] = f"loads step {args.halfway}, trains to {args.steps}"
        if mesh.name == "A":
            row["what it does"] = f"trains {args.begin + 1} to {args.steps}, saves each"
        rows.append(row)
    report.section("The meshes")
    report.table(rows)
    if args.begin:
        report.say(f"Mesh A resumes from {args.checkpoint}, saved by {args.made_by}.")
    for text in args.left_out:
        report.say(text)
    report.say(f"'A again' is mesh A once more, from the saved step {args.halfway}.")


def show_contents(report, path: Path, training: FlatTraining, args) -> None:
    """Which parts of which tensors are in which file."""
    parts = parts_in(path)
    report.section(f"What is in {path.name}, which mesh A saved")
    show_examples(report, parts, training)
    rows, nbytes = rows_of_files(parts, path)
    # A weight and two moments per parameter.
    off = nbytes - lesson00.evaluate("3·Ψ·e", report.size)
    holds = report.check("saved: bytes 3·Ψ·e", abs(off), text=f"{off:,} bytes too many")
    rows[-1]["elements, bytes"] = marked(rows[-1]["elements, bytes"], holds)
    report.say("Weights and both moments of Ψ parameters: 3·Ψ·e bytes of elements.")
    report.table(rows)
    report.say("Also .metadata, which says what is where, and complete.json.")
    for step in range(args.begin + 1, args.steps + 1):
        is_left = (path.parent / f"part_{step:06}").exists()
        report.check(f"saved: no part of step {step} is left", float(is_left))


# Sharded by rows, sharded by columns, replicated, and padded by TP.
EXAMPLES = ["layers.0.mlp.up_proj", "layers.0.mlp.down_proj", "norm", "embed_tokens"]


def show_examples(report, parts: list[dict], training: FlatTraining) -> None:
    """How four of the weights are sharded on mesh A, and what is written of them."""
    state = state_to_save(training, {})
    placements = {name: repr(x.placements[0]) for name, x in state.items()}
    for of_rank in gather_objects(placements):  # each stage has its own layers
        placements.update(of_rank)
    rows = []
    for name in [f"weight/{module}.weight" for module in EXAMPLES]:
        written = [part for part in parts if part["tensor"] == name]
        if not written:  # your edit has given it another name
            continue
        shapes = [str(part["shape"]) for part in written]
        row = {"tensor": name, "full": str(written[0]["full"])}
        row["placement"] = placements[name]
        row["parts written"] = " ".join(shapes)
        if len(shapes) > 2:  # a line has 88 columns
            row["parts written"] = f"{shapes[0]} … {shapes[-1]}"
        rows.append(row)
    report.table(rows)


def show_loaded(report: lesson00.Report, runs: dict[str, MeshRun]) -> None:
    """Right after loading, every rank must have bitwise what was saved."""
    # All ranks gathered all tensors on each mesh, so every rank compares everything.
    saved = runs["A"].halfway
    resumed = [run for run in runs if run not in ("one process", "A")]
    rows = []
    for run in resumed:
        got = runs[run].halfway
        rows.append(count_equal(report, "loaded", run, got, saved, kind_of))
    report.section("Loaded, before the next step: tensors that are bitwise as saved")
    report.say("vector = the weights in AdamW's own vector; step = its step number")
    report.table(rows)
    # The vector equals the weights. Had it been compared with them by mistake, a load
    # that leaves it out would not be noticed: so change it, and look.
    unseen = float(not sees_vector(runs["A"].training))
    report.check("loaded: a change of AdamW's vector is seen", unseen)


def sees_vector(training: FlatTraining) -> bool:
    """Does full_state see it if AdamW's vector differs from the weights?"""
    vector = training.optimizer.vector.data
    kept = vector.clone()
    before = full_state(training)
    vector += 1
    after = full_state(training)
    vector.copy_(kept)
    names = [name for name in before if kind_of(name) == "vector"]
    return not any(torch.equal(before[name], after[name]) for name in names)


def show_steps(report, runs: dict, columns, begin: int, end: int, args) -> None:
    """Batches, losses and gradient norms after step `begin`, up to step `end`."""
    report.say(f"Steps {begin + 1} to {end}:")
    for key in ("batches", "losses", "norms"):
        values = {}
        for run in columns:
            of_run = runs[run].values[key]
            # Every name ends with the number of its step.
            names = [name for name in of_run if begin < int(name.split()[-1]) <= end]
            values[run] = {name: of_run[name] for name in names}
        allowed = lesson00.ALLOWED_LOSS if key == "losses" else lesson00.ALLOWED
        report.compare(key, values, allowed[args.dtype])


def show_states(report: lesson00.Report, runs: dict[str, MeshRun], args) -> None:
    """Parameters and moments after the last step; A again is bitwise equal to A."""
    reference = runs["one process"].end
    allowed = lesson00.ALLOWED[args.dtype]
    rows = []
    for run, mesh_run in runs.items():
        norms = {"weight": 0.0, "exp_avg": 0.0, "exp_avg_sq": 0.0}
        wrong = set()
        worst = 0.0
        for name, expected in reference.items():
            kind = kind_of(name)
            x = mesh_run.end.get(name, torch.empty(0))
            norms[kind] = math.hypot(norms[kind], x.double().norm())
            if run == "one process":
                continue  # it is not compared with itself
            checked = "moments" if kind in MOMENTS else "parameters"
            diff = report.agree(f"{checked}: {name}, {run}", x, expected, allowed)
            if not diff <= allowed:
                wrong.add(kind)
            worst = max(worst, diff)
        row = {"run": run}
        for kind, norm in norms.items():
            row[kind] = marked(f"{norm:#.7g}", kind not in wrong)
        rows.append(row | {"diff": f"{worst:.1e}"})
    report.say(f"After step {args.steps}: norms, and the largest difference:")
    report.table(rows)
    if "A again" not in runs:
        return
    # The same mesh adds in the same order, so not even rounding errors may differ.
    got = runs["A again"].end
    row = count_equal(report, "bitwise", "A again", got, runs["A"].end, kind_of)
    report.say("On the same mesh the end is bitwise the one without a load:")
    report.table([row])


def kind_of(name: str) -> str:
    """exp_avg/layers.0.mlp.up_proj.weight → exp_avg."""
    return name.partition("/")[0]


def show_interrupted(report, path: Path, training: FlatTraining, args) -> None:
    """Interrupt a save: the latest checkpoint must stay the one before."""
    step = args.halfway + 1
    with temporary_folder(path.parent) as scratch:
        if dist.get_rank() == 0:
            shutil.copytree(path, scratch / path.name)
        gather_objects("no rank goes on before the copy is there")
        error = interrupt_save(scratch, step, training)
        left = sorted(file.name for file in scratch.iterdir())
        latest = latest_checkpoint(scratch).name
        gather_objects("the folder is not removed before all have looked")
    report.section(f"A save of step {step} that is interrupted")
    # No disk is full here: the last rank may not write more than 1,000 bytes.
    report.say(error.replace(str(scratch), "…"))
    report.say(f"It leaves {', '.join(left)}; the latest checkpoint is {latest}.")
    report.check("interrupted: the save raises OSError", float(not error))
    moved = float(latest != path.name)
    report.check("interrupted: the latest checkpoint stays", moved)


def interrupt_save(folder: Path, step: int, training: FlatTraining) -> str:
    """Save while the last rank's disk seems full. Return the error's text."""
    try:  # all ranks raise, although one of them cannot write
        with full_disk(rank=dist.get_world_size() - 1):
            save_checkpoint(folder, step, training, {})
    except OSError as error:
        return str(error)
    return ""


if __name__ == "__main__":
    parser = make_parser()
    lesson00.launch(main, sizes, parser)
