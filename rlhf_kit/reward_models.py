"""Reward models: sequence classifiers with one label, as TRL's `RewardTrainer` makes them.

    RewardAdapter   LoRA weights and a score head on the policy's own base: a reward model without a second network
    RewardModel     a model of its own, with a tokenizer of its own

A LoRA reward model whose base is the policy's becomes the first, every other one the second. Both read what a
completion deserves at its last token, as transformers' sequence classifiers do.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import AutoPeftModelForSequenceClassification, PeftConfig, PeftModel
from peft.utils import load_peft_weights
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.peft_utils import find_adapter_config_file
from trl import apply_chat_template

from rlhf_kit.data import pad_left
from rlhf_kit.fingerprint import weights_digest
from rlhf_kit.loading import max_positions
from rlhf_kit.packaged import resolve_model
from rlhf_kit.processes import passes
from rlhf_kit.roles import REWARD, adapter_parameters, add_frozen_adapter, has_adapter, using_adapter
from rlhf_kit.scoring import hidden_states, without_dropout

SCORE_HEAD = "score.weight"


class RewardAdapter:
    """A reward model on the policy's base: an adapter of its own and a score head.

    It reads the token ids as they were sampled, so nothing is tokenised again.

    Args:
        model: an `AutoModelForCausalLMWithValueHead` with adapters; gets one more, frozen.
        folder: of the saved adapter (hub name or local), whose base is the model's.
        batch_size: completions per forward pass.
        autocast: makes the context that forward passes run in.

    Attributes:
        adapter: name of the adapter on the model.
        head: (1, d) float32.

    Raises:
        ValueError: the adapter has no score head for one label, or does not fit the model.
    """

    def __init__(self, model: Any, folder: str, *, batch_size: int, autocast: Callable[[], Any]):
        self._model, self._batch_size, self._autocast = model, batch_size, autocast
        self.__name__ = Path(folder).name
        self.adapter = _free_name(model.pretrained_model)
        config = PeftConfig.from_pretrained(folder)
        weights = load_peft_weights(folder, device="cpu")
        heads = [name for name in weights if name.endswith(SCORE_HEAD)]
        if len(heads) != 1 or weights[heads[0]].shape[0] != 1:
            found = [tuple(weights[name].shape) for name in heads]
            raise ValueError(
                f"the adapter {folder!r} must hold one score head for one label, found {found or 'none'}: train it as "
                "a sequence classifier with num_labels=1 and LoraConfig(task_type='SEQ_CLS')."
            )
        self.head = weights.pop(heads[0]).float().to(model.device)
        own = model.pretrained_model.active_peft_config
        config.modules_to_save, config.task_type = None, own.task_type
        try:
            add_frozen_adapter(model.pretrained_model, self.adapter, config, weights)
        except ValueError as error:
            raise ValueError(f"the reward adapter {folder!r} cannot be put on this policy: {error}") from error
        self._pad_token_id = AutoTokenizer.from_pretrained(folder, trust_remote_code=False).pad_token_id

    @torch.no_grad()
    def __call__(self, prompt_ids: list[list[int]], completion_ids: list[list[int]]) -> list[float]:
        """Scores of B completions, given their ids and those of their prompts."""
        sequences = [prompt + completion for prompt, completion in zip(prompt_ids, completion_ids, strict=True)]
        scores = torch.zeros(len(sequences))
        network = self._model.pretrained_model
        with using_adapter(network, self.adapter), without_dropout(network):
            for rows, idle in passes(self._model, len(sequences), self._batch_size):
                values = self._score([self._read(ids) for ids in sequences[rows]])
                if not idle:
                    scores[rows] = values.cpu()
        return scores.tolist()

    def _read(self, ids: list[int]) -> list[int]:
        """The tokens up to the one that is read: sequence classifiers take the last that is not their pad token."""
        last = max((i for i, token in enumerate(ids) if token != self._pad_token_id), default=0)
        return ids[: last + 1]

    def _score(self, sequences: list[list[int]]) -> Tensor:
        input_ids, mask = pad_left(sequences, 0)
        input_ids, mask = input_ids.to(self._model.device), mask.to(self._model.device)
        with self._autocast():
            hidden = hidden_states(self._model.pretrained_model, self._model.causal_lm, input_ids, mask.long())
        return (hidden[:, -1].float() @ self.head.T).squeeze(-1)  # (b,)

    def nbytes(self) -> int:
        """Bytes of the adapter and the score head."""
        adapter = adapter_parameters(self._model.pretrained_model, self.adapter)
        return self.head.nbytes + sum(p.nbytes for p in adapter)

    def fingerprint(self) -> str:
        """Digest of the score head; the adapter is part of the policy's model, and counted there."""
        return weights_digest([("score", self.head)])


