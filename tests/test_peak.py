"""tools/peak.py counts what is allocated; and tools/predict.py predicts it by phase."""

import json
import re
import sys
from types import SimpleNamespace

import jobs
import llama
import of_config
import peak
import predict
import pytest
import torch
from audit.command import WrongUse
from torch import nn

pytestmark = pytest.mark.timeout(900)
LLAMA_8B = predict.MODELS["llama-3-8b"] | dict(layers=4, kv_heads=32)
LLAMA_70B = predict.MODELS["llama-3-70b"] | dict(layers=4)
PIECE = 2**23  # elements, 33 MB in float32: a thousandth of the peak


class OneKernelAdamW:
    """AdamW of 16-bit parameters: two moments and a copy of the weight in float32. In
    pieces, as a kernel that needs no tensor of its own."""

    def __init__(self, parameters):
        self.parameters = list(parameters)
        self.states = []
        for p in self.parameters:
            moments = [torch.zeros_like(p, dtype=torch.float32) for _ in range(2)]
            self.states.append([p.detach().float(), *moments])

    @torch.no_grad()
    def step(self):
        for p, state in zip(self.parameters, self.states):
            views = [x.view(-1).split(PIECE) for x in (p, p.grad, *state)]
            for weight, grad, copy, mean, square in zip(*views):
                mean.mul_(0.9).add_(grad, alpha=0.1)
                square.mul_(0.95).addcmul_(grad.float(), grad.float(), value=0.05)
                copy.addcdiv_(mean, square.sqrt().add_(1e-8), value=-1e-3)
                weight.copy_(copy)

    def zero_grad(self):
        for p in self.parameters:
            p.grad = None


class Stage(nn.Module):
    """The first stage of two: embedding and layers, two micro-batches in flight."""

    def __init__(self, sizes: dict, recompute: str):
        super().__init__()
        self.inner = llama.Llama(sizes, recompute)
        self.layers = self.inner.layers
        self.inner.norm = nn.Identity()
        self.inner.lm_head = nn.Identity()

    def forward(self, tokens):
        return [self.inner(each) for each in tokens.chunk(2)]


class Accumulated(OneKernelAdamW):
    """Gradients stay, as those of the micro-batches before."""

    def zero_grad(self):
        pass


def case_of(sizes: dict, layout, marks: list) -> SimpleNamespace:
    """Without replicas: 16-bit weights and OneKernelAdamW instead of fully_shard."""
    is_sharded = layout.dp > 1
    is_stage = layout.pp > 1

    def build():
        if is_sharded:
            return llama.Llama(sizes, layout.recompute)
        kind = Stage if is_stage else llama.Llama
        return kind(sizes, layout.recompute).bfloat16()

    def parallelize(model, group):
        if is_sharded:
            llama.parallelize(model, group)
        model.layers[-1].register_forward_hook(mark_backward)
        return model

    def mark_backward(module, args, out):
        if out.requires_grad:
            out.register_hook(lambda grad: marks[0].start("layer"))

    def batch(step):
        shape = 2, layout.micro_batch * layout.pp, layout.seq_len
        return torch.randint(sizes["vocab_size"], shape).unbind()

    kind = Accumulated if is_stage else OneKernelAdamW
    return SimpleNamespace(
        build=build,
        parallelize=parallelize,
        batch=batch,
        optimizer=llama.optimizer if is_sharded else kind,
        loss=(lambda out, target: sum(out).sum()) if is_stage else llama.loss,
    )


def measured(sizes: dict, layout, monkeypatch) -> peak.Live:
    monkeypatch.setenv("TP", str(layout.tp))
    marks = []
    begin = peak.Live.__enter__

    def enter(live):
        marks.append(live)
        return begin(live)

    monkeypatch.setattr(peak.Live, "__enter__", enter)
    case = case_of(sizes, layout, marks)
    ranks = layout.tp * layout.dp
    return peak.measure(case, ranks, says_where=False)


