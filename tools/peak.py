"""How many bytes one rank of your model allocates, by phase, on a laptop.

    python tools/peak.py my_model.py --ranks 256
    python tools/peak.py --config qwen3 --ranks 64 --tp 8

The file is a case of tools/audit.py: build, parallelize, batch and, if it has them,
loss, optimizer, after_each_backward and after_backward. `parallelize` gets the group of
all ranks; it may make a mesh of them. --config takes a model of Hugging Face
transformers and the plan that comes with it (tools/of_config.py).
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
from bisect import bisect_right
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from audit.command import Parser, WrongUse, check_file
from audit.rank import Run, check_model, in_short, load_subject, place_of, refuse
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    unset_fake_temporarily,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode

TORCH = str(Path(torch.__file__).parent)
TOOLS = Path(__file__).resolve().parent


class Modules:
    """Which module an operation belongs to: in forward the innermost that is called, in
    backward the one in whose forward the node was made (nodes are numbered)."""

    def __init__(self, model):
        self.names = {module: name for name, module in model.named_modules()}
        self.open = []  # modules whose forward is running
        self.first_nodes = []  # number of the next node → the module at work
        self.at_work = []

    def enter(self, module, inputs) -> None:
        if module in self.names:
            self.open.append(self.names[module] or "the model")
            self.note()

    def leave(self, module, inputs, output) -> None:
        if module in self.names and self.open:
            self.open.pop()
            self.note()

    def note(self) -> None:
        self.first_nodes.append(torch._C._autograd._get_sequence_nr())
        self.at_work.append(self.open[-1] if self.open else "")

    def name(self, node) -> str:
        if self.open or node is None:
            return self.open[-1] if self.open else ""
        found = bisect_right(self.first_nodes, node._sequence_nr()) - 1
        return self.at_work[found] if found >= 0 else ""

    @contextlib.contextmanager
    def watched(self):
        """Also where forward raises: a checkpoint ends its second forward so."""
        hooks = [
            register_module_forward_pre_hook(self.enter),
            register_module_forward_hook(self.leave, always_call=True),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


class Live(TorchDispatchMode):
    """Bytes of all storages that are alive, after each operation.

    peaks: phase → the most bytes, and where that was. held: phase → bytes at its end.
    curve: (phase, bytes) of each operation.
    """

    def __init__(self, fake_mode=None):
        super().__init__()
        self.fake_mode = fake_mode
        self.modules = None  # see Modules
        self.on_gpu = None  # phase → bytes that a GPU's allocator counted, at most
        self.kinds = {}  # between steps: kind → bytes
        self.is_off = False
        self.storages = {}  # key of a storage → a weak reference to it
        self.phase = "build"
        self.peaks = {}
        self.held = {}
        self.curve = []

    def start(self, phase: str) -> None:
        """What follows belongs to this phase."""
        self.held[self.phase] = self.now()
        if self.on_gpu is not None:
            self.on_gpu[self.phase] = torch.cuda.max_memory_allocated()
            torch.cuda.reset_peak_memory_stats()
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
            self.peaks[self.phase] = nbytes, where(func, self.modules)
        return out


def where(func, modules: Modules) -> str:
    """The operation, its module, and the line of the user's code that called it: in
    backward the line whose forward recorded the node."""
    node = torch._C._current_autograd_node()
    name = str(func) if node is None else f"{func} ({node.name()})"
    module = modules.name(node)
    if module:
        name = f"{name} in {module}"
    if node is None or modules.open:  # in a checkpoint's second forward
        frames = traceback.extract_stack()
        texts = [(f.filename, f.lineno, f.name) for f in frames]
    else:
        texts = lines_of(node)
    for path, line, function in reversed(texts):
        if not path.startswith((TORCH, "<")) and path != __file__:
            return f"{name}, {os.path.basename(path)}:{line} in {function}"
    return name


def lines_of(node) -> list[tuple]:
    """File, line and function of the forward that recorded a node (anomaly mode)."""
    found = []
    for text in node.metadata.get("traceback_", []):
        head = text.strip().split("\n")[0].split(", ")
        if len(head) == 3 and head[0].startswith('File "'):
            found.append((head[0][6:-1], head[1][5:], head[2][3:]))
    return found


@contextlib.contextmanager
def one_of(ranks: int, is_fake=True):
    """This process is rank 0 of N ranks; the others do not exist. Yields Live."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True) if is_fake else None
    if is_fake:  # a copy of a tensor would have a copy of the mode
        fake_mode.__deepcopy__ = lambda memo: fake_mode
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


