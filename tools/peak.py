"""How many bytes one rank of your model allocates, by phase, on a laptop.

    python tools/peak.py my_model.py --ranks 256

The file is a case of tools/audit.py: build, parallelize, batch and, if it has them,
loss and optimizer. `parallelize` gets the group of all ranks; it may make a mesh of
them.
This process is rank 0. The other ranks do not exist: PyTorch's "fake" process group
sends nothing. Tensors are FakeTensors: they have a shape, a dtype and a storage with a
size, and no memory. Live adds up the storages that are alive after each operation.

The bytes are those that PyTorch allocates. What the allocator of a GPU reserves is more
(tools/published.py); CUDA, NCCL and a kernel's own workspace are not here.
"""

import contextlib
import os
import signal
import sys
import textwrap
import traceback
import weakref
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from audit.command import Parser, WrongUse, check_file
from audit.rank import default_loss, load_subject
from audit.record import outputs_of
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode

TORCH = str(Path(torch.__file__).parent)


class Live(TorchDispatchMode):
    """Bytes of all storages that are alive, after each operation.

    peaks: phase → the most bytes, and where that was. held: phase → bytes at its end.
    curve: (phase, bytes) of each operation.
    """

    def __init__(self, fake_mode=None):
        super().__init__()
        self.fake_mode = fake_mode
        self.is_off = False
        self.storages = {}  # key of a storage → a weak reference to it
        self.phase = "build"
        self.peaks = {}
        self.held = {}
        self.curve = []

    def start(self, phase: str) -> None:
        """What follows belongs to this phase."""
        self.held[self.phase] = self.now()
        self.phase = phase

    def add(self, x) -> None:
        if isinstance(x, DTensor):
            x = x.to_local()
        if not isinstance(x, torch.Tensor):
            return
        if getattr(x, "fake_mode", self.fake_mode) is not self.fake_mode:
            return  # of DTensor's own computation of shapes
        storage = x.untyped_storage()
        key = storage._cdata
        known = self.storages.get(key)
        if known is None or known() is None:
            self.storages[key] = weakref.ref(storage)

    def now(self) -> int:
        """fully_shard resizes storages, so all are asked for their size."""
        total = 0
        for key, reference in list(self.storages.items()):
            storage = reference()
            if storage is None:
                del self.storages[key]
            else:
                total += storage.nbytes()
        return total

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # it comes again with the local tensors
        out = func(*args, **(kwargs or {}))
        if self.is_off:
            return out
        for x in pytree.tree_leaves(out):
            self.add(x)
        nbytes = self.now()
        self.curve.append((self.phase, nbytes))
        if nbytes > self.peaks.get(self.phase, (0, ""))[0]:
            self.peaks[self.phase] = nbytes, where(func)
        return out


def where(func) -> str:
    """The operation, and the line of the user's code that called it: in backward the
    line whose forward recorded the node."""
    node = torch._C._current_autograd_node()
    frames = traceback.extract_stack()
    texts = [(f.filename, f.lineno, f.name) for f in frames]
    name = str(func)
    if node is not None:
        name = f"{name} ({node.name()})"
        texts = []
        for text in node.metadata.get("traceback_", []):
            head = text.strip().split("\n")[0].split(", ")
            if len(head) == 3 and head[0].startswith('File "'):
                texts.append((head[0][6:-1], head[1][5:], head[2][3:]))
    for path, line, function in reversed(texts):
        if not path.startswith((TORCH, "<")) and path != __file__:
            return f"{name} at {os.path.basename(path)}:{line} in {function}"
    return name