LAYOUTS = [  # model; dp, tp, pp; sequences, positions; what is recomputed
    (LLAMA_8B, (8, 1, 1), (1, 8192), "full"),
    (LLAMA_8B, (8, 1, 1), (1, 8192), "half"),
    (LLAMA_8B, (8, 1, 1), (1, 8192), "none"),
    (LLAMA_8B, (128, 1, 1), (1, 32768), "full"),
    (LLAMA_8B, (4, 2, 1), (1, 32768), "full"),
    (LLAMA_8B, (8, 4, 1), (4, 8192), "full"),
    (LLAMA_70B, (32, 8, 1), (16, 8192), "full"),
    (LLAMA_8B, (1, 1, 1), (1, 8192), "none"),
    (LLAMA_8B, (1, 1, 1), (1, 8192), "full"),
    (LLAMA_8B, (1, 1, 2), (1, 8192), "none"),
]


@pytest.mark.parametrize("sizes, mesh, shape, recompute", LAYOUTS)
def test_each_phase_is_predicted_within_2_percent(
    sizes, mesh, shape, recompute, monkeypatch
):
    """Next to what PyTorch allocates: fully_shard, DTensor's TP + SP, loss_parallel,
    checkpoints; without replicas 16-bit weights; and a stage of a pipeline."""
    dp, tp, pp = mesh
    b, S = shape
    M = 4 if pp > 1 else 1
    sizes = sizes | dict(seq_len=S, batch_size=dp * b * M, layers=4)
    options = dict(dp=dp, tp=tp, pp=pp, micro_batch=b, recompute=recompute)
    options.update(zero=3 if dp > 1 else 0, attention="flash", loss="torch")
    layout = predict.make_layout(sizes | dict(layers=4 * pp), mlp_saves=4, **options)
    try:
        found = measured(sizes, layout, monkeypatch).peaks
    finally:
        if tp > 1:  # llama.parallelize has left it on
            torch.distributed.tensor.parallel.loss._disable_custom_loss_ops()
    phases = predict.phases(layout, 0)
    names = {"forward": "forward", "layer": "layer", "optimizer": "optimizer"}
    if pp == 1:
        names.update(loss="loss", head="backward")
    for phase, name in names.items():
        predicted = sum(phases[phase].values())
        assert predicted == pytest.approx(found[name][0], rel=0.02), phase
    assert predict.memory(layout, 0) in phases.values()


TINY = predict.model(3, 64, 4, 4, 512, 128, 8, 160, gated=True, biases="none")


@pytest.mark.parametrize("dp, recompute", [(4, "full"), (1, "none")])
def test_fake_tensors_have_the_bytes_of_real_ones(dp, recompute, monkeypatch):
    """The same tracker, with tensors that are really allocated: equal at the peak of
    each phase and at its end."""
    monkeypatch.setenv("TP", "1")
    options = dict(dp=dp, recompute=recompute, attention="flash")
    layout = predict.make_layout(TINY, **options)
    found = []
    for is_fake in (True, False):
        case = case_of(TINY, layout, [SimpleNamespace(start=lambda phase: None)])
        live = peak.measure(case, dp, is_fake=is_fake, says_where=False)
        peaks = {phase: nbytes for phase, (nbytes, _) in live.peaks.items()}
        found.append((peaks, live.held))
    assert found[0] == found[1]
    count = predict.parameters(layout, 0)[0]
    assert found[0][1]["between steps"] >= 12 * count // dp


def test_the_command(capsys, monkeypatch, tmp_path):
    """What it prints and draws: the module and line of the peak, what is held."""
    for name, value in dict(LAYERS=2, TP=2, B=1, S=8192, MODEL="llama-3-8b").items():
        monkeypatch.setenv(name, str(value))
    path = str(jobs.ROOT / "tools" / "llama.py")
    drawn = tmp_path / "peak.svg"
    try:
        assert peak.main([path, "--ranks", "8", "--picture", str(drawn)]) == 0
    finally:
        torch.distributed.tensor.parallel.loss._disable_custom_loss_ops()
    out = capsys.readouterr().out
    assert out.startswith("Rank 0 of 8") and max(map(len, out.splitlines())) <= 88
    assert "llama.py:" in out and "Between two steps it holds" in out
    for letter in "flb":
        assert f"|{letter}" in out or f"{letter}{letter}" in out
    assert "<svg" in drawn.read_text()


