"""Execute notebooks from top to bottom and save them without metadata.

    python notebooks/run.py                      all of them
    python notebooks/run.py 00_collectives       this one
    python notebooks/run.py --assets             only write out the pictures

The pictures of a cell with the tag `asset-NAME` become assets/NAME.png, NAME-2.png, …
The last picture of the cell with the tag `first-picture` is attached to the first cell,
which shows it above the set-up as ![text](attachment:first.png).
Other tags: `nbval-ignore-output` where what is printed changes from run to run (tests
compare the rest); `raises-exception`; `hide-input`, which folds a cell, and with
`drawing` says that tests may try the functions that it defines; `exercise-1` and
`check-1`, 2, 3 and so on, whose folded solution the tests try.
tests/test_notebooks.py says what each notebook must have, and requires wrong answers to
its exercises in WRONG.
"""

import base64
import os
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parent
KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}
LIMIT = 120  # seconds a cell


def execute(notebook) -> None:
    """Run all cells; one that fails without the tag `raises-exception` is an error."""
    os.environ.setdefault("NOTEBOOK_RANKS", "4")  # what is committed has four
    where = {"metadata": {"path": str(FOLDER)}}
    client = NotebookClient(
        notebook, timeout=LIMIT, kernel_name="python3", resources=where
    )
    client.record_timing = False
    client.execute()


def clean(notebook) -> None:
    """Keep what a reader sees, and the tags; join what was printed in pieces; fold
    cells with the tag `hide-input` (`remove-output`: also what they print), in
    JupyterLab and VS Code as on the site."""
    notebook.metadata = {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    for cell in notebook.cells:
        tags = cell.metadata.get("tags")
        cell.metadata = {"tags": tags} if tags else {}
        if tags and "hide-input" in tags:
            cell.metadata["jupyter"] = {"source_hidden": True}
            if "remove-output" in tags:
                cell.metadata["jupyter"]["outputs_hidden"] = True
        if cell.cell_type == "code":
            cell.outputs = joined(cell.outputs)


def joined(outputs: list) -> list:
    """Pieces of one stream that follow each other are one output."""
    result = []
    for output in outputs:
        stream = output.output_type == "stream" and output.name
        if stream and result and result[-1].get("name") == stream:
            result[-1].text += output.text
        else:
            if "metadata" in output:  # only outputs of cells that show something
                output.metadata = {}
            result.append(output)
    return result


def show_first(notebook) -> None:
    """The head shows the picture of the cell with the tag `first-picture`."""
    for cell in notebook.cells:
        if "first-picture" in cell.metadata.get("tags", []):
            data = [output.get("data", {}) for output in cell.outputs]
            pictures = [each["image/png"] for each in data if "image/png" in each]
            png = {"image/png": pictures[-1]}
            notebook.cells[0]["attachments"] = {"first.png": png}


def write_assets(notebook) -> None:
    """The pictures of the tagged cells, into assets/."""
    folder = FOLDER.parent / "assets"
    folder.mkdir(exist_ok=True)
    for cell in notebook.cells:
        for tag in cell.metadata.get("tags", []):
            if tag.startswith("asset-"):
                name = tag.removeprefix("asset-")
                data = [output.get("data", {}) for output in cell.outputs]
                pictures = [each["image/png"] for each in data if "image/png" in each]
                for number, png in enumerate(pictures, 1):
                    path = folder / f"{name}{f'-{number}' if number > 1 else ''}.png"
                    path.write_bytes(base64.b64decode(png))
                    print(f"wrote assets/{path.name}")


def main(names: list[str]) -> None:
    only_assets = "--assets" in names
    names = [name for name in names if name != "--assets"]
    paths = [FOLDER / f"{Path(name).stem}.ipynb" for name in names]
    known = sorted(FOLDER.glob("[0-9]*_*.ipynb"))
    for path in paths:
        if path not in known:
            names = ", ".join(each.stem for each in known)
            sys.exit(f"error: there is no notebook {path.stem}; there are: {names}")
    for path in paths or known:
        notebook = nbformat.read(path, as_version=4)
        if not only_assets:
            start = time.time()
            execute(notebook)
            clean(notebook)
            show_first(notebook)
            nbformat.write(notebook, path)
            print(f"{path.stem}  executed in {time.time() - start:.0f} s")
        write_assets(notebook)


if __name__ == "__main__":
    main(sys.argv[1:])