class RewardModel:
    """A sequence classifier of its own, which reads prompt and completion as text.

    Args:
        model: with one label; moved to the device and frozen.
        tokenizer: of that model.
        stop_token_ids: of the policy: a text whose completion ended by itself gets the tokenizer's end token, as
            `RewardTrainer` trains on it. Chats end as the chat template says.
        batch_size: completions per forward pass.
        device: to compute on.

    Raises:
        ValueError: a model with more or fewer labels than one.
    """

    def __init__(
        self,
        model: PreTrainedModel | PeftModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        stop_token_ids: list[int],
        batch_size: int,
        device: torch.device,
    ):
        name = Path(model.config.name_or_path or type(model).__name__).name
        if getattr(model.config, "num_labels", None) != 1:
            raise ValueError(
                f"reward model {name!r} has {getattr(model.config, 'num_labels', 'no')} labels; a reward model has "
                "one. To use one class of a classifier, wrap it in a function that returns that class's logit."
            )
        self.__name__ = name
        self._model, self._tokenizer = model.eval().requires_grad_(False), tokenizer
        if not getattr(model, "is_quantized", False):
            model.to(device)
        self._stop_token_ids, self._batch_size = set(stop_token_ids), batch_size
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        text_config = model.config.get_text_config()
        if text_config.pad_token_id is None:
            text_config.pad_token_id = tokenizer.pad_token_id

    @torch.no_grad()
    def __call__(self, prompts: list[Any], completions: list[Any], completion_ids: list[list[int]]) -> list[float]:
        """Scores of B completions."""
        ended = [ids[-1] in self._stop_token_ids for ids in completion_ids]
        texts = [self._text(*sample) for sample in zip(prompts, completions, ended, strict=True)]
        scores: list[float] = []
        for start in range(0, len(texts), self._batch_size):
            inputs = self._tokenizer(
                texts[start : start + self._batch_size],
                add_special_tokens=isinstance(prompts[0], str),  # a chat template has put them in already
                padding=True,
                padding_side="right",
                return_tensors="pt",
            )
            self._refuse_overlong(inputs["attention_mask"].sum(-1), start)
            scores += self._model(**inputs.to(self._model.device)).logits[:, 0].float().tolist()
        return scores

    def _text(self, prompt: Any, completion: Any, ended: bool) -> str:
        if not isinstance(prompt, str):
            return str(apply_chat_template({"messages": prompt + completion}, self._tokenizer)["text"])
        end = self._tokenizer.eos_token if ended else None
        return str(prompt + completion + (end or ""))

    def _refuse_overlong(self, lengths: Tensor, start: int) -> None:
        limit = max_positions(self._model)
        longest = int(lengths.max())
        if limit is not None and longest > limit:
            raise ValueError(
                f"completion {start + int(lengths.argmax())} with its prompt has {longest} tokens, but reward model "
                f"{self.__name__!r} takes at most {limit}: lower max_completion_length or max_prompt_length."
            )

    def nbytes(self) -> int:
        """Bytes of all weights."""
        return sum(p.nbytes for p in self._model.parameters())

    def fingerprint(self) -> str:
        """Digest of the weights."""
        return weights_digest(self._model.named_parameters())


def load_reward_model(
    source: str | Path | PreTrainedModel | PeftModel,
    model: Any,
    *,
    stop_token_ids: list[int],
    batch_size: int,
    device: torch.device,
    autocast: Callable[[], Any],
) -> RewardAdapter | RewardModel:
    """A reward model by name, folder or object.

    Args:
        source: of a sequence classifier with one label, or of a LoRA adapter of one.
        model: the policy's `AutoModelForCausalLMWithValueHead`.
        stop_token_ids, batch_size, device, autocast: see the two classes.

    Raises:
        OSError: it cannot be found.
        ValueError: it is not a reward model.
    """
    if isinstance(source, str | Path):
        source = str(source)
        if _shares_base(source, model):
            return RewardAdapter(model, source, batch_size=batch_size, autocast=autocast)
        network, tokenizer = _load(source)
    else:
        network = source
        tokenizer = AutoTokenizer.from_pretrained(network.config.name_or_path, trust_remote_code=False)
    return RewardModel(network, tokenizer, stop_token_ids=stop_token_ids, batch_size=batch_size, device=device)


def _shares_base(source: str, model: Any) -> bool:
    """Whether it is an adapter whose base the policy stands on."""
    if not model.is_peft_model or find_adapter_config_file(source) is None:
        return False
    base = PeftConfig.from_pretrained(source).base_model_name_or_path
    return base is not None and _place(base) == _place(model.config.name_or_path)


def _place(name: str) -> str:
    name = resolve_model(name)
    return str(Path(name).resolve()) if Path(name).exists() else name


def _load(source: str) -> tuple[PreTrainedModel | PeftModel, PreTrainedTokenizerBase]:
    tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    if find_adapter_config_file(source) is not None:
        return AutoPeftModelForSequenceClassification.from_pretrained(source, num_labels=1), tokenizer
    network, info = AutoModelForSequenceClassification.from_pretrained(
        source, trust_remote_code=False, output_loading_info=True
    )
    if info["missing_keys"]:
        raise ValueError(
            f"{source!r} is no trained reward model: it lacks the weights {sorted(info['missing_keys'])[:3]} of a "
            f"{type(network).__name__}."
        )
    return network, tokenizer


def _free_name(model: nn.Module) -> str:
    number = 0
    while has_adapter(model, name := f"{REWARD}_{number}" if number else REWARD):
        number += 1
    return name
