"""The Colab notebook runs from top to bottom, on random weights, in a kernel of its own."""

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

REPOSITORY = Path(__file__).resolve().parents[2]
NOTEBOOK = REPOSITORY / "colab" / "quickstart.ipynb"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The notebook with its outputs; it ran in ``tmp/colab`` beside a link to the configs."""
    root = tmp_path_factory.mktemp("checkout")
    (root / "colab").mkdir()
    (root / "configs").symlink_to(REPOSITORY / "configs")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLVR_TINY", "1")
        patch.setenv("IPYTHONDIR", str(root / "ipython"))
        patch.setenv("JUPYTER_RUNTIME_DIR", str(root / "runtime"))
        patch.setenv("PYTHONPATH", str(REPOSITORY))
        patch.delenv("XLA_FLAGS", raising=False)  # one device, as a user has
        patch.delenv("MPLBACKEND", raising=False)  # the kernel's own
        NotebookClient(
            notebook,
            timeout=240,
            kernel_name="python3",
            resources={"metadata": {"path": str(root / "colab")}},
        ).execute()
    return notebook


def outputs(notebook: Any, cell_id: str) -> list[Any]:
    return next(cell.outputs for cell in notebook.cells if cell.id == cell_id)


def text(notebook: Any, cell_id: str) -> str:
    """Everything a cell printed or displayed as text."""
    found = outputs(notebook, cell_id)
    return "".join(
        output.text if output.output_type == "stream" else output.data.get("text/plain", "")
        for output in found
    )


def test_notebook_in_the_repository_has_no_outputs() -> None:
    for cell in nbformat.read(NOTEBOOK, as_version=4).cells:
        if cell.cell_type == "code":
            assert not cell.outputs, cell.id
            assert cell.execution_count is None, cell.id


def test_every_cell_runs_and_nothing_is_written_to_stderr(executed: Any) -> None:
    for cell in executed.cells:
        if cell.cell_type != "code":
            continue
        assert cell.execution_count is not None, cell.id
        for output in cell.outputs:
            assert output.output_type != "error", cell.id
            assert output.get("name") != "stderr", (cell.id, output.text)


def test_training_prints_a_line_a_step_and_the_held_out_table(executed: Any) -> None:
    printed = text(executed, "train")
    assert "step 1/2" in printed
    assert "step 2/2" in printed
    assert "held-out pass rate" in printed
    assert "text/copy" in printed


def test_every_answer_was_judged_by_a_worker_process(executed: Any) -> None:
    assert "not judged" not in text(executed, "table")


def test_curve_is_a_figure(executed: Any) -> None:
    images = [o.data for o in outputs(executed, "curve") if o.output_type == "display_data"]
    assert any("image/png" in data for data in images)


def test_table_shows_both_ends_of_the_run(executed: Any) -> None:
    shown = text(executed, "table")
    assert "Held out, after 0 steps" in shown
    assert "Held out, after 2 steps" in shown
    assert len(re.findall(r"text/copy", shown)) == 2


def test_same_prompts_are_answered_before_and_after(executed: Any) -> None:
    questions = [line for line in text(executed, "before").splitlines() if line[:1].strip()]
    shown = text(executed, "after")
    assert "after 2 steps of training" in shown
    assert len(questions) == 3
    assert all(question in shown for question in questions)
    assert len(re.findall(r"before \(.*\)\n +after  \(.*\)", shown)) == len(questions)