WIDE = """
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(8, 4096)
        self.down = nn.Linear(4096, 8)
        self.again = AGAIN

    def forward(self, x):
        if self.again:
            return checkpoint(self.inner, x, use_reentrant=False)
        return self.inner(x)

    def inner(self, x):
        h = self.up(x)
        return self.down(h.exp() * h.sin())  # WIDE LINE


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.small = nn.Linear(8, 8)
        self.block = Block()
        self.last = nn.Linear(8, 8)

    def forward(self, x, scale):
        return self.last(self.block(self.small(x))) * scale


def build():
    return Model()


def parallelize(model, group):
    pass


def batch(step):
    return {"x": torch.randn(4096, 8), "scale": torch.ones(1)}, torch.randn(4096, 8)
"""


@pytest.mark.parametrize("again", (False, True))
def test_the_peak_has_its_module_and_line(again, tmp_path, capsys):
    """A wide block between narrow ones, also if a checkpoint computes it again in
    backward; and what is held: weights, and AdamW's two moments (and their steps)."""
    path = tmp_path / "wide.py"
    path.write_text(WIDE.replace("AGAIN", str(again)))
    live = peak.measure(peak.load_case(SimpleNamespace(file=path, config=None)), 4)
    line = 1 + WIDE[: WIDE.index("WIDE LINE")].count("\n")
    phase, nbytes, place = peak.fullest(live)
    assert phase == "backward" and nbytes > 3 * 4 * 4096**2
    assert f" in block, wide.py:{line} in inner" in place
    weights = 4 * (2 * 8 * 4096 + 4096 + 8 + 2 * 72)
    assert live.kinds["weights"] == weights
    state = live.kinds["optimizer's state"]
    assert 2 * weights <= state <= 2 * weights + 8 * 4
    assert live.kinds["gradients"] == live.kinds["other"] == 0
    assert sum(live.kinds.values()) == live.held["between steps"]
    peak.show(live, 4)
    shown = " ".join(capsys.readouterr().out.split())
    assert f"holds {(weights + state) / 1e9:.3f}: weights" in shown


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("name", ("tp", "dtensor"))
def test_the_audits_examples_run(name, monkeypatch):
    """Lesson 02's transformer, split by hand (from a deep copy) and by a plan: half of
    its matrices on each of two ranks."""
    monkeypatch.syspath_prepend(str(jobs.ROOT))
    path = jobs.ROOT / "tools" / "audit" / "examples" / f"{name}.py"
    case = peak.load_case(SimpleNamespace(file=path, config=None))
    full = 4 * sum(p.numel() for p in case.build().parameters())
    live = peak.measure(case, 2)
    assert full / 2 < live.kinds["weights"] < 0.7 * full
    assert live.kinds["optimizer's state"] > 2 * live.kinds["weights"]


def test_a_config_in_a_file(tmp_path, capsys):
    """Without the Hub: the sizes are the file's, and the plan is that of the model. tp
    halves what the plan shards."""
    path = tmp_path / "config.json"
    sizes = dict(hidden_size=64, intermediate_size=256, num_attention_heads=4)
    sizes.update(num_key_value_heads=2, num_hidden_layers=2, vocab_size=512)
    sizes.update(model_type="llama", tie_word_embeddings=False, dtype="bfloat16")
    path.write_text(json.dumps(sizes))
    weights = []
    for tp in (1, 2):
        words = ["--config", str(path), "--ranks", str(2 * tp), "--tp", str(tp)]
        args = peak.read_args([*words, "--seq-len", "64", "--recompute", "full"])
        live = peak.measure(peak.load_case(args), args.ranks)
        weights.append(live.kinds["weights"])
        assert live.kinds["optimizer's state"] >= 2 * weights[-1]
        peak.show(live, args.ranks)
    assert "between two steps" in capsys.readouterr().out.lower()
    layer = 64 * (2 * 64 + 2 * 32) + 3 * 64 * 256  # its matrices; two replicas, float32
    ends = 2 * 512 * 64
    norms = 5 * 64
    assert weights[0] == 4 * (2 * layer + ends + norms) // 2
    assert weights[1] < weights[0] - 4 * layer // 2 + 4 * 64
    assert (
        peak.main(["--config", str(tmp_path), "--layers", "1", "--seq-len", "8"]) == 0
    )


