"""Imports run one way only, and the maths needs torch and nothing else."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import rlhf_kit

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "rlhf_kit"

# A module may import from its own row and from rows above; `functional` is above all of them.
ROWS = [
    {
        "adapters",
        "annotations",
        "config",
        "critic",
        "data",
        "fingerprint",
        "folder_lock",
        "kl_control",
        "loading",
        "modeling",
        "packaged",
        "probes",
        "processes",
        "quantized",
        "reference",
        "reward_arguments",
        "reward_models",
        "reward_output",
        "rewards",
        "roles",
        "sampling",
        "saving",
        "scoring",
        "value_head",
    },
    {"rollout"},
    {
        "callbacks",
        "card",
        "checkpoint",
        "identity",
        "journal",
        "kl_dial",
        "memory",
        "metrics",
        "objective",
        "preparation",
        "report",
        "resume",
        "signals",
        "state",
        "step_input",
        "targets",
        "training_state",
        "update",
    },
    {"trainer"},
]
ROW = {"functional": 0} | {name: i for i, names in enumerate(ROWS, 1) for name in names}
MODULES = sorted(PACKAGE.glob("*.py"))
FUNCTIONAL = sorted((PACKAGE / "functional").glob("*.py"))
RECIPES = sorted((ROOT / "recipes").rglob("*.py"))
CARTPOLE = sorted((ROOT / "cartpole_baseline").rglob("*.py"))


def imported(path, package=""):
    """(module, name or None) of every import statement, wherever in the file; relative ones made absolute."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*parts, *([node.module] if node.module else [])])
            yield from ((module, alias.name) for alias in node.names)


def parts_of_rlhf_kit(path):
    """First-level modules of rlhf_kit that a file imports; a public name counts as the module it lives in."""
    for module, name in imported(path, "rlhf_kit"):
        if module == "rlhf_kit" and not name.startswith("__"):
            home = rlhf_kit._HOME.get(name, f"rlhf_kit.{name}")
            yield home.split(".")[1]
        elif module.startswith("rlhf_kit."):
            yield module.split(".")[1]


def test_every_module_has_its_place():
    # kills: a new module that no rule is applied to
    assert {path.stem for path in MODULES} - {"__init__"} <= set(ROW)
    assert FUNCTIONAL


@pytest.mark.parametrize("path", [p for p in MODULES if p.stem != "__init__"], ids=lambda p: p.stem)
def test_imports_run_one_way(path):
    # kills: data importing rollout, rollout importing metrics, anything importing the trainer
    own = ROW[path.stem]
    assert [name for name in parts_of_rlhf_kit(path) if ROW[name] > own] == []


def test_no_two_modules_import_each_other():
    # kills: a cycle inside a row
    graph = {p.stem: set(parts_of_rlhf_kit(p)) - {p.stem} for p in MODULES if p.stem != "__init__"}

    def reaches(start, goal, seen):
        return any(
            name == goal or (name not in seen and reaches(name, goal, seen | {name})) for name in graph.get(start, ())
        )

    assert [name for name in graph if reaches(name, name, {name})] == []


@pytest.mark.parametrize("path", FUNCTIONAL, ids=lambda p: p.stem)
def test_functional_imports_torch_and_itself(path):
    # kills: transformers, or another part of the package, in the maths
    allowed = {*sys.stdlib_module_names, "torch", "rlhf_kit"}
    found = list(imported(path, "rlhf_kit.functional"))
    assert {module.split(".")[0] for module, _ in found} <= allowed
    own = [module for module, _ in found if module.split(".")[0] == "rlhf_kit"]
    assert [module for module in own if not f"{module}.".startswith("rlhf_kit.functional.")] == []


def test_cartpole_uses_the_same_maths_and_nothing_else():
    # kills: cartpole_baseline importing from the trainer's side
    for path in CARTPOLE:
        for module, name in imported(path, "cartpole_baseline"):
            if module.split(".")[0] == "rlhf_kit":
                inside = module.startswith("rlhf_kit.functional") or (module, name) == ("rlhf_kit", "functional")
                assert inside, f"{path.name} imports {module}.{name}"


def test_recipes_import_public_names_only():
    # kills: a recipe that needs an internal module, or another recipe; tiny_language is the experiments' own material
    assert RECIPES
    recipes = {path.stem for path in RECIPES} - {"tiny_language"} | {"recipes"}
    for path in RECIPES:
        for module, name in imported(path, "recipes"):
            assert module.split(".")[0] not in recipes, f"{path.name} imports the recipe {module}"
            if module.split(".")[0] == "rlhf_kit" and module != "rlhf_kit.functional":  # public too
                assert module == "rlhf_kit", f"{path.name} imports {module}"
                assert name in rlhf_kit.__all__, f"{path.name} imports {name}, which is not public"


# The lazy package


def modules_after(statement):
    """Top-level modules loaded by a statement in a fresh process."""
    code = f"{statement}\nimport sys\nprint(' '.join(sorted({{name.split('.')[0] for name in sys.modules}})))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(result.stdout.split())


def test_functional_loads_nothing_but_torch():
    # kills: an eager import in rlhf_kit/__init__.py
    loaded = modules_after("import rlhf_kit.functional")
    assert loaded & {"transformers", "trl", "peft", "accelerate", "datasets", "tokenizers", "safetensors"} == set()
    assert "torch" in loaded


def test_bare_import_loads_not_even_torch():
    # kills: an eager import in rlhf_kit/__init__.py
    assert modules_after("import rlhf_kit") & {"torch", "transformers", "trl"} == set()


def test_public_names_are_there_and_no_others():
    # kills: a name in __all__ without a home, a home without a name, dir() without the lazy names
    assert sorted(rlhf_kit.__all__) == sorted(rlhf_kit._HOME)
    for name in rlhf_kit.__all__:
        assert getattr(rlhf_kit, name).__module__ == rlhf_kit._HOME[name]
        assert name in dir(rlhf_kit)
    with pytest.raises(AttributeError, match="no attribute 'PPOTrainr'"):
        rlhf_kit.PPOTrainr  # noqa: B018
    namespace = {}
    exec("from rlhf_kit import *", namespace)
    assert set(rlhf_kit.__all__) <= set(namespace)


def test_type_checkers_see_the_same_names_as_users():
    # kills: a public name missing in the TYPE_CHECKING block, or taken from another module there
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    block = next(n for n in tree.body if isinstance(n, ast.If) and getattr(n.test, "id", "") == "TYPE_CHECKING")
    assert {a.name: node.module for node in block.body for a in node.names} == rlhf_kit._HOME
