"""Sampling: the distribution tokens are drawn from, where completions end, and what is left as it was."""

import copy
import random

import numpy as np
import pytest
import torch
from conftest import FAMILIES, TEXTS, make_lora, make_model, make_tokenizer
from torch.testing import assert_close
from transformers import GenerationConfig
from transformers.generation import WatermarkingConfig

from rlhf_kit import AutoModelForCausalLMWithValueHead, PPOConfig
from rlhf_kit.data import pad_left, pad_right
from rlhf_kit.functional import token_logprobs
from rlhf_kit.sampling import Sampler, seed_from, seeded

EOS = 0  # also the pad token of the tokenizer
PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [20], [EOS, 31, EOS, 33], [40, 41]]  # ragged; one with EOS = pad
CPU = torch.device("cpu")


def make_policy(family="gpt2", **overrides):
    model = AutoModelForCausalLMWithValueHead.from_pretrained(
        make_model(family, **overrides), peft_config=make_lora(family, lora_dropout=0.1)
    )
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name or "v_head" in name:
                parameter.normal_(std=0.3)
    return model


def make_sampler(tokenizer, model=None, **overrides):
    args = PPOConfig(**{"max_completion_length": 8, **overrides})
    return Sampler(tokenizer, args, model and model.generation_config)


@pytest.fixture
def draws(monkeypatch):
    """What `torch.multinomial` is given and gives, step by step: a list of (probabilities (B, V), tokens (B,))."""
    multinomial, seen = torch.multinomial, []

    def watched(probabilities, num_samples, **kwargs):
        tokens = multinomial(probabilities, num_samples, **kwargs)
        seen.append((probabilities.clone(), tokens.squeeze(1).clone()))
        return tokens

    monkeypatch.setattr(torch, "multinomial", watched)
    return seen


@pytest.fixture
def script(monkeypatch):
    """Decide what is drawn: `script(rows)` makes row i get the tokens rows[i]; after their end, token 99."""

    def make(rows):
        rows, step, first = list(rows), iter(range(10**6)), {}

        def scripted(probabilities, num_samples, **kwargs):
            t = next(step)
            if first.get("rows") is None:
                first["rows"] = rows[: len(probabilities)]
            tokens = [row[t] if t < len(row) else 99 for row in first["rows"]]
            return torch.tensor(tokens)[:, None]

        monkeypatch.setattr(torch, "multinomial", scripted)

    return make


# The distribution is the policy's


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.9])
@pytest.mark.parametrize(
    ("family", "overrides"), [*((name, {}) for name in FAMILIES), ("gemma3", {"sliding_window": 4})]
)
def test_score_replays_the_probabilities_tokens_were_drawn_with(family, overrides, temperature, tokenizer, draws):
    # kills: temperature missing on either side, dropout while sampling, adapters off while sampling,
    # kills: masks made by comparing ids with the pad id (a prompt holds EOS = pad), left padding attended to
    model = make_policy(family, **overrides)
    model.train()
    sampler = make_sampler(tokenizer, model, temperature=temperature, max_completion_length=12)
    widths = []
    hook = model.causal_lm.get_input_embeddings().register_forward_hook(
        lambda _, args, __: widths.append(args[0].shape[1])
    )
    torch.manual_seed(0)
    completions, _ = sampler(model, PROMPTS)
    hook.remove()
    assert widths == [9] + [1] * (len(draws) - 1)  # the KV cache is on

    prompts, prompt_mask = pad_left(PROMPTS, 0)
    ids, mask = pad_right(completions, 0)
    with torch.no_grad():
        logits, _ = model.score(
            torch.cat([prompts, ids], 1), torch.cat([prompt_mask, mask], 1).long(), completion_length=ids.shape[1]
        )
    replayed = token_logprobs(logits, ids, temperature=temperature).exp()
    whole = torch.softmax(logits / temperature, -1)
    count = 0
    for t, (probabilities, tokens) in enumerate(draws):
        for i, completion in enumerate(completions):
            if t < len(completion):
                assert completion[t] == tokens[i]
                assert_close(replayed[i, t], probabilities[i, tokens[i]], atol=1e-6, rtol=1e-5)
                assert_close(whole[i, t], probabilities[i], atol=1e-6, rtol=1e-5)
                count += 1
    assert count == sum(map(len, completions)) >= 20
    assert all(module.training for module in model.modules())


