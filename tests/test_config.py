"""PPOConfig: what it takes, what it refuses and how it says so, and that no field is dead."""

import ast
import dataclasses
import json
import typing
from pathlib import Path

import pytest
from trl import TrlParser

from rlhf_kit import PPOConfig

PACKAGE = Path(__file__).parents[1] / "rlhf_kit"
FIELDS = {f.name: f for f in dataclasses.fields(PPOConfig)}
HINTS = typing.get_type_hints(PPOConfig)
FLOATS = [name for name, hint in HINTS.items() if hint in (float, float | None)]
INTS = [name for name, hint in HINTS.items() if hint in (int, int | None)]

# Every field away from its default; two sets, because some fields exclude each other.
EVERYTHING = {
    "output_dir": "somewhere", "seed": 3, "rollout_batch_size": 12, "mini_batch_size": 6, "micro_batch_size": 3,
    "generation_batch_size": 5, "ppo_epochs": 2, "num_iterations": 7, "max_prompt_length": 9, "truncate_prompts": True,
    "max_completion_length": 11, "temperature": 0.7, "top_k": 5, "top_p": 0.9, "stop": ["a b", "###"],
    "stop_token_ids": [4, 5], "num_completions_per_prompt": 2, "missing_eos_penalty": 1.5, "learning_rate": 2e-5,
    "value_learning_rate": 1e-3, "lr_scheduler_type": "cosine", "warmup_iterations": 2, "adam_beta1": 0.8,
    "adam_beta2": 0.99, "adam_epsilon": 1e-7, "weight_decay": 0.01, "max_grad_norm": 0.5, "clip_range": 0.1,
    "value_clip_range": 0.3, "value_coef": 0.2, "entropy_coef": 0.01, "gamma": 0.9, "gae_lambda": 0.8,
    "whiten_advantages": False, "whiten_rewards": True, "scale_scores": True, "clip_scores": 3.0,
    "reward_weights": [1.0, 0.5], "kl_coef": 0.2, "kl_estimator": "full", "kl_placement": "loss", "target_kl": 6.0,
    "kl_horizon": 5000.0, "max_approx_kl": 0.1, "value_head": "mlp",
    "critic": "adapter", "load_in_4bit": True, "dtype": "bfloat16",
    "gradient_checkpointing": True, "log_every": 2, "eval_every": 3, "report_to": ["tensorboard", "wandb"],
    "run_name": "name", "log_completions": 0, "save_every": 4, "save_total_limit": 5,
}  # fmt: skip
THE_REST = {"text_prompt_length": 8, "load_in_8bit": True}


def test_the_two_sets_cover_every_field_away_from_its_default():
    # kills: a new field that no test of this file sets
    assert {*EVERYTHING, *THE_REST} == set(FIELDS)
    assert [name for name, value in {**EVERYTHING, **THE_REST}.items() if value == FIELDS[name].default] == []


def test_every_field_has_help():
    # kills: a field without metadata["help"]
    without = [n for n, f in FIELDS.items() if not f.metadata.get("help", "").strip().endswith((".", "..."))]
    assert without == []


def test_every_field_is_a_keyword():
    # kills: kw_only dropped, so that an inserted field shifts the meaning of positional calls
    with pytest.raises(TypeError, match="positional"):
        PPOConfig("runs/here")


def test_defaults_are_those_of_the_design():
    # kills: gae_lambda 0.9, adam_epsilon 1e-8, kl_coef 0.2, value_coef 0.5 or ppo_epochs 1 as default
    config = PPOConfig()
    assert (config.gamma, config.gae_lambda, config.clip_range, config.value_clip_range) == (1.0, 0.95, 0.2, 0.2)
    assert (config.value_coef, config.ppo_epochs, config.adam_epsilon, config.kl_coef) == (0.1, 4, 1e-5, 0.05)
    assert (config.kl_placement, config.weight_decay, config.max_grad_norm) == ("reward", 0.0, 1.0)


# Flags and YAML


def parse(*flags):
    return TrlParser(PPOConfig).parse_args_and_config(list(flags))[0]


def as_flags(settings):
    flags = []
    for name, value in settings.items():
        flags += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return flags


