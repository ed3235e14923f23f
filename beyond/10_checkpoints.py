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

How to read this file: NEW is the lesson, RUN trains and prints, BREAK IT lists bugs for
`--break NAME`. Short of time? Read to_dtensor, save_checkpoint and load_checkpoint.

Shapes: B batch, S sequence, D hidden, F MLP width (4·D), N heads, K key/value heads,
    H = D/N head size, V vocabulary, L layers, T ranks in a TP group, M micro-batches, n
    parameters of the model, e bytes per element. PyTorch calls a tensor that every rank
    holds in full Replicate(), and one that is split along a dim Shard(dim).

Sources: docs.pytorch.org, torch.distributed.checkpoint; ZeRO, arXiv:1910.02054;
    ByteCheckpoint, arXiv:2407.20143 (one format for every mesh).
"""

from __future__ import annotations

import copy
import math
import resource
import shutil
import tempfile
import zlib
from contextlib import contextmanager, nullcontext
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

# ==== NEW in 10: saved under one mesh, loaded under another

# From earlier lessons: COMM records in which call this rank waits (00); shardings_of(p)
# says how a parameter was split, ((dim, group), …), and is empty if it is replicated
# (01); p.rows is the number of rows without padding, of a split vocabulary (03).
# MeshTraining is one rank of a model in training on a mesh pp × dp × tp, and its
# optimizer is a FlatAdamW: AdamW on one vector of all parameters of the rank. unflatten
# makes a tensor per parameter of such a vector, local_slice does the reverse. MOMENTS
# are AdamW's names for its moments: exp_avg, exp_avg_sq (05).

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
    for dim, _ in shardings_of(p):  # one sharding at most, over the TP group
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


def state_to_save(training: MeshTraining, moments: dict) -> dict[str, DTensor]:
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


def save_checkpoint(folder: Path, step: int, training: MeshTraining, about: dict):
    """Write folder/step_NNNNNN atomically.

    All ranks write into part_NNNNNN, and rank 0 renames it when all are done. An
    interrupted save leaves only a part_NNNNNN folder, which no load considers.

    Args:
        folder: one that all ranks share: on several machines a network file system.
        about: the mesh, and the settings that a run needs in order to resume.
    Raises: OSError with the reason on every rank if one of them cannot write.
    """
    part = folder / f"part_{step:06}"
    all_ranks = list(range(dist.get_world_size()))
    is_first = dist.get_rank() == 0
    if is_first:
        shutil.rmtree(part, ignore_errors=True)  # of a save that was interrupted
    state = state_to_save(training, moments_of(training.optimizer))
    try:
        with COMM.blocking(f"saving of step {step}", all_ranks):
            dcp.save(state, checkpoint_id=part)
    except CheckpointException as error:
        reason = reason_not_written(error, part, state)
        raise OSError(f"step {step} is not saved: {reason}") from None
    if is_first:
        files = {file.name: checksum(file) for file in part.iterdir()}
        contents = dict(about, step=step, files=files)
        (part / COMPLETE).write_text(json.dumps(contents))
        part.rename(folder / f"step_{step:06}")
    with COMM.blocking(f"end of saving step {step}", all_ranks):
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


def load_checkpoint(path: Path, step: int, training: MeshTraining) -> None:
    """Fill this rank's parameters and moments from a checkpoint of any mesh.

    Raises: OSError with the reason on every rank if a file cannot be read.
    """
    optimizer = training.optimizer
    moments = {}
    for kind in MOMENTS:  # dcp fills tensors, so they must exist before the load
        moments[kind] = {}
        for name, p in optimizer.parameters.items():
            moments[kind][name] = torch.zeros_like(p)
    state = state_to_save(training, moments)
    all_ranks = list(range(dist.get_world_size()))
    try:
        with COMM.blocking(f"loading of step {step}", all_ranks):
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


def full_state(training: MeshTraining) -> dict[str, Tensor]:
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
        for name, x in gather_stages(training, tensors).items():
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
                raise ValueError(text)
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
# again when one is lost. parse_args sees that it is a restart and loads from ck. Steps
# after the latest complete checkpoint are trained again. The batches follow from seed
# and step, so they are the same ones. A real data loader has a position to be saved.


# ==== RUN


class Mesh(NamedTuple):
    name: str  # of the column in the tables
    pp: int
    dp: int
    tp: int
    zero: bool  # shard AdamW's moments over dp

    def sizes(self) -> dict[str, int]:
        return {"pp": self.pp, "dp": self.dp, "tp": self.tp}

    def text(self) -> str:
        return " × ".join(f"{axis} {ranks}" for axis, ranks in self.sizes().items())


class MeshRun(NamedTuple):
    training: MeshTraining | None
    values: dict[str, dict]  # batches, losses and norms: each by name of the step
    halfway: dict[str, Tensor]  # the full state as it was saved, or loaded
    end: dict[str, Tensor]  # the full state after the last step


def main(args, report: Report) -> None:
    """Train and save on mesh A, resume on other meshes, compare with one process."""
    # A wrong load causes wrong norms and losses: name it before them.
    CAUSES_FIRST[1:1] = ["saved", "loaded", "batches"]
    multiple = math.lcm(*[mesh.tp for mesh in args.meshes])
    batches = []
    for tokens_BS, target_BS in make_batches(__doc__, args, args.steps):
        batches.append(pad_batch(tokens_BS, target_BS, multiple))
    args.seq_len = batches[0][0].shape[1]  # from here on every T divides it
    # The same seed on every rank, so all have the same full model before they shard it.
    full = make_tied(args)
    size = dict(sizes_of(args), T=args.tp, M=args.microbatches)
    size["n"] = sum(p.numel() for p in full.parameters())
    report.begin(args.meshes[0].sizes(), size)

    show_meshes(report)
    runs = {"one process": train_uninterrupted(full, batches, args)}
    # Without --save the checkpoints go to a folder that is removed at the end.
    with nullcontext(args.save) if args.save else temporary_folder() as folder:
        first = args.meshes[0]
        runs["A"] = train_on(
            first, full, batches, args, args.begin, args.checkpoint, folder
        )
        path = folder / f"step_{args.halfway:06}"
        show_contents(report, path, runs["A"].training, size)
        for mesh in args.meshes:
            name = "A again" if mesh.name == "A" else mesh.name
            with report.column(name):
                runs[name] = train_on(mesh, full, batches, args, args.halfway, path)
        show_loaded(report, runs)
        report.section("Training resumed, compared with one process that never stopped")
        show_steps(report, runs, ["one process", "A"], args.begin, args.halfway)
        if args.halfway < args.steps:
            columns = ["one process", "A"] + resumed(runs)
            show_steps(report, runs, columns, args.halfway, args.steps)
        show_states(report, runs)
        show_interrupted(report, path, runs["A"].training)


@contextmanager
def temporary_folder(parent: Path | None = None):
    """A folder that all ranks use, and that is removed at the end."""
    # Rank 0 creates it, and all get its name.
    name = ""
    if dist.get_rank() == 0:
        name = tempfile.mkdtemp(prefix="scratch_", dir=parent)
    folder = Path(gather_objects(name)[0])
    try:
        yield folder
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)


# ---- Training


def train_uninterrupted(full: Transformer, batches: list, args) -> MeshRun:
    """The reference: one process, all steps, by lesson 02's loop."""
    model = copy.deepcopy(full)
    run = train_transformer("one process", model, batches, args)
    end = {}
    for name, p in model.named_parameters():
        end[f"weight/{name}"] = p.detach()
        for kind in MOMENTS:
            end[f"{kind}/{name}"] = run.optimizer.state[p][kind]
    values = {"batches": {}, "losses": run.losses, "norms": run.norms}
    for step, (tokens_BS, _) in enumerate(batches, 1):
        values["batches"][f"batch of step {step}"] = int(tokens_BS.sum())
    return MeshRun(None, values, {}, end)


def train_on(
    mesh: Mesh, full: Transformer, batches: list, args, begin=0, load=None, folder=None
) -> MeshRun:
    """Train a new model on a mesh, after step `begin`. All ranks must call it.

    Args:
        load: the checkpoint of step `begin`, or None.
        folder: where each step is saved, or None.
    """
    mesh_args = copy.copy(args)
    vars(mesh_args).update(mesh.sizes(), zero=mesh.zero)
    training = MeshTraining(full, make_mesh(mesh.sizes(), args.timeout), mesh_args)
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


def train_steps(training: MeshTraining, batches: list, begin: int, after_step=None):
    """Train on all batches after step `begin`. Return batches, losses and norms."""
    values = {"batches": {}, "losses": {}, "norms": {}}
    for step in range(begin + 1, len(batches) + 1):
        batch = batches[step - 1]
        loss = training.gradients(batch)
        norm = training.update()
        for axis in ("dp", "pp"):  # replicas' parts add up; only the last stage has one
            loss = all_reduce(loss, training.groups[axis])
        # A sum of token ids shows which batch it was.
        values["batches"][f"batch of step {step}"] = int(batch[0].sum())
        values["losses"][f"loss, step {step}"] = loss.item()
        values["norms"][f"‖g‖, step {step}"] = norm
        if after_step is not None:
            after_step(step)
    return values


# ---- The sections of the output, in order


def show_meshes(report: Report) -> None:
    """Which mesh saves, and which ones load."""
    args = report.args
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
    report.table("meshes", rows)
    if args.begin:
        made_by = f"saved by {args.made_by}"
        report.say(wrap(f"   Mesh A resumes from {args.checkpoint}, {made_by}."))
    for text in args.left_out:
        report.say(wrap(f"   {text}"))
    report.say(f"   'A again' is mesh A once more, from the saved step {args.halfway}.")


def show_contents(report: Report, path: Path, training: MeshTraining, size: dict):
    """Which parts of which tensors are in which file."""
    parts = parts_in(path)
    report.section(f"What is in {path.name}, which mesh A saved")
    show_examples(report, parts, training)
    rows = []
    files = {part["file"] for part in parts}
    for file in sorted(files):  # dcp calls them __RANK_NUMBER.distcp
        inside = [part for part in parts if part["file"] == file]
        row = {"file": file, "written by": f"rank {file.split('_')[2]}"}
        row["parts"] = len(inside)
        row["elements, bytes"] = sum(part["bytes"] for part in inside)
        row["file, bytes"] = (path / file).stat().st_size
        rows.append(row)
    total = {"file": "sum", "written by": ""}
    for column in ("parts", "elements, bytes", "file, bytes"):
        total[column] = sum(row[column] for row in rows)
    predicted = evaluate("3·n·e", size)  # a weight and two moments per parameter
    report.expect(total, "elements, bytes", "saved", "bytes 3·n·e", predicted)
    report.say("   Weights and both moments of n parameters: 3·n·e bytes of elements.")
    report.table("files", rows + [total])
    report.say("   Also .metadata, which says what is where, and complete.json.")


# Sharded by rows, sharded by columns, replicated, and padded by TP.
EXAMPLES = ["layers.0.mlp.up_proj", "layers.0.mlp.down_proj", "norm", "embed_tokens"]


def show_examples(report: Report, parts: list[dict], training: MeshTraining) -> None:
    """How four of the weights are sharded on mesh A, and what is written of them."""
    placements = {}
    for name, x in state_to_save(training, {}).items():
        placements[name] = repr(x.placements[0])
    for of_rank in gather_objects(placements):  # each stage has its own layers
        placements.update(of_rank)
    rows = []
    for module in EXAMPLES:
        name = f"weight/{module}.weight"
        written = [part for part in parts if part["tensor"] == name]
        shapes = [str(part["shape"]) for part in written]
        row = {"tensor": name, "full": str(written[0]["full"])}
        row["placement"] = placements[name]
        row["parts written"] = " ".join(shapes)
        if len(shapes) > 2:  # a line has 88 columns
            row["parts written"] = f"{shapes[0]} … {shapes[-1]}"
        rows.append(row)
    report.table("examples", rows)


def show_loaded(report: Report, runs: dict[str, MeshRun]) -> None:
    """Right after loading, every rank must have bitwise what was saved."""
    # All ranks gathered all tensors on each mesh, so every rank compares everything.
    saved = runs["A"].halfway
    rows = []
    for run in resumed(runs):
        rows.append(count_equal(report, "loaded", run, runs[run].halfway, saved))
    report.section("Loaded, before the next step: tensors that are bitwise as saved")
    report.say("   vector = the weights in AdamW's own vector; step = its step number")
    report.table("loaded", rows)


def resumed(runs: dict[str, MeshRun]) -> list[str]:
    """The runs that loaded the checkpoint from halfway."""
    return [run for run in runs if run not in ("one process", "A")]


def count_equal(report: Report, check: str, run: str, got: dict, expected: dict):
    """One row: how many tensors of each kind are bitwise as expected."""
    row = {"mesh": run, "off": []}
    counts = {}
    for name, x in expected.items():
        kind = kind_of(name)
        count = counts.setdefault(kind, {"equal": 0, "all": 0})
        count["all"] += 1
        # An empty tensor stands for one that was not loaded.
        diff = rel_diff(got.get(name, torch.empty(0)), x)
        if report.check(check, f"{name}, {run}", diff):
            count["equal"] += 1
        elif kind not in row["off"]:
            row["off"].append(kind)
    for kind, count in counts.items():
        row[kind] = f"{count['equal']} of {count['all']}"
    return row


def show_steps(report: Report, runs: dict, columns: list[str], begin: int, end: int):
    """Batches, losses and gradient norms after step `begin`, up to step `end`."""
    report.say(f"   Steps {begin + 1} to {end}:")
    for key in ("batches", "losses", "norms"):
        values = {}
        for run in columns:
            of_run = runs[run].values[key]
            # Every name ends with the number of its step.
            names = [name for name in of_run if begin < int(name.split()[-1]) <= end]
            values[run] = {name: of_run[name] for name in names}
        allowed = report.allowed_loss if key == "losses" else report.allowed
        report.compare(key, values, allowed)


