"""What the documents name exists."""

import ast
import re
from pathlib import Path

import pytest

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