@pytest.mark.parametrize("settings", [EVERYTHING, THE_REST], ids=["everything", "the_rest"])
def test_flags_yaml_and_keywords_give_the_same_config(settings, tmp_path):
    # kills: a field whose annotation the parser turns into another type (int for float, str for list)
    file = tmp_path / "config.yaml"
    file.write_text("".join(f"{name}: {json.dumps(value)}\n" for name, value in settings.items()))
    expected = PPOConfig(**settings)
    for config in (parse(*as_flags(settings)), parse("--config", str(file))):
        assert config == expected
        assert {n: type(getattr(config, n)) for n in settings} == {n: type(value) for n, value in settings.items()}


def test_nothing_given_gives_the_defaults():
    # kills: a parser default that differs from the field's
    assert parse() == PPOConfig()


def test_yaml_reads_1e_minus_5_although_yaml_calls_it_a_string(tmp_path):
    # kills: "1e-5" reaching the type check as text
    (tmp_path / "c.yaml").write_text("learning_rate: 1e-5\nkl_coef: 2\nadam_epsilon: '1e-6'\n")
    config = parse("--config", str(tmp_path / "c.yaml"))
    assert (config.learning_rate, config.kl_coef, config.adam_epsilon) == (1e-5, 2.0, 1e-6)


def test_none_can_be_said_in_yaml_and_as_a_flag(tmp_path):
    # kills: optional fields with a default that can be changed but never be switched off
    (tmp_path / "c.yaml").write_text("max_grad_norm: null\nvalue_clip_range: null\n")
    for config in (
        parse("--config", str(tmp_path / "c.yaml")),
        parse("--max_grad_norm", "None", "--value_clip_range", "none"),
    ):
        assert config.max_grad_norm is None
        assert config.value_clip_range is None


def test_a_flag_wins_over_the_yaml_file(tmp_path):
    # kills: the file read after the command line
    (tmp_path / "c.yaml").write_text("kl_coef: 0.5\nseed: 4\n")
    config = parse("--config", str(tmp_path / "c.yaml"), "--kl_coef", "0.25")
    assert (config.kl_coef, config.seed) == (0.25, 4)


def test_unknown_yaml_key_and_unknown_flag_are_errors(tmp_path):
    # kills: a field named as in the misspelling; PPOConfig swallowing unknown keywords
    (tmp_path / "c.yaml").write_text("learning_rat: 0.1\n")
    with pytest.raises(ValueError, match="learning_rat"):
        parse("--config", str(tmp_path / "c.yaml"))
    with pytest.raises(ValueError, match="learning_ratio"):
        parse("--learning_ratio", "0.1")
    with pytest.raises(TypeError, match="learning_rat"):
        PPOConfig(learning_rat=0.1)


def test_checks_also_run_on_parsed_and_replaced_configs(tmp_path):
    # kills: the checks moved out of __post_init__
    (tmp_path / "c.yaml").write_text("gamma: 1.5\n")
    with pytest.raises(ValueError, match="gamma must be in"):
        parse("--config", str(tmp_path / "c.yaml"))
    with pytest.raises(ValueError, match="gamma must be in"):
        dataclasses.replace(PPOConfig(), gamma=1.5)


def test_config_survives_json():
    # kills: a field whose value json cannot hold, or that comes back as something the checks refuse
    config = PPOConfig(**EVERYTHING)
    assert PPOConfig(**json.loads(json.dumps(dataclasses.asdict(config)))) == config


# Ranges

AT_LEAST_1 = ["rollout_batch_size", "mini_batch_size", "micro_batch_size", "generation_batch_size", "ppo_epochs",
              "num_iterations", "max_prompt_length", "text_prompt_length", "max_completion_length",
              "num_completions_per_prompt", "log_every", "eval_every", "save_every", "save_total_limit"]  # fmt: skip
AT_LEAST_0 = ["seed", "top_k", "warmup_iterations", "log_completions", "missing_eos_penalty", "learning_rate",
              "value_learning_rate", "weight_decay", "value_coef", "entropy_coef", "kl_coef"]  # fmt: skip
ABOVE_0 = ["temperature", "adam_epsilon", "max_grad_norm", "clip_range", "value_clip_range", "clip_scores",
           "target_kl", "kl_horizon", "max_approx_kl"]  # fmt: skip