def test_sampling_draws_from_the_distribution(tokenizer):
    # kills: greedy decoding, a fixed seed, one row's draws used for all
    model = make_policy("llama", scale=3.0)
    sampler = make_sampler(tokenizer, model, max_completion_length=1)
    with torch.no_grad():
        ids = torch.tensor([[40, 41, 0]])
        logits, _ = model.score(ids, torch.ones_like(ids), completion_length=1)
    p = torch.softmax(logits[0, 0], -1)
    torch.manual_seed(0)
    completions, _ = sampler(model, [[40, 41]] * 4000)
    counts = torch.bincount(torch.tensor(completions).flatten(), minlength=300)
    error = (counts / 4000 - p).abs()
    assert (error < 5 * (p * (1 - p) / 4000).sqrt() + 1e-3).all()


TRAPS = {
    "top_k": 5,
    "top_p": 0.5,
    "min_p": 0.2,
    "typical_p": 0.3,
    "epsilon_cutoff": 0.05,
    "eta_cutoff": 0.05,
    "temperature": 0.1,
    "repetition_penalty": 1.3,
    "encoder_repetition_penalty": 1.3,
    "min_length": 20,
    "min_new_tokens": 8,
    "no_repeat_ngram_size": 1,
    "bad_words_ids": [[50], [5, 6]],
    "suppress_tokens": [51, 52],
    "begin_suppress_tokens": [53],
    "forced_bos_token_id": 54,
    "forced_eos_token_id": 55,
    "sequence_bias": [[[56], 5.0]],
    "exponential_decay_length_penalty": (1, 5.0),
    "watermarking_config": WatermarkingConfig(bias=5.0),
    "guidance_scale": 2.0,
    "num_beams": 2,
    "num_return_sequences": 2,
    "do_sample": False,
    "max_length": 3,
    "max_new_tokens": 1,
    "max_time": 1e-9,
    "stop_strings": ["a", "e"],
    "use_cache": False,
    "cache_implementation": "static",
    "prompt_lookup_num_tokens": 2,
    "return_dict_in_generate": True,
    "output_scores": True,
    "renormalize_logits": True,
    "remove_invalid_values": True,
    "token_healing": True,
    "low_memory": True,
    "pad_token_id": 77,
    "bos_token_id": 78,
}


def trapped(names):
    settings = {name: TRAPS[name] for name in names}
    config = GenerationConfig(eos_token_id=EOS)
    for name, value in settings.items():
        setattr(config, name, value)
    return config


@pytest.mark.parametrize("names", [[name] for name in TRAPS] + [list(TRAPS)], ids=lambda names: "+".join(names)[:40])
def test_the_models_generation_config_changes_nothing(names, tokenizer, draws):
    # kills: the swap of the generation config dropped, any field left to it, its object changed or replaced
    model = make_policy("gpt2")
    model.causal_lm.generation_config = GenerationConfig(eos_token_id=EOS)
    torch.manual_seed(0)
    expected = make_sampler(tokenizer, model)(model, PROMPTS)
    expected_draws = list(draws)
    draws.clear()

    own = trapped(names)
    before = copy.deepcopy(own.to_dict())
    model.causal_lm.generation_config = own
    torch.manual_seed(0)
    assert make_sampler(tokenizer, model)(model, PROMPTS) == expected
    assert len(draws) == len(expected_draws)
    for (found, _), (wanted, _) in zip(draws, expected_draws, strict=True):
        assert torch.equal(found, wanted)
        assert (found > 0).all()  # nothing is cut off
    assert model.causal_lm.generation_config is own
    assert model.generation_config is own
    assert own.to_dict() == before


def test_the_traps_are_traps(tokenizer, draws):
    # kills: a test above that could not fail: plain sampling on such a config does cut the distribution
    model = make_policy("gpt2")
    model.causal_lm.generation_config = trapped(["top_k", "repetition_penalty", "min_length"])
    model.causal_lm.generation_config.do_sample = True
    model.generate(input_ids=torch.tensor([PROMPTS[0]]), max_new_tokens=2)
    assert (draws[0][0] > 0).sum() <= 5