def measure(case, ranks: int, steps=2, is_fake=True, says_where=True, gpu=False):
    """Steps of training. Returns Live: what the last one allocates, by phase. An error
    gets the phase in which it was raised."""
    with one_of(ranks, is_fake) as live:
        try:
            if gpu:
                live.on_gpu = {}
            train(live, case, steps, says_where)
        except (Exception, SystemExit) as error:
            error.phase = live.phase
            raise
    return live


def train(live: Live, case, steps: int, says_where: bool) -> None:
    fake = live.fake_mode or contextlib.nullcontext()
    with fake:
        model = built(case)
    check_model(case, "build", model, "return the full model, an nn.Module")
    # Without the mode: a mesh has numbers. Fake parameters stay what they are.
    live.start("parallelize")
    model = case.parallelize(model, dist.group.WORLD) or model
    check_model(case, "parallelize", model, "return the parallel model, or nothing")
    live.start("optimizer()")
    run = Run(case, model, dist.group.WORLD, None)
    optimizer = run.optimizer()
    for x in (*model.parameters(), *model.buffers()):
        live.add(x.detach())
    live.modules = Modules(model)
    # For the line of a node: anomaly mode records each node's stack.
    stacks = torch.autograd.set_detect_anomaly(says_where, check_nan=False)
    with fake, live, stacks, live.modules.watched():
        for step in range(steps):
            one_step(live, run, optimizer, step)
    live.start("")
    live.kinds = kinds_of(live, model, optimizer)


def built(case, tries=64):
    """A fake parameter that is converted (.bfloat16()) for the first time, of each
    shape, raises: PyTorch holds a reference to it. Then the next try comes further."""
    for _ in range(tries):
        try:
            return case.build()
        except RuntimeError as error:
            if "Couldn't swap" not in str(error):
                raise
    return case.build()


def one_step(live: Live, run: Run, optimizer, step: int) -> None:
    live.peaks.clear()
    live.curve.clear()
    live.start("batch")
    inputs, target = inputs_and_target(run.subject, step)
    live.start("forward")
    if isinstance(inputs, dict):
        output = run.model(**inputs)
    else:
        output = run.model(*inputs)
    live.start("loss")
    loss = run.loss(output, target)
    del output
    live.start("backward")
    run.backward(loss)
    del loss
    live.start("optimizer")
    optimizer.step()
    optimizer.zero_grad()
    live.start("between steps")


def inputs_and_target(case, step: int) -> tuple:
    """What batch() returns; the inputs as a dict or a tuple."""
    made = case.batch(step)
    is_pair = isinstance(made, (tuple, list)) or torch.is_tensor(made)
    if not is_pair or len(made) != 2:
        refuse(case, "batch", in_short(made), "return inputs and target")
    inputs, target = made
    if isinstance(inputs, (dict, tuple)):
        return inputs, target
    return tuple(inputs) if isinstance(inputs, list) else (inputs,), target


def kinds_of(live: Live, model, optimizer) -> dict[str, int]:
    """Kind → bytes of what is alive now. A storage counts once, for the first kind."""
    parameters = list(model.parameters())
    groups = {
        "weights": parameters,
        "gradients": [p.grad for p in parameters],
        "optimizer's state": list(getattr(optimizer, "state", {}).values()),
        "buffers": list(model.buffers()),
    }
    found = {}
    counted = set()
    for kind, tensors in groups.items():
        found[kind] = 0
        for x in pytree.tree_leaves(tensors):
            if isinstance(x, DTensor):
                x = x.to_local()
            if not isinstance(x, torch.Tensor):
                continue
            storage = x.untyped_storage()
            if storage._cdata in live.storages and storage._cdata not in counted:
                counted.add(storage._cdata)
                found[kind] += storage.nbytes()
    found["other"] = live.now() - sum(found.values())
    return found