def show_states(report: Report, runs: dict[str, MeshRun]) -> None:
    """Parameters and moments after the last step; A again is bitwise equal to A."""
    reference = runs["one process"].end
    rows = []
    for run, mesh_run in runs.items():
        row = {"run": run, "weight": 0.0, "exp_avg": 0.0, "exp_avg_sq": 0.0}
        row.update({"diff": 0.0, "off": []})
        for name, expected in reference.items():
            kind = kind_of(name)
            if mesh_run is runs["one process"]:
                row[kind] = math.hypot(row[kind], expected.double().norm())
                continue  # it is not compared with itself
            x = mesh_run.end.get(name, torch.empty(0))
            row[kind] = math.hypot(row[kind], x.double().norm())
            diff = rel_diff(x, expected)
            row["diff"] = max(row["diff"], diff)
            checked = "moments" if kind in MOMENTS else "parameters"
            if not report.check(checked, f"{name}, {run}", diff, report.allowed):
                row["off"].append(kind)
        rows.append(row)
    report.say(f"   After step {report.args.steps}: norms, and the largest difference:")
    report.table("states", rows)
    if "A again" not in runs:
        return
    # The same mesh adds in the same order, so not even rounding errors may differ.
    got = runs["A again"].end
    row = count_equal(report, "bitwise", "A again", got, runs["A"].end)
    report.say("   On the same mesh the end is bitwise the one without a load:")
    report.table("bitwise", [row])


def kind_of(name: str) -> str:
    """exp_avg/layers.0.mlp.up_proj.weight → exp_avg."""
    return name.partition("/")[0]


def show_interrupted(report: Report, path: Path, training: MeshTraining) -> None:
    """Interrupt a save: the latest checkpoint must stay the one before."""
    step = report.args.halfway + 1
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
    report.say(wrap(f"   {error.replace(str(scratch), '…')}"))
    report.say(f"   It leaves {', '.join(left)}; the latest checkpoint is {latest}.")
    report.check("interrupted", "the save raises OSError", float(not error))
    is_same = latest == path.name
    report.check("interrupted", "the latest checkpoint stays", float(not is_same))


def interrupt_save(folder: Path, step: int, training: MeshTraining) -> str:
    """Save while the last rank's disk seems full. Return the error's text."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == dist.get_world_size() - 1:
        # No file of this process may have more than 1,000 bytes.
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    error_text = ""
    try:  # all ranks raise, although one of them cannot write
        save_checkpoint(folder, step, training, {})
    except OSError as error:
        error_text = str(error)
        COMM.set_status("in no call")
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return error_text


# ==== BREAK IT

BREAKS = {
    "moments": dict(
        target="load_checkpoint",
        old="    optimizer.adamw.state[optimizer.vector] = adam\n",
        new="",
        what="the weights are loaded, AdamW's moments are not",
        symptom="the first loss after the load is right, the next ones are not",
        why="a new AdamW has moments of 0, and the loaded ones never reach it",
        reported="github.com/KempnerInstitute/KempnerForge/pull/115",
    ),
    "step": dict(
        target="load_checkpoint",
        old='    adam["step"] = torch.tensor(float(step))\n',
        new='    adam["step"] = torch.tensor(0.0)\n',
        what="AdamW counts its steps from 0 again after a load",
        symptom="right weights and moments, but updates of another size from then on",
        why="AdamW divides its moments by 1 − βˢᵗᵉᵖ, because they started at 0",
        reported="github.com/TrenTorch/TrenTorch/pull/187",
    ),
    "stale": dict(
        target="load_checkpoint",
        old="    optimizer.vector.data = optimizer.local_slice(training.parameters)\n",
        new="",
        what="AdamW's own copy of the weights is not loaded",
        symptom="the first loss after the load is right; then the old weights are back",
        why="AdamW updates its vector, and copies that over what has been loaded",
        reported="github.com/NVIDIA/Megatron-LM/issues/174",
    ),
    "tied-copy": dict(
        target="state_to_save",
        old="    for name, p in training.parameters.items():\n",
        new="    for name, p in training.optimizer.parameters.items():\n",
        what="a tied weight is saved and loaded by the stage that updates it (--tie)",
        symptom="right on one stage; on two stages the loss after the load is wrong",
        why="the last stage has its own copy as the head, which stays at its start",
        reported="github.com/sgl-project/sglang/pull/15890",
    ),
    "position": dict(
        target="train_steps",
        old="        batch = batches[step - 1]\n",
        new="        batch = batches[step - begin - 1]\n",
        what="the data starts from the beginning after a load",
        symptom="no error, and losses look good: the model has seen these batches",
        why="the position in the data is state as well, and was not restored",
        reported="github.com/huggingface/accelerate/issues/685",
    ),
    "in-place": dict(
        target="save_checkpoint",
        old='    part = folder / f"part_{step:06}"\n',
        new='    part = folder / f"step_{step:06}"\n',
        what="files are written under the checkpoint's final name",
        symptom="none until a save is interrupted: then the latest one is unusable",
        why="a folder looks latest from its first file on, and is complete at its last",
        reported="github.com/RLinf/RLinf/pull/1469",
    ),
}


# ==== FLAGS
# region


def parse_args(ranks: int) -> argparse.Namespace:
    parser = lesson_parser(__doc__, BREAKS, sections=5, steps=4, vocab_size=257)
    add = parser.add_argument
    flags = dict(FROM_MESH, layers="L (2, or P if larger)")
    for name, text in flags.items():
        add(f"--{name.replace('_', '-')}", type=positive, default=0, help=text)
    add("--zero", action="store_true", help="mesh A shards the moments, others do not")
    add("--tie", action="store_true", help="embedding and head share their weight")
    add("--clip", type=float, default=1.0, help="largest norm of a gradient (1)")
    text = "save here after each step; a restart by torchrun resumes from here"
    add("--save", type=folder_path, metavar="DIR", help=text)
    text = "mesh A resumes from here; only from sources you trust: it has a pickle"
    add("--load", type=folder_path, metavar="DIR", help=text)
    parser.set_defaults(ragged=False, schedule="1f1b", sleep=0.0)
    args = parser.parse_args()
    args.tie = args.tie or args.bug == "tied-copy"
    if not (args.pp or args.dp or args.tp) and ranks % 2 == 0:
        args.tp = 2  # so that tensors are sharded
    fill_mesh(args, ranks)
    args.left_out = []
    args.meshes = fill_sizes_for(args, choose_meshes(args))
    check_checkpoints(args)
    return args


def folder_path(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("'' is not the name of a folder")
    return Path(text)


def choose_meshes(args) -> list[Mesh]:
    """Mesh A as the flags say, and two others of as many ranks: its axes exchanged."""
    pp, dp, tp = args.pp, args.dp, args.tp
    others = [(dp, tp, pp), (tp, pp, dp)]
    if pp == dp == tp:  # exchanged, they are the same
        others = [(1, dp, pp * tp), (pp * tp, dp, 1)]
    meshes = [Mesh("A", pp, dp, tp, args.zero)]
    for sizes in others:
        mesh = Mesh("ABC"[len(meshes)], *sizes, not args.zero)
        if mesh.sizes() not in [other.sizes() for other in meshes]:
            meshes.append(mesh)
    return meshes


def fill_sizes_for(args, meshes: list[Mesh]) -> list[Mesh]:
    """Fill in sizes that all meshes divide, or at least A. Return those that do."""
    common = copy.copy(args)
    common.pp = max(mesh.pp for mesh in meshes)
    common.dp = math.lcm(*[mesh.dp for mesh in meshes])
    common.tp = math.lcm(*[mesh.tp for mesh in meshes])
    common.layers = args.layers or max(2, common.pp)
    valid = []
    try:
        fill_sizes(common)
        vars(args).update(vars(common), **meshes[0].sizes())
    except ValueError:
        fill_sizes(args)  # the sizes that were given do not fit all meshes
    for mesh in meshes:
        own = copy.copy(args)
        vars(own).update(mesh.sizes())
        try:
            fill_sizes(own)
            valid.append(mesh)
        except ValueError as error:
            args.left_out.append(f"{mesh.text()} is left out: {error}")
    return valid


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


def check_folder(args) -> None:
    """ValueError if --save cannot be written, or has other checkpoints."""
    try:
        args.save.mkdir(exist_ok=True)
        tempfile.TemporaryFile(dir=args.save).close()
    except OSError as error:
        raise ValueError(f"--save {args.save}: {error.strerror}") from None
    for path in args.save.glob("part_*"):
        if not path.is_dir():
            text = f"{path.name} is a file, but a folder of this name will be written"
            raise ValueError(f"--save {args.save}: {text}; remove it")
    for path in args.save.glob("step_*"):
        number = path.name.removeprefix("step_")
        if number.isdecimal() and int(number) > args.begin:
            text = f"{path.name} is already there"
            other = f"take --load {args.save}, or another folder"
            raise ValueError(f"--save {args.save}: {text}; {other}")


# endregion


# ==== CARRIED OVER from 00, unchanged
# region

# Imports that only the parts below use.
import torch.nn.functional as F


def mesh_groups(sizes: dict[str, int], timeout: float) -> dict[str, dist.ProcessGroup]:
    """Return this rank's group along each axis of a mesh (lesson 00)."""
    ranks = torch.arange(dist.get_world_size()).view(*sizes.values())
    limit = timedelta(seconds=timeout)
    groups = {}
    for dim, (axis, size) in enumerate(sizes.items()):
        lines = ranks.movedim(dim, -1).reshape(-1, size).tolist()
        for line in lines:
            # group_desc is the axis under which COMM counts a group's calls.
            # Every rank creates every group, also those it is not in, in one order:
            # new_group is a collective over all ranks and waits for each of them.
            group = dist.new_group(line, timeout=limit, group_desc=axis)
            if dist.get_rank() in line:
                groups[axis] = group
    return groups


def split(x: Tensor, dim: int, parts: int) -> list[Tensor]:
    """Cut x into equal contiguous parts along dim. ValueError if that is impossible.

    (lesson 00)"""
    if x.shape[dim] % parts:
        raise ValueError(f"dim {dim} of {list(x.shape)} is not a multiple of {parts}")
    return [part.contiguous() for part in x.chunk(parts, dim)]


def shard(full: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """This rank's slice of a tensor that every rank holds: Replicate() → Shard(dim).

    (lesson 00)"""
    return split(full.detach(), dim, group.size())[group.rank()].clone()


def all_reduce(
    x: Tensor, group: dist.ProcessGroup, op: dist.ReduceOp = dist.ReduceOp.SUM
) -> Tensor:
    """Every rank gets the sum over ranks, element by element: Partial() → Replicate().

    (lesson 00)"""
    # PyTorch's call works in place, and only on contiguous memory: x may be a view.
    out = x.detach().clone(memory_format=torch.contiguous_format)
    if group.size() > 1:
        with COMM.record("all-reduce", out, group):
            dist.all_reduce(out, op, group=group)
    return out


def all_gather(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Every rank gets all slices, joined along dim: Shard(dim) → Replicate().

    (lesson 00)"""
    x = x.detach().contiguous()
    if group.size() == 1:
        return x.clone()
    slices = [torch.empty_like(x) for _ in range(group.size())]
    with COMM.record("all-gather", x, group, copies=group.size()):
        dist.all_gather(slices, x, group=group)
    return torch.cat(slices, dim)


def reduce_scatter(x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Sum over ranks, and keep only this rank's slice: Partial() → Shard(dim).

    (lesson 00)"""
    parts = split(x.detach(), dim, group.size())
    out = parts[group.rank()].clone()
    if group.size() > 1:
        with COMM.record("reduce-scatter", x, group):
            dist.reduce_scatter(out, parts, group=group)
    return out


def broadcast(x: Tensor, src: int, group: dist.ProcessGroup) -> Tensor:
    """Every rank gets the x of group rank src; the others' x gives shape and dtype.

    (lesson 00)"""
    out = x.detach().clone(memory_format=torch.contiguous_format)
    if group.size() > 1:
        with COMM.record("broadcast", out, group):
            # group_src is a number in the group; src= would be the global rank.
            dist.broadcast(out, group_src=src, group=group)
    return out


def ring_bytes(collective: str, nbytes: int, ranks: int) -> int:
    """Bytes that one rank of a ring sends for a payload of nbytes (lesson 00)."""
    if collective == "send/recv":
        return nbytes
    rounds = 2 if collective == "all-reduce" else 1  # reduce-scatter, then all-gather
    return round(rounds * nbytes * (ranks - 1) / ranks)


# endregion


# ==== CARRIED OVER from 01, unchanged
# region


class MLP(nn.Module):
    """The reference: plain PyTorch, one process. Shapes: x [B, S, D] → [B, S, D].

    (lesson 01)"""

    def __init__(self, hidden: int, width: int):
        super().__init__()
        self.up_proj = nn.Linear(hidden, width)  # weight [F, D]: torch stores (out, in)
        self.down_proj = nn.Linear(width, hidden)  # weight [D, F]

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.up_proj(x_BSD)))


def shard_parameter(
    full: Tensor | None, *shardings: tuple[int, dist.ProcessGroup]
) -> nn.Parameter | None:
    """This rank's shard of a parameter, which remembers how it was sharded.

    (lesson 01)"""
    if full is None:
        return None
    for dim, group in shardings:
        full = shard(full, dim, group)
    p = nn.Parameter(full.detach().clone())  # training it must not change `full`
    p.shardings = shardings
    return p


def shardings_of(p: Tensor) -> tuple:
    """How a parameter was sharded: ((dim, group), …); empty if it is replicated.

    (lesson 01)"""
    return getattr(p, "shardings", ())


def unshard(x: Tensor, shardings: tuple) -> Tensor:
    """The full tensor from all ranks' shards; the last split is undone first.

    (lesson 01)"""
    for dim, group in reversed(shardings):
        x = all_gather(x, dim, group)
    return x