CASE = """
import torch
from torch import nn


def build():
    return nn.Linear(4, 4)


def parallelize(model, group):
    pass


def batch(step):
    return torch.randn(2, 4), torch.randn(2, 4)
"""
EDITS = {  # what is replaced in CASE, and by what; the error line
    ("return nn.Linear(4, 4)", "return 1 / 0"):
        "in build: ZeroDivisionError: division by zero, line 7 of my_model.py",
    ("return nn.Linear(4, 4)", "return nn.Linear"):
        r"in build: TypeError: build\(\) \(line 6 of my_model.py\) returned the class "
        "Linear",
    ("return nn.Linear(4, 4)", "return [nn.Linear(4, 4)]"):
        r"build\(\) .*returned a list of length 1: it has to return the full model",
    ("    pass", "    model.weight.missing()"):
        "in parallelize: AttributeError: .* line 11 of my_model.py",
    ("    pass", "    return 5"): r"parallelize\(\) .*returned an? int",
    ("return torch.randn(2, 4), torch.randn(2, 4)", "return torch.randn(3, 4)"):
        r"in batch: TypeError: batch\(\) .*has to return inputs and target",
    ("return torch.randn(2, 4), torch", "return torch.randn(2, 4)[0, 9], torch"):
        "in batch: IndexError: .* line 15 of my_model.py",
    ("torch.randn(2, 4), torch", "torch.randn(2, 5), torch"):
        "in forward: RuntimeError: .*",
    ("nn.Linear(4, 4)", "Reads()"):
        "in forward: a tensor's value .* fake tensors have no values, "
        "line 20 of my_model.py",
    ("nn.Linear(4, 4)", "Counts()"):
        "in forward: a tensor's value or its number of values is needed "
        r"\(aten.nonzero.default\)",
    ("nn.Linear(4, 4)", "Nothing()"): "in loss: TypeError: the model returns no tensor",
    ("import nn", "import nn\nimport not_there"):
        "in importing the file: ModuleNotFoundError: .* line 4 of my_model.py",
    ("import nn", "import nn\nraise SystemExit(3)"):
        r"the file ended the process: sys.exit\(3\)",
    ("def build():", "def biuld():"): "does not define build; is it biuld, in line 6?",
    ("def build():", "def build(:"): "line 6: invalid syntax",
    ("def batch(step)", "def optimizer(named):\n    return 5\n\n\ndef batch(step)"):
        r"in optimizer\(\): TypeError: optimizer\(\) returns a int",
    ("def batch(step)", "def loss(output):\n    return 5\n\n\ndef batch(step)"):
        r"in loss: TypeError: loss\(\) .* has to take output and target",
    ("def batch(step)", "def loss(a, b):\n    return a\n\n\ndef batch(step)"):
        r"in loss: TypeError: loss\(\) .* return a tensor with one number",
}  # fmt: skip
MORE = """

class Reads(nn.Linear):
    def forward(self, x):
        return x * x.sum().item()

    def __init__(self):
        super().__init__(4, 4)


class Counts(Reads):
    def forward(self, x):
        return x[x > 0]


class Nothing(Reads):
    def forward(self, x):
        return None
"""


