"""The tiny language of the experiments, and that every experiment runs."""

import json
import random
import sys
from pathlib import Path

import pytest
from fresh import run_fresh

LAB = Path(__file__).parents[1] / "recipes" / "lab"
EXPERIMENTS = sorted(path.stem for path in LAB.glob("*.py") if path.stem != "tiny_language")
sys.path.insert(0, str(LAB))

import tiny_language  # noqa: E402


def test_the_grammar_accepts_what_it_writes():
    # kills: a kind of sentence that is_sentence forgot
    rng = random.Random(3)
    for _ in range(300):
        text = tiny_language.story(rng)
        prompt, completion = text.split()[:3], text.split()[3:]
        assert tiny_language.grammatical([" ".join(prompt)], [" ".join(completion)]) == [1.0], text
        assert set(text.split()) <= set(tiny_language.WORDS)


@pytest.mark.parametrize(
    "words",
    ["", "he", "he was", "he was river", "he was sad sad", "he walked to the", "he walked to the sad", "was sad",
     "the old man", "the man was sad", "he bought bread and bread fish", "he bought bread and sold", "sad . sad"],
)  # fmt: skip
def test_the_grammar_refuses_what_it_does_not_write(words):
    # kills: a part of a sentence that is not looked at
    assert not tiny_language.is_sentence(words.split())


def test_rewards_by_hand():
    # kills: the prompt left out of the first sentence, an unfinished last sentence counted
    assert tiny_language.grammatical(["the old man"], ["was sad . he he . he ran"]) == [0.5]
    assert tiny_language.grammatical(["the old man"], ["was sad"]) == [0.0]
    assert tiny_language.periods(["a . b .", ""]) == [2.0, 0.0]
    assert tiny_language.ends_well(["was sad . he was kind .", "was kind . he was sad .", "was kind", "."]) == [
        1,
        0,
        0,
        0,
    ]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a model that has hardly learned anything, which is enough to run on."""
    place = tmp_path_factory.mktemp("lab")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        patch.setattr(tiny_language, "STEPS", 3)
        tiny_language.story_model()
    return place


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_runs(name, place):
    # kills: a setting that no longer exists, a metric that was renamed
    seeds = "2" if name == "baseline" else "1"
    done = run_fresh(LAB / f"{name}.py", "--seeds", seeds, "--iterations", "2", cwd=place)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("\n|") >= 2
    assert (place / f"runs/lab/{name}.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((place / f"runs/lab/{name}.json").read_text())
