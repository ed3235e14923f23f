"""Record what each lesson and script prints, for its page: docs/outputs/NAME.txt.

    python docs/record_outputs.py [NAME …]

It runs the command with which the lesson's notebook begins, without its flags.
tests/test_lessons.py compares the files with what the lessons print.
"""

import subprocess
import sys

from course import DOCS, PATHS, ROOT, command_of


def main() -> None:
    for name in sys.argv[1:] or PATHS:
        command = command_of(name).replace("torchrun", "-m torch.distributed.run", 1)
        done = subprocess.run(
            [sys.executable, *command.split()],
            cwd=ROOT, check=True, encoding="utf-8", stdout=subprocess.PIPE,
        )  # fmt: skip
        path = DOCS / "outputs" / f"{name}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(done.stdout, "utf-8")
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