BAD = [
    *((name, bad, "at least 1") for name in AT_LEAST_1 for bad in (0, -3)),
    *((name, -1, "at least 0") for name in AT_LEAST_0),
    *((name, bad, "above 0") for name in ABOVE_0 for bad in (0, -0.5)),
    *((name, bad, r"in \[0, 1\]") for name in ("gamma", "gae_lambda") for bad in (-0.01, 1.01)),
    *((name, bad, r"in \[0, 1\)") for name in ("adam_beta1", "adam_beta2") for bad in (-0.01, 1.0)),
    *(("top_p", bad, r"in \(0, 1\]") for bad in (0.0, 1.01)),
]
NEEDS = {"kl_horizon": {"target_kl": 1.0}, "rollout_batch_size": {"mini_batch_size": 1}}  # to be allowed at all
EDGE = [
    *((name, 1) for name in AT_LEAST_1),
    *((name, 0) for name in AT_LEAST_0),
    *((name, 1e-3) for name in ABOVE_0 if name != "kl_horizon"),
    *((name, edge) for name in ("gamma", "gae_lambda") for edge in (0, 1)),
    ("adam_beta1", 0), ("adam_beta2", 0), ("adam_beta1", 0.9999), ("top_p", 1), ("top_p", 0.01),
]  # fmt: skip


def test_every_number_has_a_range_test():
    # kills: a new number without bounds
    assert {name for name, _, _ in BAD} == {*FLOATS, *INTS}


@pytest.mark.parametrize(("name", "value", "expected"), BAD)
def test_out_of_range_is_refused_with_name_bound_and_value(name, value, expected):
    # kills: a name dropped from its list in _check_ranges, >= for >
    with pytest.raises(ValueError, match=rf"^{name} must be {expected}, got {value}"):
        PPOConfig(**{**NEEDS.get(name, {}), name: value})


@pytest.mark.parametrize(("name", "value"), EDGE)
def test_the_edge_of_a_range_is_allowed(name, value):
    # kills: > for >=, an edge refused
    assert getattr(PPOConfig(**{**NEEDS.get(name, {}), name: value}), name) == value


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_infinity_are_refused(name, value):
    # kills: the isfinite check
    with pytest.raises(ValueError, match=f"^{name} must be finite, got {value}"):
        PPOConfig(**{**NEEDS.get(name, {}), name: value})


@pytest.mark.parametrize("stop", [[], [""], ["a", ""]])
def test_empty_stop_strings_are_refused(stop):
    # kills: an empty stop string, which ends every completion at once
    with pytest.raises(ValueError, match="stop must hold at least one string, none of them empty"):
        PPOConfig(stop=stop)


def test_unknown_schedule_is_refused_with_the_known_ones():
    # kills: the schedule name checked only by transformers, after the model was loaded
    with pytest.raises(ValueError, match=r"lr_scheduler_type must be one of .*cosine.*constant.*got 'polynomial'"):
        PPOConfig(lr_scheduler_type="polynomial")


# Combinations


@pytest.mark.parametrize(
    ("settings", "fragments"),
    [
        ({"mini_batch_size": 9, "rollout_batch_size": 8}, ["mini_batch_size (9)", "(8)", "Lower", "raise"]),
        ({"rollout_batch_size": 64, "num_completions_per_prompt": 3}, ["(64)", "multiple of", "(3)"]),
        ({"load_in_8bit": True, "load_in_4bit": True}, ["load_in_8bit", "load_in_4bit", "choose one"]),
        ({"text_prompt_length": 5, "max_prompt_length": 9}, ["text_prompt_length=5", "drop max_prompt_length"]),
        ({"text_prompt_length": 5, "truncate_prompts": True}, ["text_prompt_length=5", "truncate_prompts"]),
        (
            {"warmup_iterations": 2, "lr_scheduler_type": "constant"},
            ["warmup_iterations=2", "no effect", "constant_with_warmup"],
        ),
        ({"warmup_iterations": 7, "num_iterations": 7}, ["warmup_iterations (7)", "num_iterations (7)", "below"]),
        ({"target_kl": 6.0, "kl_coef": 0.0}, ["target_kl", "kl_coef=0", "above 0", "drop"]),
        ({"kl_horizon": 500.0}, ["kl_horizon=500.0", "no effect", "set target_kl"]),
        ({"kl_placement": "loss"}, ["kl_estimator='k1'", "zero expected gradient", "'full'", "'k2'"]),
    ],
)
def test_combinations_that_cannot_work_are_refused_with_numbers_and_fix(settings, fragments):
    # kills: each check of _check_combinations removed; numbers or the fix left out of the message
    with pytest.raises(ValueError, match=r"\S") as info:
        PPOConfig(**settings)
    assert [fragment for fragment in fragments if fragment not in str(info.value)] == []