@contextlib.contextmanager
def one_of(ranks: int, is_fake=True):
    """This process is rank 0 of N ranks; the others do not exist. Yields Live."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True) if is_fake else None
    live = Live(fake_mode)
    make_mesh = DeviceMesh.__init__

    def real_mesh(*args, **kwargs):  # a mesh is read, so it needs numbers
        with unset_fake_temporarily():
            return make_mesh(*args, **kwargs)

    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(mock.patch.object(DeviceMesh, "__init__", real_mesh))
            for name in vars(ShardingPropagator):
                if "tensor_meta" in name:
                    quiet = unseen(live, getattr(ShardingPropagator, name))
                    stack.enter_context(
                        mock.patch.object(ShardingPropagator, name, quiet)
                    )
            yield live
    finally:
        dist.destroy_process_group()


def unseen(live: Live, function):
    """DTensor computes shapes with tensors of the full size, which no rank holds."""

    def wrapped(*args, **kwargs):
        before, live.is_off = live.is_off, True
        try:
            return function(*args, **kwargs)
        finally:
            live.is_off = before

    return wrapped


def measure(case, ranks: int, steps=2, is_fake=True, says_where=True) -> Live:
    """Steps of training; what the last one allocates, by phase."""
    with one_of(ranks, is_fake) as live:
        fake = live.fake_mode or contextlib.nullcontext()
        with fake:
            model = case.build()
        # Without the mode: a mesh has numbers. Fake parameters stay what they are.
        model = case.parallelize(model, dist.group.WORLD) or model
        optimizer = case.optimizer(model.parameters())
        for x in (*model.parameters(), *model.buffers()):
            live.add(x.detach())
        # For the line of a node: anomaly mode records each node's stack.
        stacks = torch.autograd.set_detect_anomaly(says_where, check_nan=False)
        with fake, live, stacks:
            for step in range(steps):
                one_step(live, case, model, optimizer, step)
        live.start("")
    return live


def one_step(live: Live, case, model, optimizer, step: int) -> None:
    live.peaks.clear()
    live.curve.clear()
    inputs, target = case.batch(step)
    live.start("forward")
    output = model(inputs)
    live.start("loss")
    loss = case.loss(output, target)
    del output
    live.start("backward")
    loss.backward()
    del loss
    live.start("optimizer")
    optimizer.step()
    optimizer.zero_grad()
    live.start("between steps")


# The command.

HEIGHT, WIDTH = 10, 76  # of the picture
MARKS = {"forward": "f", "loss": "l", "backward": "b", "optimizer": "o"}


def load_case(path: Path) -> SimpleNamespace:
    """The user's functions, and the audit's defaults."""
    check_file(path)
    user = load_subject(path.resolve())

    def loss(output, target):
        return default_loss(outputs_of(output).get(""), target)

    return SimpleNamespace(
        build=user.build,
        parallelize=user.parallelize,
        batch=user.batch,
        loss=getattr(user, "loss", loss),
        optimizer=getattr(user, "optimizer", torch.optim.AdamW),
    )


def picture(curve: list) -> list[str]:
    """Bytes over a step's operations, in the letters of the phases."""
    curve = [point for point in curve if point[0] in MARKS]
    columns = []
    for i in range(WIDTH):
        first = i * len(curve) // WIDTH
        some = curve[first : max(first + 1, (i + 1) * len(curve) // WIDTH)]
        columns.append(max(some, key=lambda point: point[1]))
    most = max(nbytes for _, nbytes in columns)
    lines = []
    for row in range(HEIGHT, 0, -1):
        least = (row - 0.5) * most / HEIGHT
        marks = [MARKS[phase] if n >= least else " " for phase, n in columns]
        lines.append(f"{most * row / HEIGHT / 1e9:8.2f} |{''.join(marks).rstrip()}")
    return lines


def show(live: Live, ranks: int) -> None:
    print(
        f"Rank 0 of {ranks}: GB (10⁹ bytes) that PyTorch allocates, in the second step"
    )
    print(f"{'phase':10} {'at most':>9} {'at its end':>11}")
    for phase in MARKS:
        most, held = live.peaks[phase][0], live.held[phase]
        print(f"{phase:10} {most / 1e9:9.3f} {held / 1e9:11.3f}")
    print(f"between two steps it holds {live.held['between steps'] / 1e9:.3f}")
    phase = max(MARKS, key=lambda name: live.peaks[name][0])
    nbytes, place = live.peaks[phase]
    print(textwrap.fill(f"The peak, {nbytes:,} bytes, is in {phase}: {place}", 88))
    print("GB over the operations of the step (f, l, b, o: the phase)")
    print("\n".join(picture(live.curve)))


def main(words=None) -> int:
    parser = Parser(prog="peak.py", description=__doc__.partition("\n\n")[0])
    parser.add_argument("file", type=Path, help="the file that defines the model")
    parser.add_argument("--ranks", type=int, default=2, help="ranks of the run (2)")
    try:
        args = parser.parse_args(words)
        if not 1 <= args.ranks <= 2**20:
            raise WrongUse(f"--ranks {args.ranks}: must be from 1 to {2**20}")
        show(measure(load_case(args.file), args.ranks), args.ranks)
    except DataDependentOutputException as error:
        text = f"the model reads a tensor's value ({error.func}); fake ones have none"
        print(f"error: {text}", file=sys.stderr)
        return 2
    except WrongUse as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Exception as error:
        text = str(error).strip().split("\n")[0]
        print(f"error: {type(error).__name__}: {text}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # as `| head` expects
    sys.exit(main())