class CopyToTP(torch.autograd.Function):
    """Megatron's f: identity forward, all-reduce backward (lesson 01)."""

    @staticmethod
    def forward(ctx, x: Tensor, tp_group: dist.ProcessGroup) -> Tensor:
        ctx.tp_group = tp_group
        return x.view_as(x)  # x itself, with a new backward; nothing to send

    @staticmethod
    def backward(ctx, partial_grad: Tensor):
        # Rank t used only its slice of W, so it has one of T partial sums of dL/dx.
        return all_reduce(partial_grad, ctx.tp_group), None


class GatherFromTP(torch.autograd.Function):
    """All-gather forward, slice backward (lesson 01)."""

    @staticmethod
    def forward(ctx, x: Tensor, dim: int, tp_group: dist.ProcessGroup) -> Tensor:
        ctx.dim = dim
        ctx.tp_group = tp_group
        return all_gather(x, dim, tp_group)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return shard(grad, ctx.dim, ctx.tp_group), None, None


class ColumnParallelLinear(nn.Module):
    """Y = X Wᵀ + b with W's *output* features split over the TP group (lesson 01)."""

    def __init__(self, full: nn.Linear, tp_group, copy_input=True, gather_output=False):
        super().__init__()
        self.tp_group = tp_group
        self.copy_input = copy_input
        self.gather_output = gather_output
        self.weight = shard_parameter(full.weight, (0, tp_group))  # [f, D]
        self.bias = shard_parameter(full.bias, (0, tp_group))  # [f]

    def forward(self, x_BSD: Tensor) -> Tensor:
        if self.copy_input:
            x_BSD = CopyToTP.apply(x_BSD, self.tp_group)
        y_BSf = F.linear(x_BSD, self.weight, self.bias)
        if self.gather_output:
            return GatherFromTP.apply(y_BSf, 2, self.tp_group)
        return y_BSf


class ReduceFromTP(torch.autograd.Function):
    """Megatron's g: all-reduce forward, identity backward (lesson 01)."""

    @staticmethod
    def forward(ctx, partial_y: Tensor, tp_group: dist.ProcessGroup) -> Tensor:
        return all_reduce(partial_y, tp_group)

    @staticmethod
    def backward(ctx, grad: Tensor):
        # y is one tensor that all ranks hold, so each has the full dL/dy; and y is the
        # sum of the partial sums, so dL/dy is also the gradient of each of them.
        return grad, None


class RowParallelLinear(nn.Module):
    """Y = X Wᵀ + b with W's *input* features split over the TP group (lesson 01)."""

    def __init__(self, full: nn.Linear, tp_group: dist.ProcessGroup):
        super().__init__()
        self.tp_group = tp_group
        self.reduce = ReduceFromTP.apply  # g; lesson 04 puts a reduce-scatter here
        self.weight = shard_parameter(full.weight, (1, tp_group))  # [D, f]
        self.bias = shard_parameter(full.bias)  # [D]

    def forward(self, x_BSf: Tensor) -> Tensor:
        partial_y_BSD = F.linear(x_BSf, self.weight)
        y_BSD = self.reduce(partial_y_BSD, self.tp_group)
        if self.bias is None:
            return y_BSD
        return y_BSD + self.bias  # after the sum: before it, it would be added T times


def tp_mlp(full: MLP, tp_group: dist.ProcessGroup) -> MLP:
    """Megatron's MLP: columns, then rows; one all-reduce forward, one backward.

    (lesson 01)"""
    mlp = copy.deepcopy(full)
    mlp.up_proj = ColumnParallelLinear(full.up_proj, tp_group)
    mlp.down_proj = RowParallelLinear(full.down_proj, tp_group)
    return mlp