@pytest.mark.parametrize(
    "settings",
    [
        {"mini_batch_size": 8, "rollout_batch_size": 8},
        {"rollout_batch_size": 63, "num_completions_per_prompt": 3},
        {"warmup_iterations": 6, "num_iterations": 7},
        {"warmup_iterations": 2, "lr_scheduler_type": "constant_with_warmup"},
        {"kl_coef": 0.0},
        {"target_kl": 6.0},
        {"kl_horizon": 500.0, "target_kl": 6.0},
        {"kl_placement": "loss", "kl_estimator": "full"},
        {"kl_placement": "loss", "kl_estimator": "k2"},
        {"max_prompt_length": 9, "truncate_prompts": True},
        {"truncate_prompts": True},
    ],
)
def test_neighbouring_combinations_are_allowed(settings):
    # kills: >= for > between the sizes, a refusal that goes too far
    PPOConfig(**settings)


def test_a_folder_at_home_and_none_at_all(monkeypatch):
    # kills: a folder called "~" in the folder one is in, files of a run strewn into it
    monkeypatch.setenv("HOME", "/home/someone")
    assert PPOConfig(output_dir="~/runs/a").output_dir == "/home/someone/runs/a"
    with pytest.raises(ValueError, match="output_dir must not be empty: name a folder"):
        PPOConfig(output_dir="")


# Types


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", True), ("max_grad_norm", False), ("learning_rate", "1e-5"), ("learning_rate", None),
        ("learning_rate", [0.1]), ("seed", "3"), ("seed", 3.0), ("seed", True), ("max_prompt_length", 3.0),
        ("mini_batch_size", None), ("stop", "abc"), ("stop", [1]), ("stop_token_ids", ["1"]),
        ("stop_token_ids", [True]), ("stop_token_ids", 5), ("reward_weights", [True]), ("reward_weights", ["1"]),
        ("reward_weights", 1.0), ("report_to", "tensorboard"), ("scale_scores", 1), ("scale_scores", "yes"),
        ("load_in_4bit", None), ("output_dir", None), ("output_dir", Path("x")), ("run_name", 5),
    ],
)  # fmt: skip
def test_wrong_types_are_refused_with_name_and_value(name, value):
    # kills: bool taken for int or float, text taken for a list of its letters, items of lists unchecked
    with pytest.raises(TypeError, match=f"^{name} must be ") as info:
        PPOConfig(**{name: value})
    assert repr(value) in str(info.value)
    assert type(value).__name__ in str(info.value)


@pytest.mark.parametrize("name", FLOATS)
def test_an_int_is_a_float(name):
    # kills: isinstance(value, float)
    value = {"adam_beta1": 0, "adam_beta2": 0, "kl_horizon": 500}.get(name, 1)
    config = PPOConfig(**{"target_kl": 1.0, name: value})
    assert getattr(config, name) == value


def test_whole_numbers_are_good_reward_weights_and_a_tuple_is_a_list():
    # kills: tuples refused or kept, ints refused inside a list of floats
    config = PPOConfig(reward_weights=(1, 2.5), stop=("a", "b"))
    assert config.reward_weights == [1, 2.5]
    assert config.stop == ["a", "b"]
    assert type(config.stop) is list


@pytest.mark.parametrize("name", [n for n, hint in HINTS.items() if typing.get_origin(hint) is typing.Literal])
def test_choices_outside_the_list_are_refused(name):
    # kills: Literal fields unchecked
    with pytest.raises((TypeError, ValueError), match=name):
        PPOConfig(**{name: "something else"})
    with pytest.raises((TypeError, ValueError), match=name):
        PPOConfig(**{name: None})


# Derived sizes


