"""Sampling completions from exactly the policy that PPO reasons about."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from rlhf_kit.config import PPOConfig
from rlhf_kit.data import pad_left
from rlhf_kit.modeling import AutoModelForCausalLMWithValueHead
from rlhf_kit.processes import passes
from rlhf_kit.scoring import generation_config


class Sampler:
    """Samples completions from exactly the policy that PPO reasons about: softmax(logits / temperature).

    Whatever else the model's own generation config asks for (top-k, repetition penalty, ...) is left out, because then
    log-probs would describe another distribution than the one the tokens came from.

    Args:
        tokenizer: gives EOS and padding, and turns stop strings into tokens.
        args: lengths, temperature, stop strings and ids.
        model_generation_config: the model's own; only its EOS ids are used.

    Attributes:
        stop_token_ids: every id that ends a completion, sorted.
        pad_token_id: an id to pad with; masks never depend on it.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, args: PPOConfig, model_generation_config: GenerationConfig | None
    ):
        self._tokenizer = tokenizer
        self._args = args
        own = getattr(model_generation_config, "eos_token_id", None)
        own = own if isinstance(own, list) else [own]
        ids = {*own, tokenizer.eos_token_id, *(args.stop_token_ids or [])} - {None}
        self.stop_token_ids: list[int] = sorted(ids)
        self.pad_token_id: int = next(
            (i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id, *self.stop_token_ids) if i is not None), 0
        )
        self._string_criteria = StopStringCriteria(tokenizer, args.stop) if args.stop else None

    @torch.no_grad()
    def __call__(
        self, model: AutoModelForCausalLMWithValueHead, prompt_ids: list[list[int]]
    ) -> tuple[list[list[int]], list[bool]]:
        """Sample one completion for each prompt.

        Args:
            model: the policy. Dropout is off while sampling; its generation config is left as it is.
            prompt_ids: B prompts, unpadded.

        Returns:
            (B lists of completion ids, cut after the first end token, which is included; B flags: did it end by
            itself?)
        """
        size = self._args.generation_batch_size or len(prompt_ids)
        ids: list[list[int]] = []
        ended: list[bool] = []
        with model.sampling_mode():
            for rows, idle in passes(model, len(prompt_ids), size):
                batch_ids, batch_ended = self._generate(model, prompt_ids[rows])
                if not idle:
                    ids += batch_ids
                    ended += batch_ended
        return ids, ended

    def decode(self, completion_ids: list[list[int]]) -> list[str]:
        """Texts without special tokens."""
        return [
            self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            for ids in completion_ids
        ]

    def has_ended(self, completion_ids: list[int]) -> bool:
        """Whether a completion ends with an end token or a stop string."""
        if completion_ids[-1] in self.stop_token_ids:
            return True
        return self._string_criteria is not None and bool(self._string_criteria(torch.tensor([completion_ids]), None))

    def _generate(
        self, model: AutoModelForCausalLMWithValueHead, prompt_ids: list[list[int]]
    ) -> tuple[list[list[int]], list[bool]]:
        causal_lm = model.causal_lm
        input_ids, mask = pad_left(prompt_ids, self.pad_token_id)  # (B, P)
        width = input_ids.shape[1]
        device = causal_lm.device
        recorder = _LengthRecorder(width, self.stop_token_ids, self._string_criteria)
        config = GenerationConfig(
            max_new_tokens=self._args.max_completion_length,
            do_sample=True,
            temperature=self._args.temperature,
            top_k=self._args.top_k,
            top_p=self._args.top_p,
            eos_token_id=self.stop_token_ids or None,
            pad_token_id=self.pad_token_id,
        )
        with generation_config(causal_lm, config):
            sequences = causal_lm.generate(
                input_ids=input_ids.to(device),
                attention_mask=mask.long().to(device),
                generation_config=config,
                stopping_criteria=StoppingCriteriaList([recorder]),
                synced_gpus=model.is_sharded,  # steps on until the longest completion of any process has ended
            )  # (B, P + T)
        completions = sequences[:, width:].tolist()
        lengths = recorder.lengths.tolist()
        ids = [row[:n] if n else row for row, n in zip(completions, lengths, strict=True)]
        return ids, [n > 0 for n in lengths]


class _LengthRecorder(StoppingCriteria):
    """Notes after how many completion tokens each row first ended; 0 = it has not."""

    def __init__(self, prompt_width: int, stop_token_ids: list[int], string_criteria: StopStringCriteria | None):
        self._prompt_width = prompt_width
        self._stop = torch.tensor(stop_token_ids, dtype=torch.long)
        self._string_criteria = string_criteria
        self.lengths = torch.empty(0)

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        completion = input_ids[:, self._prompt_width :]  # a stop string may not reach back into the prompt
        ended = torch.isin(completion[:, -1], self._stop.to(input_ids.device))  # (B,)
        if self._string_criteria is not None:
            ended = ended | self._string_criteria(completion, scores)
        if len(self.lengths) == 0:
            self.lengths = torch.zeros_like(completion[:, -1])
        first_time = ended & (self.lengths == 0)
        self.lengths = torch.where(first_time, completion.shape[1], self.lengths)
        return ended


@contextmanager
def seeded(*key: int, device: torch.device) -> Iterator[None]:
    """Random numbers that depend on `key` alone; the global generators are as before afterwards.

    With the key (seed, iteration, process, ...) a rollout is a function of the weights and the iteration.
    """
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed_from(*key))
        yield


def seed_from(*key: int) -> int:
    """One seed from several numbers, well mixed."""
    return int(np.random.default_rng([len(key), *key]).integers(2**63))  # numpy ignores trailing zeros