# The command.

HEIGHT, WIDTH = 10, 76  # of the picture in letters
MARKS = {"forward": "f", "loss": "l", "backward": "b", "optimizer": "o"}
RECOMPUTE = "none", "full"
OF_CONFIG = {"tp": 1, "batch": 1, "seq_len": 4096, "layers": None, "recompute": "none"}
PICTURES = ".png", ".svg"


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


def draw_curve(live: Live):
    """The same as a figure, in the manner of notebooks/draw.py: a gray per phase, a
    line at what is held between steps, the peak with its place."""
    import draw

    figure, ax = draw.plt.subplots(figsize=(draw.WIDTH, 5.2), layout="constrained")
    points = [point for point in live.curve if point[0] in MARKS]
    for phase, gray in zip(MARKS, draw.PARTS):
        xs = [i for i, point in enumerate(points) if point[0] == phase]
        heights = [points[i][1] / 1e9 for i in xs]
        ax.fill_between(xs, heights, step="mid", color=gray, label=phase)
    held = live.held["between steps"] / 1e9
    ax.axhline(held, color="black", linestyle=":", label="held between steps")
    phase, nbytes, place = fullest(live)
    ax.axhline(nbytes / 1e9, color="black", linewidth=2)
    text = textwrap.fill(f"{nbytes / 1e9:.2f} GB in {phase}: {place}", 80)
    draw.write(ax, len(points) / 2, nbytes / 1e9 * 1.01, text, 12, va="bottom")
    ax.set(xlabel="operations of a step", ylabel="GB", ylim=(0, nbytes / 1e9 * 1.2))
    figure.legend(loc="outside upper center", ncols=5, frameon=False, fontsize=12)
    return figure


def save_picture(path: Path, live: Live) -> None:
    import matplotlib

    matplotlib.use("Agg")
    sys.path.append(str(TOOLS.parent / "notebooks"))
    draw_curve(live).savefig(path)


def fullest(live: Live) -> tuple[str, int, str]:
    """The phase of the peak, its bytes and its place."""
    phase = max(MARKS, key=lambda name: live.peaks[name][0])
    return phase, *live.peaks[phase]


def show(live: Live, ranks: int) -> None:
    print(
        f"Rank 0 of {ranks}: GB (10⁹ bytes) that PyTorch allocates, in the second step"
    )
    on_gpu = "   the GPU  ratio" if live.on_gpu else ""
    print(f"{'phase':10} {'at most':>9} {'at its end':>11}{on_gpu}")
    for phase in MARKS:
        most, held = live.peaks[phase][0], live.held[phase]
        line = f"{phase:10} {most / 1e9:9.3f} {held / 1e9:11.3f}"
        if live.on_gpu:
            real = live.on_gpu[phase]
            line += f" {real / 1e9:9.3f} {real / most:6.3f}"
        print(line)
    kinds = [f"{kind} {n / 1e9:.3f}" for kind, n in live.kinds.items() if n]
    held = f"Between two steps it holds {live.held['between steps'] / 1e9:.3f}"
    print(textwrap.fill(f"{held}: {', '.join(kinds)}.", 88))
    phase, nbytes, place = fullest(live)
    print(textwrap.fill(f"The peak, {nbytes:,} bytes, is in {phase}: {place}", 88))
    print("GB over the operations of the step (f, l, b, o: the phase)")
    print("\n".join(picture(live.curve)))


