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
