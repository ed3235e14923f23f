"""The lessons, for scripts in this folder: `from course import lesson04`.

A lesson's file name begins with a digit, so Python's import statement cannot name it.
Of each file only its own part is loaded, above CARRIED OVER. What it carries over comes
from the earlier lessons' modules, so a definition exists once: all lessons count their
calls in one METER, and `lesson04.MLP is lesson01.MLP`.
"""

import re
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
COPIES = re.compile(r"^# ==== CARRIED OVER", re.M)


def load(name: str, *earlier: ModuleType) -> ModuleType:
    """Load one lesson; it finds in `earlier` what its file carries over from them."""
    path = ROOT / f"{name}.py"
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError:  # the script that imports this says so, and ends
        raise ModuleNotFoundError(f"no {path.name} in the folder above") from None
    module = ModuleType(name)
    for lesson in earlier:
        vars(module).update(vars(lesson))
    vars(module).update(__name__=name, __file__=str(path))
    sys.modules[name] = module
    own = COPIES.split(text)[0]  # lesson 00 carries nothing over: all of it
    exec(compile(own, path, "exec"), vars(module))
    return module


lesson00 = load("00_collectives")
lesson01 = load("01_naive_mlp_tp", lesson00)
lesson02 = load("02_transformer_tp", lesson00, lesson01)
lesson03 = load("03_vocab_parallel", lesson00, lesson01, lesson02)
lesson04 = load("04_sequence_parallel", lesson00, lesson01, lesson02, lesson03)
lesson05 = load("05_3d_parallel", lesson00, lesson01, lesson02, lesson03, lesson04)