class AllGatherWithGrad(torch.autograd.Function):
    """All-gather forward, reduce-scatter backward (lesson 01)."""

    @staticmethod
    def forward(ctx, x: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim = dim
        ctx.group = group
        return all_gather(x, dim, group)

    @staticmethod
    def backward(ctx, partial_grad: Tensor):
        return reduce_scatter(partial_grad, ctx.dim, ctx.group), None, None


class ReduceScatterWithGrad(torch.autograd.Function):
    """Reduce-scatter forward, all-gather backward (lesson 01)."""

    @staticmethod
    def forward(ctx, partial_y: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
        ctx.dim = dim
        ctx.group = group
        return reduce_scatter(partial_y, dim, group)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return all_gather(grad, ctx.dim, ctx.group), None, None


def must_divide(args, name: str, parts: int, what: str) -> None:
    """Refuse a flag's value that is no multiple of parts, with the arithmetic.

    (lesson 01)"""
    value = getattr(args, name)
    if value % parts:
        multiple = value + parts - value % parts
        if multiple >= 2**31:  # the largest value of a flag is 2^31 − 1
            multiple -= parts
        reason = f"{value} % {parts} {what} = {value % parts}, not 0"
        refuse(args, name, reason, multiple)


def refuse(args, name: str, reason: str, value: int) -> None:
    """Keep why a flag is wrong, and set a right value, on which others may depend.

    (lesson 01)"""
    flag = f"--{name.replace('_', '-')}"
    refused = vars(args).setdefault("refused", [])
    refused.append((flag, f"{flag} {getattr(args, name)}: {reason}", value))
    setattr(args, name, value)


def raise_refused(args) -> None:
    """ValueError with the first reason, and with all flags that have to change.

    (lesson 01)"""
    refused = vars(args).pop("refused", [])
    if refused:
        take = {flag: value for flag, _, value in refused}
        flags = " ".join(f"{flag} {value}" for flag, value in take.items())
        raise ValueError(f"{refused[0][1]}; take {flags}")


# endregion


# ==== CARRIED OVER from 02, unchanged
# region


class Config(NamedTuple):
    """The sizes of a model, and its dropout (lesson 02)."""

    vocab_size: int  # V
    hidden: int  # D
    heads: int  # N
    kv_heads: int  # K: each key/value head serves N/K query heads
    layers: int  # L
    seq_len: int  # S, the longest sequence
    dropout: float  # probability, of attention weights and of each block's output


def rotary_table(seq_len: int, head_size: int) -> tuple[Tensor, Tensor]:
    """cos and sin [S, H] of the angles of a rotary embedding (arXiv:2104.09864).

    (lesson 02)"""
    frequency = 10000.0 ** (-torch.arange(0, head_size, 2) / head_size)
    angle_SH = torch.outer(torch.arange(seq_len), frequency).repeat(1, 2)
    return angle_SH.cos(), angle_SH.sin()


def rotate(x_BNSH: Tensor, cos_SH: Tensor, sin_SH: Tensor) -> Tensor:
    """Rotate each pair (i, i + H/2) of a head by the angle of its position.

    (lesson 02)"""
    first, second = x_BNSH.chunk(2, -1)
    return x_BNSH * cos_SH + torch.cat([-second, first], -1) * sin_SH


class Dropout(nn.Dropout):
    """nn.Dropout with a mask from torch.rand, as in ShardedDropout below.

    (lesson 02)"""

    def forward(self, x: Tensor) -> Tensor:
        if self.p == 0 or not self.training:
            return x
        keep = torch.rand(x.shape, device=x.device) >= self.p
        return x * keep / (1 - self.p)


class CoreAttention(nn.Module):
    """The part of attention that has no parameters (lesson 02)."""

    def __init__(self, head_size: int, dropout: float):
        super().__init__()
        self.head_size = head_size
        self.dropout = Dropout(dropout)  # of the attention weights

    def forward(self, q: Tensor, k: Tensor, v: Tensor, tables: tuple) -> Tensor:
        S = q.shape[1]
        cos_SH, sin_SH, future_SS = tables
        q_BNSH = q.unflatten(-1, (-1, self.head_size)).transpose(1, 2)
        k_BKSH = k.unflatten(-1, (-1, self.head_size)).transpose(1, 2)
        v_BKSH = v.unflatten(-1, (-1, self.head_size)).transpose(1, 2)
        q_BNSH = rotate(q_BNSH, cos_SH[:S], sin_SH[:S])
        k_BKSH = rotate(k_BKSH, cos_SH[:S], sin_SH[:S])
        queries_per_kv = q_BNSH.shape[1] // k_BKSH.shape[1]
        k_BNSH = k_BKSH.repeat_interleave(queries_per_kv, 1)
        v_BNSH = v_BKSH.repeat_interleave(queries_per_kv, 1)
        scores_BNSS = q_BNSH @ k_BNSH.mT / math.sqrt(self.head_size)
        scores_BNSS = scores_BNSS.masked_fill(future_SS[:S, :S], float("-inf"))
        weights_BNSS = self.dropout(scores_BNSS.softmax(-1))
        return (weights_BNSS @ v_BNSH).transpose(1, 2).flatten(2)


def apply_each(x_BSD: Tensor, *linears: nn.Module) -> list[Tensor]:
    """The outputs of several linears for the same input (lesson 02)."""
    return [linear(x_BSD) for linear in linears]


class Attention(nn.Module):
    """Causal attention. Shapes: x [B, S, D] → [B, S, D] (lesson 02)."""

    def __init__(self, config: Config):
        super().__init__()
        D = config.hidden
        H = config.hidden // config.heads
        self.q_proj = nn.Linear(D, config.heads * H)
        self.k_proj = nn.Linear(D, config.kv_heads * H)
        self.v_proj = nn.Linear(D, config.kv_heads * H)
        self.project_qkv = apply_each  # TP replaces it: one f before all three
        self.core = CoreAttention(H, config.dropout)
        self.o_proj = nn.Linear(D, D)

    def forward(self, x_BSD: Tensor, tables: tuple) -> Tensor:
        q, k, v = self.project_qkv(x_BSD, self.q_proj, self.k_proj, self.v_proj)
        return self.o_proj(self.core(q, k, v, tables))


class DecoderLayer(nn.Module):
    """Pre-LayerNorm: x + dropout(attention(norm(x))), then + dropout(MLP(norm(x))).

    (lesson 02)"""

    def __init__(self, config: Config):
        super().__init__()
        D = config.hidden
        self.input_layernorm = nn.LayerNorm(D)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.LayerNorm(D)
        self.mlp = MLP(D, 4 * D)
        self.dropout = Dropout(config.dropout)

    def forward(self, x_BSD: Tensor, tables: tuple) -> Tensor:
        # By keyword: PyTorch's plan in lesson 04 names the inputs of attention.
        y_BSD = self.self_attn(x_BSD=self.input_layernorm(x_BSD), tables=tables)
        x_BSD = x_BSD + self.dropout(y_BSD)
        y_BSD = self.mlp(self.post_attention_layernorm(x_BSD))
        return x_BSD + self.dropout(y_BSD)


class Transformer(nn.Module):
    """The decoder. Shapes: tokens [B, S] int64 → logits [B, S, V] (lesson 02)."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.hidden)
        self.lm_head = nn.Linear(config.hidden, config.vocab_size)
        cos_SH, sin_SH = rotary_table(config.seq_len, config.hidden // config.heads)
        self.register_buffer("cos", cos_SH, persistent=False)
        self.register_buffer("sin", sin_SH, persistent=False)
        future_SS = torch.ones(config.seq_len, config.seq_len, dtype=torch.bool).triu(1)
        self.register_buffer("future", future_SS, persistent=False)

    def forward(self, tokens_BS: Tensor) -> Tensor:
        x_BSD = self.embed_tokens(tokens_BS)
        for layer in self.layers:
            x_BSD = layer(x_BSD, (self.cos, self.sin, self.future))
        return self.lm_head(self.norm(x_BSD))


class ShardedDropout(nn.Module):
    """Dropout of a tensor that is sharded along dim: ranks must drop independently.

    (lesson 02)"""

    def __init__(self, p: float, dim: int, tp_group: dist.ProcessGroup):
        super().__init__()
        self.p = p
        self.dim = dim
        self.tp_group = tp_group

    def forward(self, x: Tensor) -> Tensor:
        if self.p == 0 or not self.training:
            return x
        full_shape = list(x.shape)
        full_shape[self.dim] *= self.tp_group.size()
        keep = torch.rand(full_shape, device=x.device) >= self.p
        return x * shard(keep, self.dim, self.tp_group) / (1 - self.p)


def copy_then_apply_each(x_BSD: Tensor, *linears: nn.Module) -> list[Tensor]:
    """One f for all linears that read x, so that dL/dx is summed over ranks once.

    (lesson 02)"""
    x_BSD = CopyToTP.apply(x_BSD, linears[0].tp_group)
    return apply_each(x_BSD, *linears)


def parallelize_layer(layer: DecoderLayer, tp_group: dist.ProcessGroup) -> None:
    """Replace the linears of a layer by parallel ones: Megatron's split (lesson 02)."""
    attn = layer.self_attn
    T = tp_group.size()
    kv_heads = attn.k_proj.out_features // attn.core.head_size
    if kv_heads % T != 0:  # a rank would get a fraction of a head
        raise ValueError(f"{kv_heads} key/value heads cannot be split over {T} ranks")

    attn.q_proj = ColumnParallelLinear(attn.q_proj, tp_group, copy_input=False)
    attn.k_proj = ColumnParallelLinear(attn.k_proj, tp_group, copy_input=False)
    attn.v_proj = ColumnParallelLinear(attn.v_proj, tp_group, copy_input=False)
    attn.project_qkv = copy_then_apply_each
    # The attention weights [B, n, S, S] are sharded by head, so along dim 1.
    attn.core.dropout = ShardedDropout(attn.core.dropout.p, 1, tp_group)
    attn.o_proj = RowParallelLinear(attn.o_proj, tp_group)
    layer.mlp = tp_mlp(layer.mlp, tp_group)


def tp_transformer(full: Transformer, tp_group: dist.ProcessGroup) -> Transformer:
    """A copy of the decoder with its layers split over the TP group (lesson 02)."""
    model = copy.deepcopy(full)
    for layer in model.layers:
        parallelize_layer(layer, tp_group)
    return model.train(full.training)  # new modules start in training mode


def global_norm(model: nn.Module, tp_group: dist.ProcessGroup) -> float:
    """Norm of the full model's gradient, the same on every rank (lesson 02)."""
    total = next(model.parameters()).new_zeros((), dtype=torch.float64)
    for p in model.parameters():
        if p.grad is None:
            continue
        squares = p.grad.double().square().sum()
        if not shardings_of(p):
            squares /= tp_group.size()  # all T ranks add the same squares
        total += squares
    return math.sqrt(all_reduce(total, tp_group))


def clip_gradients(model: nn.Module, max_norm: float, norm: float) -> None:
    """Scale all gradients by one factor, so that their norm is at most max_norm.

    (lesson 02)"""
    scale = min(1.0, max_norm / (norm + 1e-6))  # as torch.nn.utils.clip_grad_norm_
    for p in model.parameters():
        if p.grad is not None:
            p.grad.mul_(scale)


PAD = 256  # the one token that is not a byte


IGNORE = -100  # the target of a position without a next byte; cross_entropy skips it


def make_batches(text: str, args, count: int) -> list[tuple[Tensor, Tensor]]:
    """Sample batches of tokens and targets, each [B, S] int64 (lesson 02)."""
    lines = [f"{line}\n".encode() for line in text.splitlines() if line.strip()]
    generator = torch.Generator().manual_seed(args.seed)
    batches = []
    for _ in range(count):
        rows = torch.full((args.batch_size, args.seq_len + 1), PAD)
        for row in rows:
            line = lines[torch.randint(len(lines), (), generator=generator)]
            start = torch.randint(len(line) - 1, (), generator=generator)
            line = line[start : start + args.seq_len + 1]
            row[: len(line)] = torch.tensor(list(line))
        tokens_BS = rows[:, :-1].contiguous()
        target_BS = rows[:, 1:]
        target_BS = target_BS.masked_fill(target_BS == PAD, IGNORE)
        batches.append((tokens_BS.to(args.device), target_BS.to(args.device)))
    return batches


def make_transformer(args) -> Transformer:
    """The full model. Every rank initializes the same one, from the same seed.

    (lesson 02)"""
    torch.manual_seed(args.seed)
    config = Config(**{name: getattr(args, name) for name in Config._fields})
    return Transformer(config).to(args.device, getattr(torch, args.dtype))


def mean_loss(logits_BSV: Tensor, target_BS: Tensor) -> Tensor:
    """Cross entropy, averaged over the tokens that have a target (lesson 02)."""
    return F.cross_entropy(logits_BSV.flatten(0, 1), target_BS.flatten())


class TrainingRun(NamedTuple):
    model: Transformer
    optimizer: torch.optim.Optimizer
    losses: dict[str, float]  # by step
    norms: dict[str, float]  # of the gradient before clipping, by step
    gradients: dict[str, Tensor]  # of step 1, unsharded
    parameters: dict[str, Tensor]  # after the last step, unsharded


def train_transformer(
    name, model, batches, args, tp_group=None, loss_of=mean_loss, after_backward=None,
    norm_of=None,
) -> TrainingRun:  # fmt: skip
    """Train one step on each batch (lesson 02)."""
    losses = {}
    norms = {}
    # AdamW divides by the size of the gradient. A tiny eps would turn the rounding
    # errors of gradients near 0 into full steps, different ones in each run.
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-4)

    for step, (tokens_BS, target_BS) in enumerate(batches, 1):
        # One seed for all ranks, so that they sample the same dropout masks.
        torch.manual_seed(args.seed + step)
        optimizer.zero_grad()

        # COMM.label only names the collectives inside, for the communication table.
        with COMM.label(name, "forward"):
            logits = model(tokens_BS)
        with COMM.label(name, "loss"):
            loss = loss_of(logits, target_BS)
        with COMM.label(name, "backward"):
            loss.backward()
        if after_backward is not None:
            with COMM.label(name, "summing"):
                after_backward(model)
        if step == 1:
            gradients = unshard_model(model, "grad")

        with COMM.label(name, "clipping"):
            if tp_group is None:
                norm = norm_by_pytorch(model)
            elif norm_of is None:
                norm = global_norm(model, tp_group)
            else:
                norm = norm_of(model, tp_group)
            clip_gradients(model, args.clip, norm)

        # Each rank updates what it holds, and sends nothing. Replicas stay equal only
        # because they start equal and get equal gradients. Nothing else enforces it.
        with COMM.label(name, "update"):
            optimizer.step()
        losses[f"loss, step {step}"] = loss.item()
        norms[f"‖g‖, step {step}"] = norm

    parameters = unshard_model(model, "data")
    return TrainingRun(model, optimizer, losses, norms, gradients, parameters)


def norm_by_pytorch(model: nn.Module) -> float:
    """PyTorch's own norm of the gradient, which also handles DTensors; in float64.

    (lesson 02)"""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    gradients = [sum_partial(gradient.double()) for gradient in gradients]
    norm = nn.utils.get_total_norm(gradients, foreach=False)
    # Before torch 2.11 a DTensor's .item() is this rank's part of it (pytorch#166638).
    return norm.full_tensor().item() if isinstance(norm, DTensor) else norm.item()


def sum_partial(x: Tensor) -> Tensor:
    """Sum a Partial() DTensor. Before torch 2.11 its norm was that of a rank's part.

    (lesson 02)"""
    if not isinstance(x, DTensor):
        return x
    placements = [Replicate() if p.is_partial() else p for p in x.placements]
    return x.redistribute(placements=placements)


def unshard_model(model: nn.Module, what: str) -> dict[str, Tensor]:
    """All parameters ("data") or gradients ("grad"), from the slices of all ranks.

    (lesson 02)"""
    tensors = {}
    for name, p in model.named_parameters():
        x = getattr(p, what)
        if x is None:
            x = torch.empty(0)  # no gradient: a mismatch if another run has one
        elif isinstance(x, DTensor):
            x = x.full_tensor()  # an all-gather by PyTorch
        else:
            x = unshard(x, shardings_of(p))
        tensors[name] = x.clone()
    return tensors


def sizes_of(args) -> dict[str, int]:
    """The letters of the shape legend, and e: bytes per element (lesson 02)."""
    e = getattr(torch, args.dtype).itemsize
    return dict(
        B=args.batch_size, S=args.seq_len, D=args.hidden, N=args.heads,
        K=args.kv_heads, H=args.hidden // args.heads, F=4 * args.hidden,
        V=args.vocab_size, L=args.layers, T=args.ranks, e=e,
    )  # fmt: skip


# endregion


# ==== CARRIED OVER from 03, unchanged
# region


def pad_vocab(full: nn.Module, ranks: int) -> nn.Module:
    """Return a copy of an embedding or a head, padded with rows of zeros.

    (lesson 03)"""
    padded = copy.deepcopy(full)
    for name, p in full.named_parameters():
        missing = -len(p) % ranks  # V = 257, T = 4: 3 rows, so that each rank has 65
        zeros = p.new_zeros(missing, *p.shape[1:])
        setattr(padded, name, nn.Parameter(torch.cat([p.detach(), zeros])))
    return padded


def check_tokens(tokens: Tensor, vocab_size: int) -> None:
    """Raise ValueError for a token outside the vocabulary: no rank has its row.

    (lesson 03)"""
    if tokens.numel() and not 0 <= tokens.min() <= tokens.max() < vocab_size:
        low = tokens.min().item()
        high = tokens.max().item()
        text = f"tokens {low} to {high}: the vocabulary is 0 to {vocab_size - 1}"
        raise ValueError(text)


def find_local_rows(tokens: Tensor, v: int, rank: int) -> tuple[Tensor, Tensor]:
    """Return each token's row on this rank, and whether this rank has that token.

    (lesson 03)"""
    row = tokens - rank * v
    is_local = (row >= 0) & (row < v)
    return row.where(is_local, 0), is_local


class VocabParallelEmbedding(nn.Module):
    """An embedding whose rows are split over the TP group (lesson 03)."""

    def __init__(self, full: nn.Embedding, tp_group: dist.ProcessGroup):
        super().__init__()
        self.vocab_size = full.num_embeddings
        self.tp_group = tp_group
        self.reduce = ReduceFromTP.apply  # g; lesson 04 puts a reduce-scatter here
        padded = pad_vocab(full, tp_group.size())
        self.weight = shard_parameter(padded.weight, (0, tp_group))  # [v, D]

    def forward(self, tokens_BS: Tensor) -> Tensor:
        check_tokens(tokens_BS, self.vocab_size)
        v = len(self.weight)
        row_BS, is_local_BS = find_local_rows(tokens_BS, v, self.tp_group.rank())
        x_BSD = F.embedding(row_BS, self.weight)
        # Every token is on one rank, and the other ranks add 0: the sum is its row.
        partial_x_BSD = x_BSD * is_local_BS.unsqueeze(-1)
        return self.reduce(partial_x_BSD, self.tp_group)


def vocab_transformer(full: Transformer, tp_group: dist.ProcessGroup) -> Transformer:
    """Return lesson 02's parallel model, with embedding and head also sharded.

    (lesson 03)"""
    model = tp_transformer(full, tp_group)
    model.embed_tokens = VocabParallelEmbedding(full.embed_tokens, tp_group)
    padded_head = pad_vocab(full.lm_head, tp_group.size())
    model.lm_head = ColumnParallelLinear(padded_head, tp_group)
    if full.lm_head.weight is full.embed_tokens.weight:
        # One parameter with two uses: autograd adds up the gradients of both.
        model.lm_head.weight = model.embed_tokens.weight
    for p in [model.embed_tokens.weight, *model.lm_head.parameters()]:
        p.rows = full.config.vocab_size  # rows of the full weight; the rest is padding
    return model.train(full.training)  # in eval mode if full is


class VocabParallelCrossEntropy(torch.autograd.Function):
    """−log softmax(x)[target] of sharded logits x; see vocab_parallel_cross_entropy.

    (lesson 03)"""

    @staticmethod
    def forward(ctx, logits_BSv, target_BS, tp_group, vocab_size, ignore, smoothing):
        v = logits_BSv.shape[-1]
        token_v = tp_group.rank() * v + torch.arange(v, device=logits_BSv.device)
        padding_v = token_v >= vocab_size  # columns that are no token
        x_BSv = logits_BSv.masked_fill(padding_v, float("-inf"))  # exp(−∞) = 0
        x_BSv = x_BSv.to(torch.promote_types(x_BSv.dtype, torch.float32))
        # First all-reduce: the largest logit, so that no exp overflows.
        max_BS = all_reduce(x_BSv.amax(-1), tp_group, dist.ReduceOp.MAX)
        x_BSv = x_BSv - max_BS.unsqueeze(-1)
        # Second: the sum of the exponentials.
        exp_BSv = x_BSv.exp()
        sum_BS = all_reduce(exp_BSv.sum(-1), tp_group)
        # Third: the target's logit. Only the rank with the target's row of the head has
        # this column; the others add 0. IGNORE is in no rank's range.
        column_BS, is_local_BS = find_local_rows(target_BS, v, tp_group.rank())
        picked_BS = x_BSv.gather(-1, column_BS.unsqueeze(-1)).squeeze(-1)
        picked_BS = picked_BS.where(is_local_BS, 0)
        if smoothing:  # Σ q·(x − m) instead; padding (−∞) is left out
            picked_BS = (1 - smoothing) * picked_BS
            picked_BS += (
                smoothing / vocab_size * x_BSv.masked_fill(padding_v, 0).sum(-1)
            )
        loss_BS = sum_BS.log() - all_reduce(picked_BS, tp_group)
        softmax_BSv = exp_BSv / sum_BS.unsqueeze(-1)
        has_target_BS = target_BS != ignore
        ctx.save_for_backward(
            softmax_BSv, column_BS, is_local_BS, has_target_BS, padding_v
        )
        ctx.vocab_size = vocab_size
        ctx.smoothing = smoothing
        ctx.dtype = logits_BSv.dtype
        return loss_BS.where(has_target_BS, 0)

    @staticmethod
    def backward(ctx, upstream_BS):
        # Nothing is sent: upstream_BS is equal on all ranks, because they all computed
        # the same loss, and softmax − q needs this rank's columns only.
        softmax_BSv, column_BS, is_local_BS, has_target_BS, padding_v = (
            ctx.saved_tensors
        )
        smooth_target = ctx.smoothing / ctx.vocab_size  # ε/V, for every token
        grad_BSv = (softmax_BSv - smooth_target).masked_fill(padding_v, 0)
        extra_BS = (1 - ctx.smoothing) * is_local_BS.to(softmax_BSv)  # at the target
        grad_BSv.scatter_add_(-1, column_BS.unsqueeze(-1), -extra_BS.unsqueeze(-1))
        grad_BSv = grad_BSv * upstream_BS.unsqueeze(-1)
        # The loss of an ignored position is 0, but its softmax − q is not.
        grad_BSv = grad_BSv.where(has_target_BS.unsqueeze(-1), 0)
        return grad_BSv.to(ctx.dtype), None, None, None, None, None


def vocab_parallel_cross_entropy(
    logits_BSv: Tensor,
    target_BS: Tensor,
    tp_group: dist.ProcessGroup,
    vocab_size: int,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Return the loss of every token, from logits that are sharded over the TP group.

    (lesson 03)"""
    check_tokens(target_BS[target_BS != ignore_index], vocab_size)
    return VocabParallelCrossEntropy.apply(
        logits_BSv, target_BS, tp_group, vocab_size, ignore_index, label_smoothing
    )


def make_tied(args) -> Transformer:
    """Return lesson 02's model; with --tie, head and embedding share one weight.

    (lesson 03)"""
    full = make_transformer(args)
    if args.tie:
        # An embedding starts with a standard deviation of 1, which is too large for a
        # head: its logits would be huge.
        nn.init.normal_(full.embed_tokens.weight, std=0.02)
        full.lm_head.weight = full.embed_tokens.weight
    return full


# endregion


# ==== CARRIED OVER from 04, unchanged
# region


def pad_batch(tokens_BS: Tensor, target_BS: Tensor, ranks: int) -> tuple:
    """Pad the sequence at its end so that T divides it (lesson 04)."""
    missing = -tokens_BS.shape[1] % ranks
    tokens_BS = F.pad(tokens_BS, (0, missing), value=PAD)
    target_BS = F.pad(target_BS, (0, missing), value=IGNORE)
    return tokens_BS, target_BS


def reduce_scatter_sequence(partial_y_BSD: Tensor, tp_group) -> Tensor:
    """Sum the ranks' partial outputs; each rank gets its slice of the positions.

    (lesson 04)"""
    return ReduceScatterWithGrad.apply(partial_y_BSD, 1, tp_group)


class GatherThenLinear(torch.autograd.Function):
    """All-gather the sequence, apply linears, and save only this rank's slice.

    (lesson 04)"""

    @staticmethod
    def forward(ctx, x_BsD: Tensor, tp_group, *parameters: Tensor | None) -> tuple:
        weights = parameters[0::2]  # weight, bias, weight, bias, …
        biases = parameters[1::2]  # None for a linear without bias
        ctx.save_for_backward(x_BsD, *weights)
        ctx.tp_group = tp_group
        ctx.has_bias = [bias is not None for bias in biases]
        x_BSD = all_gather(x_BsD, 1, tp_group)
        return tuple(F.linear(x_BSD, W, b) for W, b in zip(weights, biases))

    @staticmethod
    def backward(ctx, *grads_BSf: Tensor):
        saved = ctx.saved_tensors  # one read: Checkpointed (below) forbids a second
        x_BsD = saved[0]
        weights = saved[1:]
        x_BSD = all_gather(x_BsD, 1, ctx.tp_group)  # the second all-gather
        flat_x = x_BSD.flatten(0, 1)  # [B·S, D]
        partial_grad_BSD = torch.zeros_like(x_BSD)
        grads = []  # of the parameters, in the order of forward
        for grad_BSf, weight, has_bias in zip(grads_BSf, weights, ctx.has_bias):
            flat_grad = grad_BSf.flatten(0, 1)  # [B·S, f]
            grads.append(flat_grad.T @ flat_x)
            grads.append(flat_grad.sum(0) if has_bias else None)
            partial_grad_BSD += grad_BSf @ weight
        # Each rank multiplied all positions by its own columns, so it has a partial
        # dL/dx for every position. Sum over ranks; this rank gets its positions.
        grad_BsD = reduce_scatter(partial_grad_BSD, 1, ctx.tp_group)
        return tuple([grad_BsD, None] + grads)


def gather_then_apply_each(x_BsD: Tensor, *linears: nn.Module) -> list[Tensor]:
    """Apply column-parallel linears to a sharded sequence: one all-gather for all.

    (lesson 04)"""
    parameters = []
    for linear in linears:
        parameters.append(linear.weight)
        parameters.append(linear.bias)
    return list(GatherThenLinear.apply(x_BsD, linears[0].tp_group, *parameters))


def gather_and_save(x_BsD: Tensor, *linears: nn.Module) -> list[Tensor]:
    """The same by plain autograd (--save-gathered): saves T slices, gathers once.

    (lesson 04)"""
    x_BSD = AllGatherWithGrad.apply(x_BsD, 1, linears[0].tp_group)
    return [F.linear(x_BSD, linear.weight, linear.bias) for linear in linears]


class LinearWithInputComm(nn.Module):
    """A column-parallel linear that one of the two functions above computes.

    (lesson 04)"""

    def __init__(self, linear: ColumnParallelLinear, gather_and_apply):
        super().__init__()
        self.tp_group = linear.tp_group
        self.weight = linear.weight
        self.bias = linear.bias
        self.gather_and_apply = gather_and_apply

    def forward(self, x_BsD: Tensor) -> Tensor:
        outputs = self.gather_and_apply(x_BsD, self)
        return outputs[0]


def split_sequence(
    layer: DecoderLayer, tp_group, gather_and_apply=gather_then_apply_each
) -> None:
    """Edit a layer of tp_transformer: around attention and MLP the sequence is split.

    (lesson 04)"""
    layer.self_attn.project_qkv = gather_and_apply
    layer.self_attn.o_proj.reduce = reduce_scatter_sequence
    layer.mlp.up_proj = LinearWithInputComm(layer.mlp.up_proj, gather_and_apply)
    layer.mlp.down_proj.reduce = reduce_scatter_sequence
    # The layer drops elements of a [B, s, D]: each rank must use its slice of the mask.
    layer.dropout = ShardedDropout(layer.dropout.p, 1, tp_group)


def sp_transformer(
    full: Transformer, tp_group: dist.ProcessGroup, save_gathered: bool = False
) -> Transformer:
    """A copy of the decoder under TP, with the sequence split between its linears.

    (lesson 04)"""
    gather_and_apply = gather_and_save if save_gathered else gather_then_apply_each
    model = vocab_transformer(full, tp_group)
    for layer in model.layers:
        split_sequence(layer, tp_group, gather_and_apply)
    model.embed_tokens.reduce = reduce_scatter_sequence
    model.lm_head = LinearWithInputComm(model.lm_head, gather_and_apply)
    return model.train(full.training)  # in eval mode if full is


def all_reduce_replicated_gradients(model: nn.Module, tp_group) -> None:
    """Sum the gradients of replicated parameters over the TP group, before clipping.

    (lesson 04)"""
    replicated = []
    for p in model.parameters():
        if p.grad is not None and not shardings_of(p):
            replicated.append(p)
    partial_flat = torch.cat([p.grad.flatten() for p in replicated])
    flat = all_reduce(partial_flat, tp_group)
    for p, grad in zip(replicated, flat.split([p.numel() for p in replicated])):
        p.grad.copy_(grad.view_as(p))


# endregion


# ==== CARRIED OVER from 05, unchanged
# region


def make_mesh(sizes: dict[str, int], timeout: float) -> dict[str, dist.ProcessGroup]:
    """This rank's group along each axis of {"pp": P, "dp": DP, "tp": T}, and two more.

    (lesson 05)"""
    groups = mesh_groups(sizes, timeout)
    pipelines = torch.arange(dist.get_world_size()).view(sizes["pp"], -1).T.tolist()
    # Gradients go back in a group of their own with the same ranks. NCCL runs the
    # messages of one group in order, so an activation whose receiver is busy would
    # block the gradient queued behind it.
    groups["pp_backward"] = new_group_from(pipelines, "pp", timeout)
    # A tied weight is on the first and the last stage. The stages between form another
    # group, which sends nothing: so this entry is a group on every rank, never None.
    first_and_last = [sorted({line[0], line[-1]}) for line in pipelines]
    between = [line[1:-1] for line in pipelines if len(line) > 2]
    groups["embedding"] = new_group_from(first_and_last + between, "embed", timeout)
    return groups


def new_group_from(lists: list, axis: str, timeout: float) -> dist.ProcessGroup:
    """Create one group per list of ranks, on every rank; return this rank's group.

    (lesson 05)"""
    limit = timedelta(seconds=timeout)
    group, _ = dist.new_subgroups_by_enumeration(lists, timeout=limit, group_desc=axis)
    return group


def slice_stage(model: Transformer, stage: int, num_stages: int) -> Transformer:
    """Remove from a model what other stages hold: its forward is then a stage's.

    (lesson 05)"""
    indices = torch.arange(len(model.layers)).tensor_split(num_stages)[stage]
    model.layers = nn.ModuleList(model.layers[i] for i in indices)
    if stage > 0:
        model.embed_tokens = nn.Identity()
    if stage < num_stages - 1:
        model.norm = nn.Identity()
        model.lm_head = nn.Identity()
    return model


def schedule(kind: str, stage: int, num_stages: int, num_microbatches: int) -> list:
    """The steps of a stage, in order: [("forward", 0), …, ("backward", 0), …].

    (lesson 05)"""
    M = num_microbatches
    warm_up = M if kind == "gpipe" else min(num_stages - stage - 1, M)
    steps = [("forward", i) for i in range(warm_up)]
    for i in range(M - warm_up):
        steps += [("forward", warm_up + i), ("backward", i)]
    return steps + [("backward", i) for i in range(M - warm_up, M)]


class Message(NamedTuple):
    """A tensor on its way to another stage (lesson 05)."""

    work: dist.Work  # its wait() returns when the receiver has the tensor
    ranks: list[int]  # sender and receiver
    x: Tensor  # must live until it has been received
    what: str  # what it carries, as an error names it


def send(x: Tensor, dst: int, group, what: str = "a message") -> Message:
    """Start sending x to stage `dst`, and return at once; wait_for waits.

    (lesson 05)"""
    x = x.detach().contiguous()
    COMM.count("send/recv", x.nbytes, group.group_desc)
    ranks = [dist.get_rank(), dist.get_global_rank(group, dst)]
    work = dist.isend(x, group=group, group_dst=dst)
    return Message(work, ranks, x, what)


def wait_for(messages: list[Message]) -> None:
    """Wait until messages have been received (lesson 05)."""
    for message in messages:
        with COMM.blocking(message.what, message.ranks):
            message.work.wait()


def receive(out: Tensor, src: int, group, what: str = "a message") -> Tensor:
    """Wait for a tensor from stage `src`, which is written into `out` (lesson 05)."""
    ranks = [dist.get_global_rank(group, src), dist.get_rank()]
    with COMM.blocking(what, ranks):
        dist.recv(out, group=group, group_src=src)
    return out


class Pipeline:
    """Runs a stage's schedule (receive, compute, send), and records when it computed.

    (lesson 05)"""

    def __init__(self, stage: nn.Module, loss_of, groups):
        self.stage = stage
        self.loss_of = loss_of  # (output, targets) → loss; on the last stage only
        self.pp = groups["pp"]
        self.pp_backward = groups["pp_backward"]
        self.rank = self.pp.rank()  # the number of the stage
        self.first = self.rank == 0
        self.last = self.rank == self.pp.size() - 1
        self.like = next(stage.parameters())  # messages have its dtype and device
        self.held = HeldBytes(stage)  # a meter: what autograd holds for backward
        self.sleep = 0.0  # --sleep: seconds that a forward pass takes at least

    def run(self, steps: list[tuple[str, int]], micro_batches: list) -> Tensor:
        """Run all steps. Return the sum of the losses; 0 except on the last stage.

        (lesson 05)"""
        self.micro_batches = micro_batches
        self.loss = self.like.new_zeros(())
        self.in_flight = {}  # micro-batch → input, output, messages being sent
        self.pending_sends = []  # gradients: M·b·s·D elements stay until the end
        self.events = []
        self.held.reset()
        for phase, i in steps:
            with COMM.label("mesh", phase):
                if phase == "forward":
                    self.forward(i)
                else:
                    self.backward(i)
        wait_for(self.pending_sends)
        return self.loss

    def forward(self, i: int) -> None:
        """Run micro-batch i through this stage, and send the result to the next.

        (lesson 05)"""
        x, target = self.micro_batches[i]  # (None, None) on a stage between
        activation = f"activation of micro-batch {i + 1} to stage"
        if not self.first:  # it does not know how long rows are: the shape comes first
            what = f"{activation} {self.rank}"
            shape = self.like.new_empty(3, dtype=torch.int64)
            shape = receive(shape, self.rank - 1, self.pp, what).tolist()
            x = receive(self.like.new_empty(shape), self.rank - 1, self.pp, what)
            x.requires_grad_()  # without a history, x is a leaf: backward fills x.grad
        with self.record_event("forward", i):
            y = self.stage(x)
            if self.last:
                y = self.loss_of(y, target)
                self.loss = self.loss + y.detach()
        sent = []
        if not self.last:
            what = f"{activation} {self.rank + 1}"
            shape = torch.tensor(y.shape, device=y.device)
            with COMM.label("mesh", "shapes"):
                sent.append(send(shape, self.rank + 1, self.pp, what))
            sent.append(send(y, self.rank + 1, self.pp, what))
        self.in_flight[i] = (x, y, sent)  # and, through y, all that autograd saved

    def backward(self, i: int) -> None:
        """Run backward of micro-batch i, and send dL/dx to the stage before.

        (lesson 05)"""
        x, y, sent = self.in_flight.pop(i)
        gradient = f"gradient of micro-batch {i + 1} to stage"
        grad = None  # the last stage has the loss, a scalar
        if not self.last:
            what = f"{gradient} {self.rank}"
            grad = torch.empty_like(y)
            receive(grad, self.rank + 1, self.pp_backward, what)
            wait_for(sent)  # received long ago: the receiver has sent its gradient
        with self.record_event("backward", i):
            y.backward(grad)
        if not self.first:
            what = f"{gradient} {self.rank - 1}"
            sent = send(x.grad, self.rank - 1, self.pp_backward, what)
            self.pending_sends.append(sent)

    @contextmanager
    def record_event(self, phase: str, i: int):
        """Record when this stage computed, and by how much autograd's bytes changed.

        (lesson 05)"""
        before = self.held.now
        start = time.time()
        with self.held:
            yield
        if self.like.is_cuda:
            torch.cuda.synchronize()
        # A backward pass has two matrix products for each one of the forward pass.
        least = self.sleep if phase == "forward" else 2 * self.sleep
        time.sleep(max(0.0, start + least - time.time()))
        event = {"what": phase, "microbatch": i, "start": start, "end": time.time()}
        event["bytes"] = self.held.now - before  # negative where backward released them
        self.events.append(event)


def make_microbatches(
    batch: tuple, groups, num_microbatches: int, ragged: bool
) -> list[Tensor]:
    """This replica's rows of the batch, as M micro-batches of tokens and targets.

    (lesson 05)"""
    rows = shard(torch.stack(batch), 1, groups["dp"])
    micro_batches = split(rows, 1, num_microbatches)
    if ragged:
        for i, (tokens_bS, _) in enumerate(micro_batches):
            length = int((tokens_bS != PAD).any(0).sum())
            length += -length % groups["tp"].size()
            micro_batches[i] = micro_batches[i][..., :length].contiguous()
    return micro_batches


def broadcast_batch(batch: tuple, groups, args) -> list[Tensor]:
    """This replica's micro-batches: one rank of a TP group loads them, all get them.

    (lesson 05)"""
    micro_batches = [None] * args.microbatches
    if groups["tp"].rank() == 0:
        micro_batches = make_microbatches(batch, groups, args.microbatches, args.ragged)
    received = []
    for x in micro_batches:
        # Only the first rank knows how long the rows are.
        shape = torch.tensor([0, 0, 0] if x is None else x.shape, device=args.device)
        with COMM.label("mesh", "shapes"):
            shape = broadcast(shape, 0, groups["tp"]).tolist()
        if x is None:
            x = torch.empty(shape, dtype=torch.int64, device=args.device)
        received.append(broadcast(x, 0, groups["tp"]))
    return received


def count_targets(micro_batches: list[Tensor], dp_group) -> int:
    """Count the targets in the batch of all replicas: one all-reduce of one int64.

    (lesson 05)"""
    targets = sum((target != IGNORE).sum() for _, target in micro_batches)
    return all_reduce(targets, dp_group).item()


def part_of_mean(loss_bS: Tensor, batch_targets: int) -> Tensor:
    """What a micro-batch adds to the mean loss of the batch (lesson 05)."""
    return loss_bS.sum() / batch_targets


class FlatAdamW:
    """AdamW on a rank's parameters as one vector: one collective sums all gradients.

    (lesson 05)"""

    def __init__(self, parameters: dict[str, nn.Parameter], groups, zero: bool):
        self.parameters = parameters
        self.groups = groups
        self.zero = zero
        self.vector = nn.Parameter(self.local_slice(parameters))
        # lr and eps as in lesson 02's train_transformer, which says why.
        self.adamw = torch.optim.AdamW([self.vector], lr=3e-3, eps=1e-4)
        # The norm is summed over tp: what all T ranks hold counts 1/T on each.
        T = groups["tp"].size()
        norm_weights = {}
        for name, p in parameters.items():
            weight = 1.0 if shardings_of(p) else 1 / T
            norm_weights[name] = torch.full_like(p, weight)
        self.norm_weights = self.local_slice(norm_weights)

    def flatten(self, tensors: dict[str, Tensor]) -> Tensor:
        """One vector, padded, from one tensor per parameter (lesson 05)."""
        flat = torch.cat([tensors[name].detach().flatten() for name in self.parameters])
        return F.pad(flat, (0, -len(flat) % self.groups["dp"].size()))

    def local_slice(self, tensors: dict[str, Tensor]) -> Tensor:
        """What this replica updates of the flattened tensors: with `zero` a slice.

        (lesson 05)"""
        flat = self.flatten(tensors)
        return shard(flat, 0, self.groups["dp"]) if self.zero else flat

    def unflatten(self, vector: Tensor) -> dict[str, Tensor]:
        """One tensor per parameter, from what local_slice returned on each replica.

        (lesson 05)"""
        flat = (
            all_gather(vector, 0, self.groups["dp"]) if self.zero else vector.detach()
        )
        tensors = {}
        start = 0
        for name, p in self.parameters.items():
            tensors[name] = flat[start : start + p.numel()].view(p.shape)
            start += p.numel()
        return tensors

    def sum_over_replicas(self) -> None:
        """Sum gradients over dp: each replica has a part of the batch's gradient.

        (lesson 05)"""
        flat = self.flatten({name: p.grad for name, p in self.parameters.items()})
        if self.zero:
            self.vector.grad = reduce_scatter(flat, 0, self.groups["dp"])
        else:
            self.vector.grad = all_reduce(flat, self.groups["dp"])

    def step(self) -> None:
        """Update this replica's part, and copy all parts into the parameters.

        (lesson 05)"""
        self.adamw.step()
        for name, x in self.unflatten(self.vector).items():
            self.parameters[name].data.copy_(x)


class MeshTraining:
    """Training of one model on the whole mesh, seen from one rank (lesson 05)."""

    def __init__(self, full: Transformer, groups: dict[str, dist.ProcessGroup], args):
        self.groups = groups
        self.args = args
        pp = groups["pp"]
        model = sp_transformer(full, groups["tp"])
        is_tied = model.lm_head.weight is model.embed_tokens.weight
        is_first_or_last = pp.rank() in (0, pp.size() - 1)
        self.tied = model.lm_head.weight if is_tied and is_first_or_last else None
        names = {p: name for name, p in model.named_parameters()}
        self.stage = slice_stage(model, pp.rank(), pp.size())
        # Named as in the full model, where a tied head has the embedding's name.
        self.parameters = {names[p]: p for p in self.stage.parameters()}
        owned = dict(self.parameters)
        if self.tied is not None and pp.rank() > 0:
            del owned["embed_tokens.weight"]  # the last stage's copy
        self.optimizer = FlatAdamW(owned, groups, args.zero)
        self.pipeline = Pipeline(self.stage, self.loss, groups)
        self.steps = schedule(args.schedule, pp.rank(), pp.size(), args.microbatches)

    def loss(self, logits_bSv: Tensor, target_bS: Tensor) -> Tensor:
        """What a micro-batch adds to the mean loss, from sharded logits (lesson 03).

        (lesson 05)"""
        tp_group = self.groups["tp"]
        vocab_size = self.args.vocab_size
        with COMM.label("mesh", "loss"):
            loss_bS = vocab_parallel_cross_entropy(
                logits_bSv, target_bS, tp_group, vocab_size
            )
        return part_of_mean(loss_bS, self.batch_targets)

    def gradients(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Run forward and backward of a batch, then sum partial gradients over ranks.

        (lesson 05)"""
        groups = self.groups
        pipeline = self.pipeline
        micro_batches = [(None, None)] * self.args.microbatches
        # COMM.label does nothing but name the collectives inside, for section 7.
        with COMM.label("mesh", "batch"):
            if pipeline.first or pipeline.last:  # one needs tokens, the other targets
                micro_batches = broadcast_batch(batch, groups, self.args)
            if pipeline.last:
                self.batch_targets = count_targets(micro_batches, groups["dp"])
        loss = pipeline.run(self.steps, micro_batches)

        # Three sums, once per step: backward has added up all micro-batches in p.grad.
        # The first two may come in either order, because no parameter is in both: a
        # tied weight is sharded over tp. The sum over replicas copies p.grad into the
        # optimizer's vector, so p.grad has to be complete before it.
        with COMM.label("mesh", "tp sum"):
            all_reduce_replicated_gradients(self.stage, groups["tp"])
        if self.tied is not None:
            with COMM.label("mesh", "tied"):
                self.tied.grad = all_reduce(self.tied.grad, groups["embedding"])
        with COMM.label("mesh", "dp sum"):
            self.optimizer.sum_over_replicas()
        return loss

    def update(self) -> float:
        """Clip the gradient by its norm over the mesh, then step. Return the norm.

        (lesson 05)"""
        grad = self.optimizer.vector.grad
        squares = (grad.double().square() * self.optimizer.norm_weights).sum()
        with COMM.label("mesh", "norm"):
            squares = all_reduce(squares, self.groups["tp"])
            squares = all_reduce(squares, self.groups["pp"])
            if self.args.zero:  # otherwise every replica has the full gradient
                squares = all_reduce(squares, self.groups["dp"])
        norm = squares.sqrt().item()
        grad.mul_(min(1.0, self.args.clip / (norm + 1e-6)))
        with COMM.label("mesh", "update"):
            self.optimizer.step()
            if self.tied is not None:
                self.tied.data.copy_(broadcast(self.tied, 0, self.groups["embedding"]))
        self.stage.zero_grad()
        return norm


AXES = ("pp", "dp", "tp")  # outermost first


MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's names for them


class HeldTensor:
    """A tensor that autograd saved; Python calls __del__ when autograd releases it.

    (lesson 05)"""

    def __init__(self, tensor: Tensor, meter: HeldBytes):
        # Detached: a saved output that kept its history would keep itself alive.
        self.tensor = tensor.detach()
        self.meter = meter
        self.forward_pass = meter.forward_pass
        meter.change(self, +1)

    def __del__(self):
        self.meter.change(self, -1)


class HeldBytes(torch.autograd.graph.saved_tensors_hooks):
    """Bytes that autograd holds for backward: now, and at the peak since reset().

    (lesson 05)"""

    def __init__(self, module: nn.Module):
        super().__init__(lambda x: HeldTensor(x, self), lambda held: held.tensor)
        stored = list(module.parameters()) + list(module.buffers())
        self.ignored = {self.key_of(x) for x in stored}
        self.in_storage = Counter()  # storage → saved tensors in it
        self.of_pass = Counter()  # forward pass → its tensors that are still held
        self.forward_pass = 0
        self.now = 0
        self.reset()

    def __enter__(self):
        self.forward_pass += 1
        super().__enter__()

    def reset(self) -> None:
        self.peak = self.now
        self.peak_passes = len(self.of_pass)

    @staticmethod
    def key_of(x: Tensor) -> int:
        return x.untyped_storage().data_ptr()

    def change(self, held: HeldTensor, by: int) -> None:
        """Count a saved tensor in (by = 1), or out (by = −1) (lesson 05)."""
        key = self.key_of(held.tensor)
        if key in self.ignored:
            return
        before = self.in_storage[key]
        self.in_storage[key] += by
        if before == 0:
            self.now += held.tensor.untyped_storage().nbytes()
        elif self.in_storage[key] == 0:
            self.now -= held.tensor.untyped_storage().nbytes()
        self.of_pass[held.forward_pass] += by
        if self.of_pass[held.forward_pass] == 0:
            del self.of_pass[held.forward_pass]
        self.peak = max(self.peak, self.now)
        self.peak_passes = max(self.peak_passes, len(self.of_pass))


def gather_stages(training: MeshTraining, tensors: dict) -> dict[str, Tensor]:
    """Unsharded tensors of all stages, by name; this rank's own where it has them.

    (lesson 05)"""
    local = {}
    for name, x in tensors.items():
        p = training.parameters[name]
        x = unshard(x.detach(), shardings_of(p))
        local[name] = x[: getattr(p, "rows", None)].cpu().clone()
    unsharded = {}
    for of_stage in gather_objects(local, training.groups["pp"]):
        unsharded.update(of_stage)
    unsharded.update(local)
    return unsharded


NEEDS = {"order": "pp", "leak": "pp", "tied": "pp", "replicas": "dp", "group": "dp"}


FROM_MESH = {  # flag → what it is; 0 stands for "not given"
    "dp": "DP, replicas (derived from the number of ranks)",
    "pp": "P, pipeline stages (derived from the number of ranks)",
    "tp": "T, ranks of a TP group (derived from the number of ranks)",
    "microbatches": "M per step and replica (4, or P if larger)",
    "layers": "L (4, or P if larger)",
    "batch_size": "B, rows (16, or the next multiple of DP·M)",
    "seq_len": "S (32; 64 with --ragged, so that lengths differ)",
    "hidden": "D (8 per head)",
    "heads": "N (2 per key/value head)",
    "kv_heads": "K (4, or the next multiple of T)",
}


def fill_mesh(args, ranks: int) -> None:
    """Give each axis without a flag 2 ranks if it can, and the last one all the rest.

    (lesson 05)"""
    needed = NEEDS.get(args.bug, "pp")  # is filled first: two ranks are a pipeline
    given = [axis for axis in AXES if getattr(args, axis)]
    free = [axis for axis in AXES if axis not in given]
    free.sort(key=lambda axis: axis != needed)  # stable: the others stay in order
    product = 1
    for axis in given:
        product *= getattr(args, axis)
    if ranks % product or (ranks > product and not free):
        text = " × ".join(f"--{axis} {getattr(args, axis)}" for axis in given)
        text = f"{text} = {product}, but there are {ranks} ranks"
        raise ValueError(f"{text}; start {product} (--nproc_per_node={product})")
    left = ranks // product
    for axis in free:
        is_halved = left % 2 == 0 and axis != free[-1]
        setattr(args, axis, 2 if is_halved else left)
        left //= getattr(args, axis)
    if args.bug in NEEDS and getattr(args, needed) == 1:
        raise ValueError(f"--break {args.bug} needs --{needed} 2 or more")


def fill_sizes(args) -> None:
    """Fill in sizes that the mesh divides. ValueError for one that it does not.

    (lesson 05)"""
    kv_heads = args.tp * math.ceil(4 / args.tp)
    args.heads = args.heads or 2 * math.lcm(args.kv_heads or kv_heads, args.tp)
    args.kv_heads = args.kv_heads or math.gcd(args.heads, kv_heads)
    args.hidden = args.hidden or 8 * args.heads
    args.dropout = 0.0
    args.seq_len = args.seq_len or (64 if args.ragged else 32)
    args.layers = args.layers or max(4, args.pp)
    args.microbatches = args.microbatches or max(4, args.pp)
    parts = args.dp * args.microbatches
    args.batch_size = args.batch_size or parts * math.ceil(16 / parts)
    must_divide(args, "batch_size", parts, "(--dp · --microbatches)")
    must_divide(args, "heads", args.tp, "(--tp)")
    if args.kv_heads < args.tp:
        reason = f"fewer than --tp {args.tp} (possible in beyond/09_shared_heads.py)"
        refuse(args, "kv_heads", reason, args.tp)
    must_divide(args, "kv_heads", args.tp, "(--tp)")
    must_divide(args, "heads", args.kv_heads, "(--kv-heads)")
    must_divide(args, "hidden", 2 * args.heads, "(2 · --heads: rotary pairs)")
    if args.layers < args.pp:
        refuse(args, "layers", f"fewer than --pp {args.pp}", args.pp)
    raise_refused(args)
    if args.vocab_size <= PAD:
        raise ValueError(f"--vocab-size {args.vocab_size}: 256 bytes and PAD need 257")
    if args.hidden < 4:
        raise ValueError("--hidden 2: LayerNorm makes ±1 of any 2 numbers; take 4")
    if not args.clip > 0:
        raise ValueError(f"--clip {args.clip}: must be above 0")
    if not 0 <= args.sleep < 1e5:
        raise ValueError(f"--sleep {args.sleep}: must be at least 0 and below 100000")


# endregion


# ==== HARNESS, the same in every lesson
# region  It counts, compares, prints tables and explains errors. Skip it at first.

# The imports are here, so that a lesson begins with its subject.
import argparse
import ctypes
import gc
import inspect
import json
import os
import re
import shlex
import signal
import sys
import textwrap
import time
import traceback
from collections import Counter
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path


class Call(NamedTuple):
    """Calls with the same four labels are counted together."""

    run: str
    phase: str
    collective: str
    axis: str


class CommCounter:
    """Counts collectives, and tells other ranks which one this rank is in."""

    def __init__(self):
        self.calls = Counter()  # Call → number of calls
        self.bytes = Counter()  # Call → bytes of payload
        self.run = ""
        self.phase = ""
        self.store = None  # key-value store that all ranks share
        self.status = "in no call"
        self.entered = Counter()  # number of calls this rank has entered, by group

    @contextmanager
    def label(self, run: str, phase: str):
        """Within `with`: collectives are counted as this phase of this run."""
        before = [self.run, self.phase]
        self.run = run
        self.phase = phase
        try:
            yield
        finally:  # calls without a label are the report's own and are in no table
            self.run, self.phase = before

    def count(self, collective: str, nbytes: int, axis: str) -> None:
        call = Call(self.run, self.phase, collective, axis)
        self.calls[call] += 1
        self.bytes[call] += nbytes

    @contextmanager
    def record(self, collective: str, x: Tensor, group, copies: int = 1):
        """Around one collective with a payload of copies · x.nbytes bytes."""
        axis = group.group_desc
        self.count(collective, copies * x.nbytes, axis)
        ranks = dist.get_process_group_ranks(group)
        with self.blocking(f"{collective} of {list(x.shape)} over {axis}", ranks):
            yield

    @contextmanager
    def blocking(self, call: str, ranks: list[int]):
        """Around a call that returns only after all these ranks have entered it."""
        before = self.status
        # The n-th call of one rank is matched with the n-th call of the others.
        self.entered[str(ranks)] += 1
        self.set_status(f"in call {self.entered[str(ranks)]} of ranks {ranks}, {call}")
        yield
        self.set_status(before)  # not after an error: this rank is still in the call

    def set_status(self, status: str) -> None:
        """Write down where this rank is, so that others can read it after an error."""
        self.status = status
        if self.store is not None:
            self.store.set(f"status/{dist.get_rank()}", status)

    def all_raised(self, run: str, error: Exception) -> bool:
        """Did every rank raise the same error in this run?"""
        text = f"{type(error).__name__}: {error}"
        keys = [f"raised/{run}/{rank}" for rank in range(dist.get_world_size())]
        self.store.set(keys[dist.get_rank()], text)
        try:
            self.store.wait(keys, timedelta(seconds=5))
        except RuntimeError:  # some rank did not raise
            return False
        return all(self.store.get(key).decode() == text for key in keys)


COMM = CommCounter()
ALLOWED_LOSS = {"float32": 1e-6, "float64": 1e-12}  # relative difference of a loss
ALLOWED = {"float32": 1e-5, "float64": 1e-12}  # of any other tensor
# The verdict names the worst failure of each kind of check: likely causes first.
CAUSES_FIRST = "runs outputs gradients replicas norms losses parameters".split()


def rel_diff(got, expected) -> float:
    """max|got − expected| / max|expected|; inf for nan and for another shape."""
    got = torch.as_tensor(got, dtype=torch.float64).detach().cpu()
    expected = torch.as_tensor(expected, dtype=torch.float64).detach().cpu()
    if got.shape != expected.shape:
        return math.inf
    if torch.equal(got, expected):
        return 0.0
    diff = ((got - expected).abs().max() / expected.abs().max()).item()
    return math.inf if math.isnan(diff) else diff


def evaluate(formula: str, size: dict[str, int]) -> int:
    """The value of a formula as it is printed: 2·L·B·S·D/T is 2 * L * B * S * D / T."""
    return round(eval(formula.replace("·", "*"), {}, size))


def gather_objects(value, group=None) -> list:
    """The value of every rank of a group, in order: for the report, not counted."""
    values = [None] * dist.get_world_size(group)
    with COMM.blocking("gathering of results", dist.get_process_group_ranks(group)):
        dist.all_gather_object(values, value, group)
    return values


class Report:
    """Rank 0 prints, every rank checks, --json keeps the rows of all tables."""

    def __init__(self, lesson: str, args):
        self.args = args
        self.checks = {}  # "kind: name" → kind, diff, allowed, ok
        self.raised = {}  # run → the error that ended it
        self.mesh = {}  # axis → ranks
        self.number = 0  # of the section
        self.allowed_loss = ALLOWED_LOSS[args.dtype]
        self.allowed = ALLOWED[args.dtype]
        self.data = {"lesson": lesson, "world_size": args.ranks, "dtype": args.dtype}

    def begin(self, mesh: dict[str, int], size: dict[str, int]) -> None:
        """Print the first two lines. size: letter of the shape legend → number."""
        self.mesh = mesh
        self.data["mesh"] = mesh
        self.data["size"] = size
        axes = " × ".join(f"{axis} {ranks}" for axis, ranks in mesh.items())
        where = f"{dist.get_backend()} on {self.args.device}  {self.args.dtype}"
        print(f"{self.data['lesson']}  ranks {self.args.ranks}, mesh {axes}  {where}")
        print("  ".join(f"{letter} {number}" for letter, number in size.items()))
        steps = getattr(self.args, "steps", 0)
        if steps > 100:
            print(f"First the reference takes {steps} steps; nothing is printed then.")

    def section(self, title: str) -> None:
        self.number += 1
        self.say(f"\n{self.number}  {title}")

    def say(self, text: str) -> None:
        if self.args.only in (None, self.number):
            print(text, flush=True)

    def check(self, kind: str, name: str, diff: float, allowed: float = 0.0) -> bool:
        """Record one comparison of this rank. Return whether it holds."""
        name = f"{kind}: {name}"
        assert name not in self.checks, f"two checks are called {name}"
        ok = diff <= allowed  # False for nan
        self.checks[name] = {"kind": kind, "diff": diff, "allowed": allowed, "ok": ok}
        return ok

    def expect(self, row: dict, column: str, kind: str, name: str, predicted) -> None:
        """Check that a cell of a row equals its predicted value."""
        off = row.setdefault("off", [])
        if not self.check(kind, name, abs(row[column] - predicted)):
            off.append(column)
        row.setdefault("predicted", {})[column] = f"{name}: predicted {predicted:,}"

    @contextmanager
    def column(self, run: str):
        """Around one run: if all ranks raise the same error, only this run ends."""
        try:
            yield
        except Exception as error:
            if is_lost(error) or not COMM.all_raised(run, error):
                raise
            COMM.set_status("in no call")
            if dist.get_rank() == 0:
                traceback.print_exception(error)
            self.raised[run] = f"{type(error).__name__}: {first_line(error)}"
            print(wrap(f"   {run} raised {self.raised[run]}"), flush=True)
        self.check("runs", f"{run} completes", int(run in self.raised))

    def table(self, key: str, rows: list[dict], hide: list[str] = ()) -> None:
        """Print rows that have the same columns; --json keeps them under `key`.

        row["off"] lists the cells that failed a check on this rank. Cells that failed
        on any rank are marked ✗. row["predicted"] maps a cell to what was predicted for
        it, printed below the table if it failed. hide: columns to keep, not to print.
        """
        for rank, rows_of_rank in enumerate(gather_objects(rows)):
            for place, other in enumerate(rows_of_rank):
                merge_row(find_row(rows, other, place), other, rank)
        for row in rows:
            if "off" in row:
                row["ok"] = not row["off"]
        self.data.setdefault(key, []).extend(rows)
        if rows:
            self.print_rows(rows, hide)

    def print_rows(self, rows: list[dict], hide: list[str]) -> None:
        lines = [" "] * (len(rows) + 1)  # they grow column by column
        for name in rows[0]:
            if name in hide or name in ("off", "off_ranks", "predicted"):
                continue
            texts = [name]
            for row in rows:
                mark = "✗" if name in row.get("off", []) else ""
                texts.append(cell(name, row[name]) + mark)
            width = max(len(text) for text in texts)
            pad = str.ljust if isinstance(rows[0][name], str) else str.rjust
            for i, text in enumerate(texts):
                lines[i] += "  " + pad(text, width)
        for row in rows:
            lines.extend(explain_row(row))
        self.say("\n".join(line.rstrip() for line in lines))

    def compare(self, key: str, runs: dict, allowed: float = 0.0, fold=str) -> None:
        """Compare numbers or tensors of several runs, each with the first run.

        runs: run → name → value. fold: name → label of its row. A row shows the norm of
        all its values and the largest relative difference of any of them.
        """
        allowed = allowed or self.allowed
        nothing = torch.empty(0)  # stands for what a run does not have
        names = {}  # of all runs, in order
        for values in runs.values():
            names.update(dict.fromkeys(values))
        reference = next(iter(runs.values()))
        rows = {}
        for name in names:
            label = fold(name)
            if label not in rows:
                rows[label] = {"name": label}
                rows[label].update(dict.fromkeys(runs, 0.0))
                rows[label].update(dict.fromkeys(self.raised, "raised"))
                if len(runs) > 1:  # otherwise there is nothing to compare with
                    rows[label].update({"diff": 0.0, "off": []})
            row = rows[label]
            for run, values in runs.items():
                value = values.get(name, nothing)
                norm = torch.as_tensor(value, dtype=torch.float64).detach().norm()
                row[run] = math.hypot(row[run], norm)
                if values is reference:
                    continue
                diff = rel_diff(value, reference.get(name, nothing))
                row["diff"] = max(row["diff"], diff)
                if not self.check(key, f"{name}, {run}", diff, allowed):
                    row["off"].append(run)
        self.table(key, list(rows.values()))

    def ledger(self, formulas: dict[Call, str], size: dict, steps=1, hide=()) -> None:
        """Check the calls and bytes of one step, as counted, against formulas.

        formulas: Call → "calls × bytes per call", as it is printed and evaluated. Calls
        of different sizes: "1 × 8 and 2·L × D·e".
        """
        runs = {call.run for call in formulas}.difference(self.raised)
        rows = []
        # Calls that no formula predicts get a row as well.
        for call in dict.fromkeys(list(formulas) + list(COMM.calls)):
            ranks = self.mesh.get(call.axis, 1)
            if call.run not in runs or ranks == 1:  # one rank sends nothing
                continue
            formula = formulas.get(call, "0 × 0")
            calls = 0
            nbytes = 0
            for product in formula.split(" and "):
                factors = [evaluate(factor, size) for factor in product.split(" × ")]
                calls += factors[0]
                # Multiplied before rounding: a size may be a mean over micro-batches.
                nbytes += evaluate(f"({product})".replace(" × ", ")·("), size)
            if calls == 0 and COMM.calls[call] == 0:
                continue
            row = call._asdict()
            row["calls"] = per_step(COMM.calls[call], steps)
            row["bytes"] = per_step(COMM.bytes[call], steps)
            row["formula"] = formula
            row["ring"] = ring_bytes(call.collective, row["bytes"], ranks)
            name = " ".join(call)
            self.expect(row, "calls", "calls", name, calls)
            self.expect(row, "bytes", "bytes", name, nbytes)
            rows.append(row)
        # A column with one value in all rows (one axis, one phase) is left out.
        hide = list(hide)
        for column in ("phase", "axis"):
            if len({row[column] for row in rows}) < 2:
                hide.append(column)
        self.table("communication", rows, hide)

    def merge_checks(self) -> list[dict]:
        """The checks of all ranks: the largest diff, and the ranks where it fails."""
        merged = {}
        for rank, checks in enumerate(gather_objects(self.checks)):
            for name, check in checks.items():
                if name not in merged:
                    merged[name] = dict(check, name=name, ranks=[])
                merged[name]["diff"] = max(merged[name]["diff"], check["diff"])
                if not check["ok"]:
                    merged[name]["ok"] = False
                    merged[name]["ranks"].append(rank)
        return list(merged.values())

    def verdict(self) -> str:
        """PASS or FAIL; above FAIL, the worst failed check of each kind."""
        checks = sorted(self.merge_checks(), key=lambda check: -check["diff"])
        kinds = dict.fromkeys(CAUSES_FIRST)
        kinds.update(dict.fromkeys(check["kind"] for check in checks))
        counts = []
        print()
        for kind in kinds:
            of_kind = [check for check in checks if check["kind"] == kind]
            failed = [check for check in of_kind if not check["ok"]]
            if failed:
                worst = failed[0]
                diff = f"off by {worst['diff']:.3g}, allowed {worst['allowed']:.3g}"
                print(wrap(f"✗ {worst['name']}: {diff}, on ranks {worst['ranks']}"))
                counts.append(f"{kind} {len(failed)}/{len(of_kind)}")
        text = f"failed: {', '.join(counts)}"
        if not counts:
            text = f"{len(checks)} checks, worst difference {checks[0]['diff']:.1e}"
            text += f" (allowed {checks[0]['allowed']:.0e})"
        self.data["verdict"] = "FAIL" if counts else "PASS"
        self.data["checks"] = checks
        if self.args.json and dist.get_rank() == 0:
            self.args.json.write_text(json.dumps(self.data, indent=1))
        return wrap(f"{self.data['verdict']}  {self.data['lesson']}  {text}")


def per_step(count: int, steps: int):
    """count / steps, as an int if it is a whole number."""
    return count // steps if count % steps == 0 else count / steps


def find_row(rows: list[dict], other: dict, place: int) -> dict:
    """The row with the same label as another rank's row, which is row `place` there.

    Pipeline stages may have different rows. A row that failed is added if it is new.
    """
    if place < len(rows) and label_of(rows[place]) == label_of(other):
        return rows[place]
    for row in rows:
        if label_of(row) == label_of(other):
            return row
    if other.get("off"):
        rows.append(dict(other, off=[]))
        return rows[-1]
    return {}


def label_of(row: dict) -> list[str]:
    """The texts that a row begins with; no texts if it begins with a number."""
    label = []
    for value in row.values():
        if not isinstance(value, str):
            break
        label.append(value)
    return label


def merge_row(row: dict, other: dict, rank: int) -> None:
    """Add to a row what the same row of another rank says about failed checks."""
    for column in other.get("off", []):
        if column not in row["off"]:
            row["off"].append(column)
    if other.get("off"):
        row.setdefault("off_ranks", []).append(rank)
    if "diff" in row:
        row["diff"] = max(row["diff"], other["diff"])


def explain_row(row: dict) -> list[str]:
    """Lines below a table: what was predicted, and where, if a check failed."""
    lines = []
    for column in row.get("off", []):
        if column in row.get("predicted", {}):
            lines.append(f"   ✗ {column} of {row['predicted'][column]}")
    ranks = row.get("off_ranks", [])
    if ranks and 0 not in ranks:
        label = next(iter(row.values()))
        lines.append(f"   ✗ {label}: fails on ranks {ranks}, not on rank 0")
    return lines


def cell(name: str, value) -> str:
    """A value as a table shows it."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "ok" if value else "✗"
    if isinstance(value, float):
        return f"{value:.1e}" if name == "diff" else f"{value:#.7g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def wrap(text: str) -> str:
    return textwrap.fill(text, 88, subsequent_indent="  ", break_on_hyphens=False)


class Parser(argparse.ArgumentParser):
    def error(self, message):  # argparse would print its usage, on every rank
        raise ValueError(message)


def lesson_parser(doc: str, breaks: dict, sections: int, **sizes: int) -> Parser:
    """The flags that all lessons share, and integer flags with their defaults.

    sections: how many sections the output has. sizes: flag → default; 0 for a default
    that is derived from the mesh.
    """
    parser = Parser(
        description=(doc or "").partition("How to read")[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    for name, default in dict(sizes, seed=1, timeout=60).items():
        text = f"(default {default or 'derived from the mesh'})"
        flag = f"--{name.replace('_', '-')}"
        add(flag, type=positive, default=default, help=text)
    text = "float64 separates bugs from rounding errors"
    add("--dtype", choices=list(ALLOWED), default="float32", help=text)
    numbers = range(1, sections + 1)
    text = f"print only section N, 1 to {sections}"
    add("--only", type=int, choices=numbers, metavar="N", help=text)
    names = list(breaks) + ["list"]
    text = "inject a bug; `--break list` names them all"
    add("--break", dest="bug", choices=names, metavar="NAME", help=text)
    add("--json", type=Path, metavar="PATH", help="write all tables and checks there")
    return parser


def positive(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 2**31:
        raise argparse.ArgumentTypeError(f"{text} is not one of 1, 2, …, 2^31 − 1")
    return int(text)


def apply_edit(edit: dict, module: dict) -> None:
    """Replace the target of a bug, a name or Class.name, by its edited copy.

    In a script of beyond/ the target may be a lesson's: every module that has it under
    its name gets the edited copy.
    """
    owner, _, name = edit["target"].rpartition(".")
    modules = [getattr(other, "__dict__", {}) for other in sys.modules.values()]
    modules = [other for other in modules if other.get("COMM") is COMM]
    home = next(other for other in [module, *modules] if (owner or name) in other)
    definition = getattr(home[owner], name) if owner else home[name]
    source = textwrap.dedent(inspect.getsource(definition))
    if source.count(edit["old"]) != 1:
        raise ValueError(f"{edit['target']} has not exactly once: {edit['old']}")
    scope = {}  # where the edited copy is defined
    names = getattr(definition, "__globals__", home)  # that the copy may use
    exec(source.replace(edit["old"], edit["new"]), names, scope)
    if owner:
        setattr(home[owner], name, scope[name])
        return
    for other in [module, *modules]:
        if other.get(name) is definition:
            other[name] = scope[name]


def edit_as_diff(name: str, edit: dict) -> str:
    lines = [wrap(f"--break {name}: {edit['what']}; in {edit['target']}:")]
    lines.extend(f"- {line}" for line in edit["old"].splitlines())
    lines.extend(f"+ {line}" for line in edit["new"].splitlines())
    return "\n".join(lines) + "\n"


def diagnosis_of(edit: dict) -> str:
    """Symptom and cause of a bug, where it was reported, and what the audit says."""
    lines = [wrap(f"{word}: {edit[word]}") for word in ("symptom", "why", "reported")]
    if "audit" in edit:  # how it is found in a model of your own
        lines.append(wrap(f'audit: tools/audit.py reports it as "{edit["audit"]} …"'))
    return "\n".join(lines)


def first_line(error: Exception) -> str:
    """An error's first line, without the [source.cpp:123] that gloo puts in front."""
    return re.sub(r"^(\[.*?] )+", "", str(error)).partition("\n")[0]


def is_lost(error: Exception) -> bool:
    """Is it the transport's: a timeout, or a connection that the other end closed?"""
    # The last two are what TORCH_DISTRIBUTED_DEBUG=DETAIL reports instead of a timeout.
    words = "[Tt]imed? ?out|clos|[Rr]eset|[Bb]roken pipe|monitoredBarrier|mismatch"
    is_found = re.search(words, first_line(error)) is not None
    return isinstance(error, RuntimeError) and is_found


def who_is_missing(statuses: list[str]) -> str:
    """What the statuses of all ranks say for certain; no rank is blamed on a guess."""
    waiting = []
    missing = []
    for rank, status in enumerate(statuses):
        ranks = waiting if status.startswith("in call") else missing
        ranks.append(rank)
    if not waiting:
        return "a call failed that is not one of the lesson's own"
    if missing:
        who = f"rank {missing[0]} is" if len(missing) == 1 else f"ranks {missing} are"
        text = f"{who} not in a collective, while ranks {waiting} are waiting in one: "
        return text + "it hung, crashed or skipped a call"
    if len(set(statuses)) == 1:
        return "a collective failed although every rank had entered it"
    text = f"ranks {waiting} are waiting in different calls: "
    return text + "one skipped or reordered a call, or died in it"


def describe_hang(error: Exception) -> str:
    """Which call each rank is in, by what it wrote down itself."""
    ranks = range(dist.get_world_size())
    statuses = [COMM.store.get(f"status/{rank}").decode() for rank in ranks]
    lines = [wrap(f"error: {who_is_missing(statuses)}")]
    for rank in ranks:
        lines.append(f"  rank {rank}: {statuses[rank]}"[:88])
    silent = [rank for rank in ranks if not COMM.store.check([f"failed/{rank}"])]
    if silent:  # the others have waited 3 seconds for it
        text = f"  no error was raised on ranks {silent} so far: they hang, "
        lines.append(wrap(text + "are stopped, or are still computing"))
    lines.append(wrap(f"  transport: {first_line(error)[:150]}"))
    return "\n".join(lines)


def fail(error: Exception, diagnosis: str) -> None:
    """Report an error once for all ranks, then end this rank."""
    text = first_line(error)
    if COMM.store is None:
        message = f"error: the ranks did not join one process group: {error}"
        exit_rank(1, wrap(message), is_reporter=True)
    COMM.store.set(f"failed/{dist.get_rank()}", text)
    if is_lost(error):  # let others write where they are; torchrun may name a dead one
        time.sleep(3)
    is_reporter = COMM.store.add("reported", 1) == 1
    code = 1
    too_large = re.search(r"tried to allocate \S+ \w+|overflowed.*", text, re.I)
    if too_large:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9
        code = 2
        message = f"error: too large: {too_large[0]}; this machine has {total:.0f} GB"
    elif is_lost(error):
        message = describe_hang(error)
    else:
        name = type(error).__name__
        message = wrap(f"error: rank {dist.get_rank()} raised {name}: {text}")
        if is_reporter and not isinstance(error, OSError):
            traceback.print_exception(error)
    exit_rank(code, f"{message}\n{diagnosis}".strip(), is_reporter)


def exit_rank(code: int, message: str, is_reporter: bool) -> None:
    """End this rank at once: cleaning up while others are in a collective can hang."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:  # for torchrun's report
        # torchrun calls the earliest failure the root cause: the one that is printed.
        seconds = int(time.time()) + (0 if is_reporter else 3600)
        extra = {"timestamp": str(seconds)}
        details = {"message": {"message": message, "extraInfo": extra}}
        Path(path).write_text(json.dumps(details))
    sys.stdout.flush()
    if is_reporter:
        print(message, file=sys.stderr, flush=True)
    else:
        time.sleep(2)  # torchrun reports the first rank that ends
    os._exit(code)


def read_flags(parse_args, module: dict) -> argparse.Namespace:
    """The command line; the process ends here if it is wrong, or asks for a list."""
    try:
        if not module["__doc__"]:
            raise ValueError("PYTHONOPTIMIZE=2 removes docstrings, our training text")
        ranks = int(os.environ.get("WORLD_SIZE", 1))
        args = parse_args(ranks)
        if args.bug == "list":
            for name, edit in module["BREAKS"].items():
                print(f"{name:<14}{edit['what']}")
            sys.exit(0)
        if args.bug and ranks == 1:
            raise ValueError("--break needs 2 ranks or more: one rank shows no bug")
        if args.json:
            args.json.open("a").close()
    except (ValueError, OSError) as error:
        # One rank of each host reports: on several hosts the flags may differ.
        is_reporter = os.environ.get("LOCAL_RANK", "0") == "0"
        exit_rank(2, wrap(f"error: {error}"), is_reporter)
    args.ranks = ranks
    args.device = "cpu"
    args.backend = "gloo"
    if torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1)):
        args.device = f"cuda:{os.environ['LOCAL_RANK']}"
        args.backend = "nccl"
        torch.cuda.set_device(args.device)
    return args


def join_group(backend: str, limit: timedelta) -> dist.Store:
    """Join all ranks' process group. Return the store that they share."""
    store, rank, ranks = next(dist.rendezvous("env://", timeout=limit))
    # After a restart by torchrun the store still has what the last attempt wrote.
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"attempt {restarts}", store)
    dist.init_process_group(
        backend, timeout=limit, store=store, rank=rank, world_size=ranks
    )
    return store


def end_with_torchrun() -> None:
    """If torchrun is killed, Linux kills this rank as well, even if it sleeps."""
    if sys.platform == "linux":
        at_end_of_parent = 1  # PR_SET_PDEATHSIG of <linux/prctl.h>
        ctypes.CDLL(None).prctl(at_end_of_parent, signal.SIGKILL)


def add_bug(args, module: dict, diagnosis: str) -> None:
    """Edit the lesson for --break. If torchrun ends this rank, print the diagnosis."""

    def on_sigterm(*_):
        exit_rank(1, diagnosis, is_reporter=COMM.store.add("reported", 1) == 1)

    signal.signal(signal.SIGTERM, on_sigterm)
    args.timeout = min(args.timeout, 15)  # of the lesson's groups: the bug may hang
    apply_edit(module["BREAKS"][args.bug], module)
    print(edit_as_diff(args.bug, module["BREAKS"][args.bug]), flush=True)


def launch(main, parse_args, module: dict) -> None:
    """One rank of a lesson, from its command line to its exit code."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C works wherever it waits
    gc.freeze()  # what imports made stays: gc.collect() below need not look at it
    asks = any(flag in sys.argv for flag in ("-h", "--help", "list"))
    if "LOCAL_RANK" not in os.environ and not asks:
        # The command is in the lesson's docstring; flags are those that were given.
        command = "torchrun --standalone --nproc_per_node=2"
        if module["__doc__"]:
            command = re.search(r"torchrun \S+ \S+", module["__doc__"])[0]
        print("start it with torchrun, which starts the ranks:\n")
        print(f"    {command} {shlex.join(sys.argv)}")
        sys.exit(2)
    if os.environ.get("RANK", "0") != "0":
        sys.stdout = open(os.devnull, "w")  # only rank 0 prints
    sys.stdout.reconfigure(errors="replace")  # a terminal may not know our · and →
    args = read_flags(parse_args, module)
    end_with_torchrun()
    torch.set_num_threads(1)  # ranks share the cores: more threads would be slower
    torch.manual_seed(args.seed)
    diagnosis = diagnosis_of(module["BREAKS"][args.bug]) if args.bug else ""
    try:
        COMM.store = join_group(args.backend, timedelta(seconds=args.timeout))
        COMM.set_status("in no call")
        if args.bug:
            add_bug(args, module, diagnosis)
        report = Report(Path(module["__file__"]).stem, args)
        main(args, report)
        line = report.verdict()
        print(f"{diagnosis}\n{line}".strip(), flush=True)
        with COMM.blocking("the last barrier", list(range(args.ranks))):
            dist.barrier()
    except Exception as error:
        fail(error, diagnosis)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # everything has been reported
    gc.collect()  # references to a group must be gone before the group is destroyed
    dist.destroy_process_group()
    if line.startswith("FAIL"):
        exit_rank(1, line, is_reporter=False)
    os._exit(0)  # a normal exit can abort: DTensor's caches still hold groups there


# endregion


if __name__ == "__main__":
    launch(main, parse_args, globals())
