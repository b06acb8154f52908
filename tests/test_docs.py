"""What the documents name exists."""

import ast
import inspect
import re
from pathlib import Path

import pytest
from conftest import make_model, make_tokenizer

from rlhf_kit import PPOTrainer

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def functions(path):
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_files_and_tests_that_are_named_exist(document):
    # kills: a promise whose test was renamed or removed
    for path, _, name in re.findall(
        r"\b((?:tests|rlhf_kit|recipes|benchmarks)/[\w/]+\.(?:py|yaml))(::(\w+))?", document.read_text()
    ):
        assert (ROOT / path).exists(), path
        assert not name or name in functions(ROOT / path), name


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document):
    # kills: a document or picture that was moved
    for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
        assert target.startswith("http") or (document.parent / target).exists(), target


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_the_code_of_the_trainers_document_runs(tmp_path, monkeypatch, one_thread):
    # kills: an argument, method or file that has another name by now
    make_model("llama").save_pretrained(tmp_path / "tiny")
    make_tokenizer().save_pretrained(tmp_path / "tiny")
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "trainer.md").read_text()
    code = "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    assert code.count("packaged:smollm2") == 2
    exec(compile(code.replace("packaged:smollm2", str(tmp_path / "tiny")), "trainer.md", "exec"), {})
    files = text.split("## What it leaves")[1].split("##")[0]
    for name in re.findall(r"^\| (`[^|]+`)", files, re.MULTILINE):
        for file in re.findall(r"`([^`]+)`", name):
            assert (tmp_path / "runs" / "short" / file.replace("<iteration>", "4")).exists(), file
    signature = inspect.signature(PPOTrainer).parameters
    assert re.findall(r"^\| `(\w+)` \|", text.split("## What it does")[0], re.MULTILINE) == list(signature)
    methods = re.findall(r"^\| (`\w+\(.*?) \|", text, re.MULTILINE)
    named = [name for cell in methods for name in re.findall(r"`(\w+)\(", cell)]
    assert sorted(named) == sorted(n for n, f in vars(PPOTrainer).items() if callable(f) and not n.startswith("_"))


def rows_of(document):
    """Cells of every table row below a header."""
    lines = document.read_text().splitlines()
    heads = [i for i, line in enumerate(lines) if re.fullmatch(r"[|\-: ]+", line) and "-" in line]
    for head in heads:
        for line in lines[head + 1 :]:
            if not line.startswith("|"):
                break
            yield [cell.strip() for cell in line.strip().strip("|").split(" | ")]


def test_every_row_of_the_seed_coverage_names_code_and_proof():
    # kills: an empty cell, a claim without code, a place that does not exist
    rows = list(rows_of(ROOT / "docs" / "seed_coverage.md"))
    assert len(rows) > 60
    for says, *places in rows:
        assert says
        assert len(places) == 2, says
        for cell in places:
            named = re.findall(r"`([\w/]+\.(?:py|yaml))(?:::(\w+))?`", cell)
            assert named, (says, cell)
            for path, name in named:
                assert (ROOT / path).exists(), (says, path)
                assert not name or name in functions(ROOT / path), (says, path, name)