@pytest.mark.parametrize(
    ("rollout", "mini", "epochs", "repeats", "steps", "prompts"),
    [(8, 4, 2, 1, 4, 8), (7, 3, 1, 1, 3, 7), (12, 5, 4, 3, 12, 4), (1, 1, 1, 1, 1, 1), (6, 6, 3, 6, 3, 1)],
)
def test_derived_sizes(rollout, mini, epochs, repeats, steps, prompts):
    # kills: floor for ceil (the last, smaller mini-batch forgotten), epochs forgotten, prompts times repeats
    config = PPOConfig(
        rollout_batch_size=rollout, mini_batch_size=mini, ppo_epochs=epochs, num_completions_per_prompt=repeats
    )
    assert config.optimizer_steps_per_iteration() == steps
    assert config.num_prompts_per_iteration() == prompts


# No dead fields


def attributes_of_args(path):
    """Names x in args.x, self.args.x and self._args.x of a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            owner = node.value
            name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", None)
            if name in ("args", "_args"):
                yield node.attr


def read_by_method(name):
    """Fields that a method of the config reads, such as the sizes behind `num_prompts_per_iteration`."""
    tree = ast.parse((PACKAGE / "config.py").read_text(encoding="utf-8"))
    methods = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name]
    return {n.attr for m in methods for n in ast.walk(m) if isinstance(n, ast.Attribute) and n.attr in FIELDS}


USED = {name for path in PACKAGE.rglob("*.py") if path.name != "config.py" for name in attributes_of_args(path)}
BY_METHODS = {field for name in USED - set(FIELDS) for field in read_by_method(name)}


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_is_read_outside_config(name):
    # kills: a field that the code stopped reading
    assert name in USED | BY_METHODS, f"PPOConfig.{name} is read nowhere in rlhf_kit: a dead setting."


def test_nothing_else_is_read_from_the_config():
    # kills: args.<misspelt field>, which would only fail when that line runs
    known = {*FIELDS, *(name for name, member in vars(PPOConfig).items() if callable(member))}
    assert USED - known == set()


# Found by breaking it


@pytest.mark.parametrize("name", [n for n, hint in HINTS.items() if typing.get_origin(hint) is typing.Literal])
def test_a_wrong_choice_is_answered_with_the_choices(name):
    # kills: "must be Literal, got ...", which names none of the allowed values
    with pytest.raises((TypeError, ValueError), match=name) as info:
        PPOConfig(**{name: "something else"})
    assert [choice for choice in typing.get_args(HINTS[name]) if repr(choice) not in str(info.value)] == []


@pytest.mark.parametrize(
    ("name", "value", "item"),
    [("stop", "abc", "str"), ("reward_weights", [True], "float"), ("stop_token_ids", ["1"], "int")],
)
def test_a_wrong_list_is_answered_with_the_type_of_its_items(name, value, item):
    # kills: "must be list, got [True] of type list"
    with pytest.raises(TypeError, match=rf"{name} must be .*list.*{item}.*, got"):
        PPOConfig(**{name: value})


@pytest.mark.parametrize("weight", [float("nan"), float("inf")])
def test_reward_weights_must_be_finite(weight):
    # kills: NaN weights, which make every score NaN and every update a skipped one
    with pytest.raises(ValueError, match="reward_weights"):
        PPOConfig(reward_weights=[1.0, weight])


@pytest.mark.parametrize("ids", [[-1], []])
def test_stop_token_ids_that_can_never_stop_are_refused(ids):
    # kills: a setting without effect (stop=[] is refused already)
    with pytest.raises(ValueError, match="stop_token_ids"):
        PPOConfig(stop_token_ids=ids)


def test_run_name_without_trackers_is_refused():
    # kills: a setting without effect, which the module promises to refuse
    with pytest.raises(ValueError, match=r"run_name.*report_to"):
        PPOConfig(run_name="first try")


def test_horizon_so_short_that_one_low_kl_switches_the_penalty_off_for_good():
    # kills: 1 - 0.2 * 64 / 10 < 0, after which a coefficient of 0 can never grow again
    with pytest.raises(ValueError, match="kl_horizon"):
        PPOConfig(target_kl=6.0, kl_horizon=10.0, rollout_batch_size=64)


def test_seed_beyond_32_bits_is_refused_by_name():
    # kills: numpy's "Seed must be between 0 and 2**32 - 1" while the trainer is built
    with pytest.raises(ValueError, match=r"^seed must"):
        PPOConfig(seed=2**32)