def last_line(capsys, words: list) -> str:
    """The command's error: one line on stderr, nothing on stdout, exit code 2."""
    assert peak.main([str(word) for word in words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1, err
    return err


@pytest.mark.parametrize("edit", EDITS)
def test_an_error_of_the_file_is_one_line_with_its_place(edit, tmp_path, capsys):
    path = tmp_path / "my_model.py"
    assert edit[0] in CASE
    path.write_text(CASE.replace(*edit) + MORE)
    err = last_line(capsys, [path])
    assert re.search(EDITS[edit], err), err


def test_the_case_without_an_edit_is_right(tmp_path, capsys):
    path = tmp_path / "my_model.py"
    path.write_text(CASE + MORE)
    assert peak.main([str(path)]) == 0
    assert capsys.readouterr().out.startswith("Rank 0 of 2:")


LLAMA = "--config llama"


@pytest.mark.parametrize("words, said", [
    ("", "name a file, for example tools/llama.py, or --config qwen3"),
    ("none.py", "none.py: no such file"),
    ("none.py --config llama", "none.py and --config llama: take one of them"),
    ("tools/llama.py --ranks 0", "--ranks 0: must be from 1 to 1048576"),
    ("tools/llama.py --ranks 2000000", "--ranks 2000000: must be from 1"),
    ("tools/llama.py --ranks two", "invalid int value: 'two'"),
    ("tools/llama.py --tp 8", "--tp 8: goes with --config; a file says it itself"),
    ("tools/llama.py --recompute full", "--recompute full: goes with --config"),
    ("tools/llama.py --picture peak.pdf", "must end in .png or .svg"),
    ("tools/llama.py --picture /no/where.png", "/no/where.png: No such file"),
    ("tools/llama.py --gpu", "--gpu: PyTorch finds no GPU on this machine"),
    ("tools/llama.py --gpus 8", "unrecognized arguments: --gpus 8"),
    (f"{LLAMA} --ranks 8 --tp 3", "--tp 3: must divide --ranks 8"),
    (f"{LLAMA} --ranks 128 --tp 64", "num_attention_heads 32 % 64 .*; take --tp 32"),
    (f"{LLAMA} --seq-len 0", "--seq-len 0: must be from 1"),
    (f"{LLAMA} --layers -1", "--layers -1: must be from 1"),
    (f"{LLAMA} --batch 0", "--batch 0: must be from 1"),
    (f"{LLAMA} --recompute half", "invalid choice: 'half'"),
    ("--config gpt2 --tp 2", "transformers has no plan for gpt2; take --tp 1"),
    ("--config none/config.json", "--config none/config.json: no such file"),
    ("--config tests", "--config tests: the folder has no config.json"),
    ("--config pyproject.toml", "--config pyproject.toml: .*"),
    ("--config bad.json", "--config .*bad.json: .*"),
    ("--config", "expected one argument"),
])  # fmt: skip
def test_a_wrong_flag_is_one_line(words, said, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(jobs.ROOT)
    bad = tmp_path / "bad.json"
    bad.write_text('{"model_type": "no such"}')
    err = last_line(capsys, words.replace("bad.json", str(bad)).split())
    assert re.search(said, err), err


def test_a_config_without_transformers_is_one_line(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    err = last_line(capsys, ["--config", "llama"])
    assert "needs transformers, which cannot be imported; call make setup" in err


def test_what_a_gpu_counts_is_shown_next_to_it(capsys):
    """The columns of --gpu; no GPU is needed to print them."""
    live = peak.Live()
    for phase in peak.MARKS:
        live.peaks[phase] = 2 * 10**9, "somewhere"
        live.held[phase] = live.held["between steps"] = 10**9
        live.curve.append((phase, 10**9))
    live.on_gpu = dict.fromkeys(peak.MARKS, 2_100_000_000)
    peak.show(live, 2)
    rows = capsys.readouterr().out.splitlines()
    assert rows[1].split()[-3:] == ["the", "GPU", "ratio"]
    assert rows[2].split() == ["forward", "2.000", "1.000", "2.100", "1.050"]


def test_the_tp_that_an_error_names_divides_both_kinds_of_heads():
    config = SimpleNamespace(model_type="x", base_model_tp_plan={"layers": "colwise"})
    config.num_attention_heads, config.num_key_value_heads = 12, 8
    with pytest.raises(WrongUse, match=r"num_attention_heads 12 .*; take --tp 4"):
        of_config.check_tp(config, 24, 24)
    of_config.check_tp(config, 4, 24)