def test_the_generation_config_comes_back_after_an_error(tokenizer, monkeypatch):
    # kills: try/finally dropped around the swap
    model = make_policy("gpt2")
    own = trapped(["top_k", "num_beams"])
    before = copy.deepcopy(own.to_dict())
    model.causal_lm.generation_config = own
    model.train()

    def fails(*args, **kwargs):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(torch, "multinomial", fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        make_sampler(tokenizer, model)(model, PROMPTS)
    assert model.causal_lm.generation_config is own
    assert own.to_dict() == before
    assert model.training
    assert torch.is_grad_enabled()


def test_top_k_truncates(tokenizer, draws):
    # kills: args.top_k ignored
    model = make_policy("gpt2")
    make_sampler(tokenizer, model, top_k=7)(model, PROMPTS)
    assert all((probabilities > 0).sum(-1).eq(7).all() for probabilities, _ in draws)


def test_top_p_truncates(tokenizer, draws):
    # kills: args.top_p ignored
    model = make_policy("gpt2")
    torch.manual_seed(0)
    make_sampler(tokenizer, model, top_p=0.6, max_completion_length=1)(model, PROMPTS)
    torch.manual_seed(0)
    make_sampler(tokenizer, model, max_completion_length=1)(model, PROMPTS)
    (cut, _), (full, _) = draws
    for row, whole in zip(cut, full, strict=True):
        kept = whole[row > 0]
        assert 0.6 <= kept.sum() < 0.6 + kept.min() + 1e-5  # the smallest set that holds 0.6
        assert whole[row == 0].max() <= kept.min()


# Where completions end


def test_stop_token_ids_are_the_union(tokenizer):
    # kills: a source of EOS ids left out, only the first of the model's list used
    model = make_policy("gpt2")
    model.causal_lm.generation_config.eos_token_id = [11, 12]
    assert make_sampler(tokenizer, model, stop_token_ids=[13, 11]).stop_token_ids == [0, 11, 12, 13]
    model.causal_lm.generation_config.eos_token_id = 14
    assert make_sampler(tokenizer, model).stop_token_ids == [0, 14]
    model.causal_lm.generation_config.eos_token_id = None
    assert make_sampler(tokenizer, model).stop_token_ids == [0]
    assert make_sampler(tokenizer, None).stop_token_ids == [0]


def test_pad_token_id():
    # kills: a pad id of None reaching the tensors, EOS preferred to the tokenizer's own pad token
    tokenizer = make_tokenizer()
    assert make_sampler(tokenizer).pad_token_id == EOS
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(17)
    assert make_sampler(tokenizer).pad_token_id == 17
    tokenizer.pad_token = None
    assert make_sampler(tokenizer).pad_token_id == EOS
    tokenizer.eos_token = None
    assert make_sampler(tokenizer, stop_token_ids=[13, 12]).pad_token_id == 12
    assert make_sampler(tokenizer).pad_token_id == 0
    assert make_sampler(tokenizer).stop_token_ids == []


def test_every_kind_of_end_token_ends_a_completion(tokenizer, script):
    # kills: an end token left out or cut off, text after it kept, ended = "shorter than the maximum"
    model = make_policy("gpt2")
    model.causal_lm.generation_config.eos_token_id = [11, 12]
    sampler = make_sampler(tokenizer, model, stop_token_ids=[13], max_completion_length=4)
    script([[50, 11, 51, 52], [50, 51, 12, 52], [13], [50, EOS], [50, 51, 52, EOS], [50, 51, 52, 53]])
    ids, ended = sampler(model, [[5, 6], [7], [8], [9], [8], [9]])
    assert ids == [[50, 11], [50, 51, 12], [13], [50, EOS], [50, 51, 52, EOS], [50, 51, 52, 53]]
    assert ended == [True, True, True, True, True, False]


def test_maximum_length(tokenizer, script):
    # kills: max_completion_length counted with the prompt, or off by one
    model = make_policy("gpt2")
    script([[50] * 20, [51] * 20])
    ids, ended = make_sampler(tokenizer, model, max_completion_length=5)(model, [[5] * 9, [7]])
    assert ids == [[50] * 5, [51] * 5]
    assert ended == [False, False]


def test_eos_at_once(tokenizer):
    # kills: an empty completion where the model stops at once
    model = make_policy("llama")
    model.causal_lm.get_output_embeddings().register_forward_hook(
        lambda _, __, logits: logits + 1e4 * torch.eye(logits.shape[-1])[EOS]
    )
    ids, ended = make_sampler(tokenizer, model)(model, PROMPTS)
    assert ids == [[EOS]] * 4
    assert ended == [True] * 4


@pytest.mark.parametrize("end", [0, 11, 12, 13])
def test_real_sampling_stops_at_every_end_token(end, tokenizer):
    # kills: the stop set not passed to generate
    model = make_policy("llama")
    model.causal_lm.generation_config.eos_token_id = [11, 12]
    bias = torch.full((300,), -1e4)
    bias[[end, 60, 61]] = 0
    model.causal_lm.get_output_embeddings().register_forward_hook(lambda _, __, logits: logits * 0.01 + bias)
    sampler = make_sampler(tokenizer, model, stop_token_ids=[13], max_completion_length=30)
    torch.manual_seed(0)
    ids, ended = sampler(model, PROMPTS * 4)
    assert ended == [row[-1] == end for row in ids]
    assert sum(ended) >= 14
    assert all(end not in row[:-1] for row in ids)
    assert len({len(row) for row in ids}) > 3


def test_pad_tokens_that_were_drawn_are_no_end(script):
    # kills: lengths from comparing ids with the pad id
    tokenizer = make_tokenizer()
    tokenizer.pad_token = tokenizer.convert_ids_to_tokens(17)
    model = make_policy("gpt2")
    script([[17, 50, 17, 17], [17, EOS, 51, 52]])
    ids, ended = make_sampler(tokenizer, model, max_completion_length=4)(model, [[5, 17, 6], [17]])
    assert ids == [[17, 50, 17, 17], [17, EOS]]
    assert ended == [False, True]


def test_a_prompt_that_ends_with_an_end_token(tokenizer, script):
    # kills: the search for end tokens reaching into the prompt
    model = make_policy("gpt2")
    script([[50, 51], [52, EOS, 53]])
    ids, ended = make_sampler(tokenizer, model, max_completion_length=2)(model, [[5, EOS], [EOS]])
    assert ids == [[50, 51], [52, EOS]]
    assert ended == [False, True]


def test_without_any_end_token(script):
    # kills: None in the stop set
    tokenizer = make_tokenizer()
    tokenizer.eos_token = tokenizer.pad_token = None
    model = make_policy("gpt2")
    model.causal_lm.generation_config.eos_token_id = None
    script([[EOS, 50, EOS], [51, 52, 53]])
    sampler = make_sampler(tokenizer, model, max_completion_length=3)
    assert sampler(model, [[5, 6], [7]]) == ([[EOS, 50, EOS], [51, 52, 53]], [False, False])
    assert not sampler.has_ended([50, EOS])


# Stop strings


def letters(tokenizer, text):
    """One token for each character."""
    return [tokenizer.convert_tokens_to_ids(tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(c)[0][0])
            for c in text]  # fmt: skip


def test_stop_strings_end_a_completion(tokenizer, script):
    # kills: stop strings ignored, cut off, only the first of them used, only whole tokens matched
    model = make_policy("gpt2")
    spanning = letters(tokenizer, "a fox")
    (the,) = tokenizer("The").input_ids  # a token of several letters that holds a stop string
    assert tokenizer.decode([the]) == "The"
    sampler = make_sampler(tokenizer, model, stop=["fox", "He", "he"], max_completion_length=7)
    script(
        [
            [*spanning, 50, 51],
            [50, the, 52],
            [*letters(tokenizer, "He"), EOS],
            letters(tokenizer, "fo fo x"),
            [50, EOS, *spanning],
        ]
    )
    ids, ended = sampler(model, [[5, 6], [7], [8], [9], [9]])
    assert ids == [
        spanning,
        [50, the],
        letters(tokenizer, "He"),
        letters(tokenizer, "fo fo x"),
        [50, EOS],
    ]
    assert ended == [True, True, True, False, True]
    assert ended == [sampler.has_ended(row) for row in ids]


def test_stop_strings_do_not_reach_back_into_the_prompt(tokenizer, script):
    # kills: the criteria given the whole sequence
    model = make_policy("gpt2")
    prompt = letters(tokenizer, "the quick fo")
    script([letters(tokenizer, "x fox."), letters(tokenizer, "x x x ")])
    ids, ended = make_sampler(tokenizer, model, stop=["fox"], max_completion_length=6)(model, [prompt, prompt])
    assert ids == [letters(tokenizer, "x fox"), letters(tokenizer, "x x x ")]
    assert ended == [True, False]


def test_a_stop_string_at_the_last_token(tokenizer, script):
    # kills: ended = "shorter than the maximum"
    model = make_policy("gpt2")
    script([letters(tokenizer, "a.")])
    sampler = make_sampler(tokenizer, model, stop=["."], max_completion_length=2)
    assert sampler(model, [[5]]) == ([letters(tokenizer, "a.")], [True])


def test_stop_strings_with_tokens_the_tokenizer_does_not_know(tokenizer, script):
    # kills: an index error for models whose vocabulary is padded beyond the tokenizer's
    model = make_policy("gpt2", vocab_size=320)
    script([[310, 319, *letters(tokenizer, "."), 311], [319, 318, 317, 316]])
    sampler = make_sampler(tokenizer, model, stop=[".", "fox"], max_completion_length=4)
    assert sampler(model, [[5], [6]]) == ([[310, 319, *letters(tokenizer, ".")], [319, 318, 317, 316]], [True, False])


def test_stop_strings_of_several_bytes(tokenizer, script):
    # kills: nothing by itself: a character of several byte-level tokens must be found
    model = make_policy("gpt2")
    euro = tokenizer("\u20ac").input_ids
    assert len(euro) == 3
    script([[50, *euro, 51], [50, *euro[:2], 51, 52]])
    sampler = make_sampler(tokenizer, model, stop=["\u20ac"], max_completion_length=5)
    assert sampler(model, [[5], [6]]) == ([[50, *euro], [50, *euro[:2], 51, 52]], [True, False])


def test_has_ended(tokenizer):
    # kills: an end token anywhere counted, stop strings forgotten
    sampler = make_sampler(tokenizer, stop=["fox"], stop_token_ids=[13])
    fox = letters(tokenizer, "fox")
    assert sampler.has_ended([EOS])
    assert sampler.has_ended([50, 13])
    assert sampler.has_ended(fox)
    assert sampler.has_ended([50, *fox])
    assert not sampler.has_ended([EOS, 50])
    assert not sampler.has_ended([13, 50])
    assert not sampler.has_ended([*fox, 50])
    assert not sampler.has_ended(fox[1:])
    assert not make_sampler(tokenizer).has_ended(fox)
    assert isinstance(sampler.has_ended(fox), bool)


def test_flags_agree_with_has_ended_on_real_samples(tokenizer):
    # kills: two definitions of "ended"
    model = make_policy("llama", scale=2.0)
    sampler = make_sampler(tokenizer, model, stop=["e", "th", "o "], stop_token_ids=[60, 61, 62], temperature=2.0,
                           max_completion_length=20)  # fmt: skip
    torch.manual_seed(0)
    ids, ended = sampler(model, [tokenizer(text[:n]).input_ids for text in TEXTS for n in (3, 8, 15)] * 6)
    assert ended == [sampler.has_ended(row) for row in ids]
    assert all(not any(sampler.has_ended(row[:n]) for n in range(1, len(row))) for row in ids)
    assert all(flag or len(row) == 20 for row, flag in zip(ids, ended, strict=True))
    assert {True, False} == set(ended)


def test_generation_stops_once_every_row_has_ended(tokenizer, draws, monkeypatch):
    # kills: ends that are noted, but do not stop the generation: rows would run to the maximum
    model = make_policy("gpt2")
    watched = torch.multinomial
    rows = [letters(tokenizer, "a fox"), [50, EOS], [50, 51, 13]]

    def scripted(probabilities, num_samples, **kwargs):
        watched(probabilities, num_samples, **kwargs)
        t = len(draws) - 1
        return torch.tensor([[row[t] if t < len(row) else 99] for row in rows])

    monkeypatch.setattr(torch, "multinomial", scripted)
    sampler = make_sampler(tokenizer, model, stop=["fox"], stop_token_ids=[13], max_completion_length=50)
    assert sampler(model, [[5], [6], [7]]) == (rows, [True] * 3)
    assert len(draws) == 5


# Batches


@pytest.mark.parametrize(("size", "expected"), [(None, [5]), (1, [1] * 5), (2, [2, 2, 1]), (5, [5]), (9, [5])])
def test_generation_batch_size(size, expected, tokenizer, monkeypatch):
    # kills: the setting ignored, the last part dropped, results out of order, lengths carried from part to part
    model = make_policy("gpt2")
    table = {5: [50, EOS, 51], 6: [51, 52, 53], 7: [EOS], 8: [53, 54, EOS], 9: [55, 56, 57]}
    batches, state = [], {}
    generate = model.causal_lm.generate

    def watched(**kwargs):
        batches.append(len(kwargs["input_ids"]))
        state.update(step=0, rows=[table[i] for i in kwargs["input_ids"][:, -1].tolist()])
        return generate(**kwargs)

    def scripted(probabilities, num_samples, **kwargs):
        tokens = [row[state["step"]] if state["step"] < len(row) else 99 for row in state["rows"]]
        state["step"] += 1
        return torch.tensor(tokens)[:, None]

    monkeypatch.setattr(model.causal_lm, "generate", watched)
    monkeypatch.setattr(torch, "multinomial", scripted)
    sampler = make_sampler(tokenizer, model, generation_batch_size=size, max_completion_length=3)
    ids, ended = sampler(model, [[1, 5], [6], [2, 2, 2, 7], [8], [3, 9]])
    assert batches == expected
    assert ids == [[50, EOS], [51, 52, 53], [EOS], [53, 54, EOS], [55, 56, 57]]
    assert ended == [True, False, True, True, False]


def test_completions_are_plain_lists_and_prompts_stay(tokenizer):
    # kills: tensors leaking out, prompts padded in place
    model = make_policy("gpt2")
    prompts = copy.deepcopy(PROMPTS)
    ids, ended = make_sampler(tokenizer, model)(model, prompts)
    assert prompts == PROMPTS
    assert all(type(token) is int for row in ids for token in row)
    assert all(type(flag) is bool for flag in ended)
    assert not any(p.grad is not None for p in model.parameters())


# Random numbers


def test_seeded_sampling_is_reproducible(tokenizer):
    # kills: the key ignored, a part of it ignored
    model = make_policy("gpt2")
    sampler = make_sampler(tokenizer, model)

    def sample(*key):
        with seeded(*key, device=CPU):
            return sampler(model, PROMPTS)[0]

    first = sample(1, 2, 3)
    torch.rand(7)
    assert sample(1, 2, 3) == first
    others = [sample(*key) for key in [(0, 2, 3), (1, 0, 3), (1, 2, 0), (1, 2, 4), (2, 1, 3), (3, 2, 1)]]
    assert all(other != first for other in others)
    assert len({str(other) for other in others}) == len(others)


def test_seeded_leaves_the_global_generators_alone(tokenizer):
    # kills: fork_rng dropped
    model = make_policy("gpt2")
    torch.manual_seed(5)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    with seeded(1, 2, device=CPU):
        make_sampler(tokenizer, model)(model, PROMPTS)

    def fails():
        torch.rand(3)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), seeded(1, 2, device=CPU):
        fails()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]
    assert random.getstate() == before[2]


def test_seed_from():
    # kills: the key summed or cut
    keys = [(a, b, c) for a in range(1, 8) for b in range(1, 8) for c in range(1, 8)]
    seeds = {seed_from(*key) for key in keys}
    assert len(seeds) == len(keys)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert len({seed % 2**16 for seed in seeds}) > 300 < len({seed >> 47 for seed in seeds})  # all bits are used
    assert seed_from(3, 4) == seed_from(3, 4)
    assert seed_from(2**31, 0) != seed_from(0, 2**31)


def test_seed_from_tells_keys_with_trailing_zeros_apart():
    # kills: the length of the key left out: numpy pads entropy with zeros, so (s, i) would be (s, i, 0, 0), and
    # shuffling under (seed, iteration) would use the numbers of sampling under (seed, stream, number, process)
    keys = [(1, 2), (1, 2, 0), (1, 2, 0, 0), (1,), (1, 0), (0,), (0, 0), (0, 1)]
    assert len({seed_from(*key) for key in keys}) == len(keys)