def read_args(words) -> SimpleNamespace:
    parser = Parser(prog="peak.py", description=__doc__.partition("\n\n")[0])
    add = parser.add_argument
    add("file", type=Path, nargs="?", help="the file that defines the model")
    add("--ranks", type=int, default=2, help="ranks of the run (2)")
    add("--config", metavar="NAME", help="instead of a file: a model of transformers, "
        "by a config.json, its folder, a model type, or a name on the Hub")  # fmt: skip
    add("--tp", type=int, help="with --config: ranks that share the model (1)")
    add("--batch", type=int, help="with --config: sequences per rank (1)")
    add("--seq-len", type=int, help="with --config: tokens per sequence (4096)")
    add("--layers", type=int, help="with --config: instead of those of the config")
    add("--recompute", choices=RECOMPUTE, help="with --config: layers (none)")
    add("--picture", type=Path, metavar="FILE", help="draw it there: .png or .svg")
    add("--gpu", action="store_true", help="really allocate all of it, on this "
        "machine's GPU, and compare with what CUDA's allocator counts")  # fmt: skip
    args = parser.parse_args(words)
    check_args(args)
    for name, default in OF_CONFIG.items():
        if getattr(args, name) is None:
            setattr(args, name, default)
    return args


def check_args(args) -> None:
    """WrongUse for flags that do not go together, and for values out of range."""
    if args.file and args.config:
        raise WrongUse(f"{args.file} and --config {args.config}: take one of them")
    if args.file is None and args.config is None:
        raise WrongUse("name a file, for example tools/llama.py, or --config qwen3")
    for name in ("ranks", "tp", "batch", "seq_len", "layers"):
        value = getattr(args, name)
        if value is not None and not 1 <= value <= 2**20:
            flag = f"--{name.replace('_', '-')}"
            raise WrongUse(f"{flag} {value}: must be from 1 to {2**20}")
    for name in OF_CONFIG:
        if args.file and getattr(args, name) is not None:
            flag = f"--{name.replace('_', '-')} {getattr(args, name)}"
            raise WrongUse(f"{flag}: goes with --config; a file says it itself")
    if args.picture:
        check_picture(args.picture)
    if args.gpu and not torch.cuda.is_available():
        raise WrongUse("--gpu: PyTorch finds no GPU on this machine; leave it out")


def check_picture(path: Path) -> None:
    if path.suffix not in PICTURES:
        raise WrongUse(f"--picture {path}: must end in {' or '.join(PICTURES)}")
    if find_spec("matplotlib") is None:
        raise WrongUse(f"--picture {path}: needs matplotlib; leave it out")
    try:
        path.open("ab").close()
    except OSError as error:
        raise WrongUse(f"--picture {path}: {error.strerror}") from None


def load_case(args):
    """The user's file, or a model of transformers."""
    if args.config:
        import of_config

        return of_config.case_of(args)
    check_file(args.file)
    return load_subject(args.file.resolve())


def in_words(error: BaseException, args) -> str:
    """An error with its phase and the user's line, in one line."""
    phase = getattr(error, "phase", "importing the file")
    if isinstance(error, SystemExit):
        text = f"the file ended the process: sys.exit({error.code})"
    elif isinstance(error, VALUES):
        text = f"a tensor's value or its number of values is needed ({error.func}); "
        text += "fake tensors have no values"
    else:
        first = next(iter(str(error).strip().splitlines()), "")
        text = f"{type(error).__name__}: {first}"
    place = place_of(error, str(args.file.resolve()) if args.file else "")
    where_from = f"{args.file or args.config}: in {phase}"
    return ", ".join(filter(None, [f"{where_from}: {text}", place]))


VALUES = DataDependentOutputException, DynamicOutputShapeException


def main(words=None) -> int:
    args = None
    try:
        args = read_args(words)
        if args.gpu:
            torch.set_default_device("cuda")
        case = load_case(args)
        live = measure(case, args.ranks, is_fake=not args.gpu, gpu=args.gpu)
        show(live, args.ranks)
        if args.picture:
            save_picture(args.picture, live)
            print(f"drawn: {args.picture}")
    except WrongUse as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except (Exception, SystemExit) as error:
        if args is None:  # --help
            raise
        print(f"error: {in_words(error, args)}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # as `| head` expects
    sys.exit(main())
