"""The notebooks run, and they are stored with their outputs, so that they can be read without running."""

from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")
NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_is_stored_with_its_outputs(file):
    cells = nbformat.read(file, as_version=4).cells
    printing = [
        cell for cell in cells if cell.cell_type == "code" and ("print(" in cell.source or "show(" in cell.source)
    ]
    assert sum(bool(cell.outputs) for cell in printing) >= 3
    assert not any(output.output_type == "error" for cell in printing for output in cell.outputs)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_runs(file, tmp_path):
    from nbclient import NotebookClient

    notebook = nbformat.read(file, as_version=4)
    client = NotebookClient(
        notebook, timeout=1500, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    printed = "".join(output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", []))
    if file.stem == "look_into_credit":
        assert "exact 0.2100   rloo 0.2100" in printed
    else:
        assert "after: success" in printed
