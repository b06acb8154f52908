"""AutoModelForCausalLMWithValueHead: policy, reference and critic on one base model.

    policy     base + adapters                                    trained
    reference  the same base, adapters switched off               no weights of its own
    critic     a value head on the policy's last hidden state     trained
               or, with critic="adapter", on an adapter of its own

Where training starts from a trained adapter, the reference is a frozen copy of that adapter (see
`rlhf_kit.reference`). Without adapters (full fine-tuning) nothing can be switched off: the reference is then a frozen
copy of the model. `create_reference` makes either once.

Where things sit in a batch (P = longest prompt, T = longest completion, . = padding):

    input_ids        . . p p p | a b c eos .        left-padded prompt, right-padded completion: (B, P + T)
    attention_mask   0 0 1 1 1 | 1 1 1  1  0
    position_ids     0 0 0 1 2 | 3 4 5  6  6
    logits, values           ^   ^ ^ ^              read at columns P - 1 ... P + T - 2: (B, T)
    score, rewards             a b c eos .          belong to the token that was chosen there: (B, T)
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, PeftModel
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedModel

from rlhf_kit.adapters import add_adapters, check_peft_config, refuse_leftover_adapters
from rlhf_kit.critic import SavedCritic, give_critic
from rlhf_kit.loading import (
    load_causal_lm,
    refuse_loading_settings,
)
from rlhf_kit.packaged import resolve_model
from rlhf_kit.probes import refuse_other_generation, refuse_wrong_padding, warn_of_distant_reference
from rlhf_kit.quantized import adjust_quantized_layers
from rlhf_kit.reference import make_reference, reference_adapter
from rlhf_kit.roles import CRITIC, refuse_role_names, using_adapter
from rlhf_kit.saving import merged_model, refuse_model_folder, save_folder, upload_folder
from rlhf_kit.scoring import (
    checkpointed_layers,
    completion_outputs,
    hidden_states,
    lm_head_input,
    position_ids,
    without_dropout,
)
from rlhf_kit.value_head import ValueHead


class AutoModelForCausalLMWithValueHead(nn.Module):
    """A causal LM, its LoRA adapters and a value head.

    Attributes:
        pretrained_model: the `PreTrainedModel` or, with adapters, the `PeftModel` around it.
        v_head: `ValueHead`.
        is_peft_model: whether adapters exist, and so whether policy and reference share one base.
        critic: "shared" or "adapter".
        ref_model: the frozen reference where it needs weights of its own, else None.

    Args:
        pretrained_model: a causal LM, with or without adapters. It is used as it is, not copied.
        value_head: "linear" or "mlp".
        critic: "shared" = the value head reads what the policy's LM head reads; "adapter" = it reads the base through
            a second adapter, so that policy and values share no trained weight.

    Raises:
        ValueError: adapters that cannot be switched off exactly (prompt learning, trained biases), or a critic of its
            own without adapters.
    """

    def __init__(
        self, pretrained_model: PreTrainedModel | PeftModel, *, value_head: str = "linear", critic: str = "shared"
    ):
        super().__init__()
        if not isinstance(pretrained_model, PreTrainedModel | PeftModel):
            raise TypeError(
                f"expected a transformers model or a PeftModel around one, got {type(pretrained_model).__name__}."
            )
        self.is_peft_model = isinstance(pretrained_model, PeftModel)
        if not self.is_peft_model:
            refuse_leftover_adapters(pretrained_model)
        if self.is_peft_model:
            for name, config in pretrained_model.peft_config.items():
                check_peft_config(config, name)
            refuse_role_names(pretrained_model.active_adapter)
        self.pretrained_model = pretrained_model
        if self.config.is_encoder_decoder:
            raise ValueError(f"{type(self.causal_lm).__name__} is an encoder-decoder; only causal LMs are supported.")
        lm_head = self.causal_lm.get_output_embeddings()
        if lm_head is None:
            raise ValueError(f"{type(self.causal_lm).__name__} has no LM head: load it with AutoModelForCausalLM.")
        adjust_quantized_layers(self.causal_lm)
        hidden_size = getattr(lm_head, "in_features", lm_head.weight.shape[-1])
        self.v_head = ValueHead(hidden_size, value_head).to(lm_head.weight.device)
        self.critic = critic
        give_critic(self)
        self.ref_model: PreTrainedModel | None = None
        self.is_sharded = False  # set by rlhf_kit.processes.shard_base

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model: str | PreTrainedModel | PeftModel,
        *,
        peft_config: PeftConfig | None = None,
        value_head: str | None = None,
        critic: str | None = None,
        load_in_8bit: bool = False,
        load_in_4bit: bool = False,
        is_trainable: bool = True,
        **kwargs: Any,
    ) -> "AutoModelForCausalLMWithValueHead":
        """Load a model by name or folder, or wrap one that is loaded; add adapters and a value head.

        Args:
            pretrained_model: a hub name, a folder of a model or of an adapter (as `save_pretrained` writes it),
                `packaged:smollm2`, or a loaded model. A loaded model is used in place.
            peft_config: adapters to add to a model that has none. None = as loaded.
            value_head: "linear" or "mlp". None = as saved in the folder, else "linear".
            critic: "shared" or "adapter". None = as saved in the folder, else "shared".
            load_in_8bit: load the base in int8 (bitsandbytes).
            load_in_4bit: load the base in NF4 (bitsandbytes).
            is_trainable: whether a saved adapter is loaded to be trained on.
            kwargs: passed to `AutoModelForCausalLM.from_pretrained`, e.g. dtype, device_map, revision.

        Returns:
            The wrapped model, in eval mode.

        Raises:
            ValueError: settings for loading with a model that is loaded; peft_config with a model that has adapters;
                both precisions at once; a saved critic of another kind than asked for.
            OSError: the model cannot be found.
        """
        name = resolve_model(str(pretrained_model)) if isinstance(pretrained_model, str | Path) else None
        if name is not None:
            model = load_causal_lm(name, load_in_8bit, load_in_4bit, is_trainable, kwargs)
        else:
            model = pretrained_model
            refuse_loading_settings(model, {"load_in_8bit": load_in_8bit, "load_in_4bit": load_in_4bit}, kwargs)
            if isinstance(model, PeftModel) and not is_trainable:
                model.requires_grad_(False)
        if peft_config is not None:
            if isinstance(model, PeftModel):
                raise ValueError(
                    f"peft_config was given, but the model already has adapters {list(model.peft_config)}: drop "
                    "peft_config to go on training them, or call merge_and_unload() on the model first."
                )
            refuse_leftover_adapters(model)
            model = add_adapters(model, peft_config)
        saved = SavedCritic.find(name, value_head=value_head, critic=critic, **kwargs)
        wrapped = cls(model, value_head=saved.value_head, critic=saved.critic)
        saved.load_into(wrapped)
        return wrapped.eval()

    # The parts

    @property
    def causal_lm(self) -> PreTrainedModel:
        """The transformers model itself, without the PEFT wrapper (its layers still hold the adapters)."""
        return self.pretrained_model.get_base_model() if self.is_peft_model else self.pretrained_model

    @property
    def config(self) -> Any:
        """The transformers config."""
        return self.causal_lm.config

    @property
    def vocab_size(self) -> int:
        """Number of token ids the model knows."""
        return int(self.config.get_text_config().vocab_size)

    @property
    def generation_config(self) -> GenerationConfig:
        """The model's own generation config. Rollouts never use or change it."""
        return self.causal_lm.generation_config

    @property
    def device(self) -> torch.device:
        """Device of the base model."""
        return self.causal_lm.device

    def trainable_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Named parameters that get a gradient: adapters (or the whole model) and the value head."""
        return [(name, p) for name, p in self.named_parameters() if p.requires_grad]

    # The reference

    def create_reference(self, ref_model: PreTrainedModel | None = None) -> None:
        """Fix what `reference` gives. Call it once, before anything is trained.

        Args:
            ref_model: a model to use as reference; it is frozen and moved to the policy's device. None = an adapter
                named "reference" that the model has; else the adapters switched off, if they change nothing yet; else
                a frozen copy of the trained adapter on the same base; without adapters, of the model.

        Raises:
            ValueError: a ref_model that shares weights with the policy, or a model that left padding changes.

        Warns:
            If policy and reference differ already, with the KL between them.
        """
        refuse_wrong_padding(self)
        refuse_other_generation(self)
        # Kept out of the module tree: it is neither saved nor counted as a part of the policy.
        object.__setattr__(self, "ref_model", None)
        object.__setattr__(self, "ref_model", make_reference(self, ref_model))
        warn_of_distant_reference(self)

    @contextmanager
    def reference(self) -> Iterator[PreTrainedModel | PeftModel]:
        """The reference model, inside a `with` block; the policy is as before afterwards, come what may.

        Yields:
            The model to call. No gradient should be taken through it.

        Raises:
            RuntimeError: a model without adapters whose reference was never created.
        """
        if self.ref_model is not None:
            yield self.ref_model
        elif self.is_peft_model:
            with reference_adapter(self.pretrained_model):
                yield self.pretrained_model
        else:
            raise RuntimeError(
                "a model without adapters has no reference until create_reference() copies it: call that before "
                "training."
            )

    # Forward passes

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Logits, loss and values at every position, as TRL's class of this name returned them.

        Args:
            input_ids: (B, S) int64.
            attention_mask: (B, S) 1 = real token; None = all real.
            labels: (B, S) int64 for the language-modelling loss, -100 = ignored; None = no loss.
            kwargs: passed to the model.

        Returns:
            (lm_logits (B, S, V) float32, loss () or None, value (B, S) float32).
        """
        continues = any(kwargs.get(name) is not None for name in ("cache", "past_key_values"))
        if continues and self.critic == "adapter":
            raise ValueError("the cache belongs to the policy: pass whole sequences to a model with a critic adapter.")
        if attention_mask is None and not continues:
            attention_mask = torch.ones_like(input_ids)
        if "position_ids" not in kwargs and attention_mask is not None:
            positions = position_ids(self.causal_lm, attention_mask)  # of all tokens, those in the cache included
            kwargs |= {name: ids[:, -input_ids.shape[1] :] for name, ids in positions.items()}
        with lm_head_input(self.causal_lm) as captured:
            output = self.pretrained_model(input_ids=input_ids, attention_mask=attention_mask, labels=labels, **kwargs)
        hidden = captured[0]
        if self.critic == "adapter":
            hidden = self._critic_hidden_states(input_ids, attention_mask)
        return output.logits.float(), output.loss, self.v_head(hidden)

    def score(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        *,
        completion_length: int,
        gradient_checkpointing: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Policy logits and values of completion tokens only, without dropout even in train mode.

        Args:
            input_ids: (B, P + T) left-padded prompts followed by right-padded completions.
            attention_mask: (B, P + T) 1 = real token.
            completion_length: T.
            gradient_checkpointing: recompute each layer in the backward pass instead of keeping its activations.

        Returns:
            (logits (B, T, V), values (B, T) float32): entry t belongs to the choice of completion token t, so both
            come from the position before it.
        """
        with without_dropout(self):
            with checkpointed_layers(self.causal_lm, gradient_checkpointing):
                logits, hidden = completion_outputs(
                    self.pretrained_model, self.causal_lm, input_ids, attention_mask, completion_length
                )
            if self.critic == "adapter":
                hidden = self._critic_hidden_states(input_ids, attention_mask, gradient_checkpointing)
                hidden = hidden[:, -completion_length - 1 : -1]
            return logits, self.v_head(hidden)

    def _critic_hidden_states(
        self, input_ids: Tensor, attention_mask: Tensor, gradient_checkpointing: bool = False
    ) -> Tensor:
        """What the critic's own adapter makes of every position, (B, S, d)."""
        checkpointed = checkpointed_layers(self.causal_lm, gradient_checkpointing, adapter=CRITIC)
        with using_adapter(self.pretrained_model, CRITIC), checkpointed:
            return hidden_states(self.pretrained_model, self.causal_lm, input_ids, attention_mask)

    @torch.no_grad()
    def score_reference(self, input_ids: Tensor, attention_mask: Tensor, *, completion_length: int) -> Tensor:
        """Reference logits of completion tokens, (B, T, V); arguments as in `score`. Never carries a gradient."""
        with self.reference() as model, without_dropout(model):
            causal_lm = model.get_base_model() if isinstance(model, PeftModel) else model
            return completion_outputs(model, causal_lm, input_ids, attention_mask, completion_length)[0]

    @contextmanager
    def sampling_mode(self) -> Iterator[None]:
        """Dropout off and gradients not recorded, inside a `with` block."""
        with torch.no_grad(), without_dropout(self):
            yield

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """`generate` of the policy, as transformers defines it."""
        return self.pretrained_model.generate(*args, **kwargs)

    # Disk and hub

    def save_pretrained(self, save_directory: str | Path, **kwargs: Any) -> None:
        """Write a standard PEFT adapter folder (or a plain model folder), with the value head beside it.

        Args:
            save_directory: folder, made if missing.
            kwargs: passed to the model's own `save_pretrained`.
        """
        save_folder(self, Path(save_directory), **kwargs)

    def merge_and_save(self, save_directory: str | Path, **kwargs: Any) -> None:
        """Write an ordinary `AutoModelForCausalLM` folder with the adapters merged into the base.

        The model itself stays as it is: a copy of the base is made in memory meanwhile.

        Args:
            save_directory: folder, made if missing.
            kwargs: passed to the model's own `save_pretrained`.

        Raises:
            ValueError: merging would change the log-probs, the base is sharded, or the folder holds a model or an
                adapter already.
        """
        refuse_model_folder(Path(save_directory))
        merged_model(self).save_pretrained(save_directory, **kwargs)

    def push_to_hub(
        self, repo_id: str, *, private: bool | None = None, token: str | None = None, **kwargs: Any
    ) -> Any:
        """Upload what `save_pretrained` writes.

        Args:
            repo_id: "user/name"; made if missing.
            private: visibility of a new repository; None = the account's default.
            token: access token; None = the one you logged in with.
            kwargs: passed to `HfApi.upload_folder`, e.g. commit_message, revision, create_pr.

        Returns:
            huggingface_hub's `CommitInfo`.
        """
        return upload_folder(self, repo_id, private=private, token=token, **kwargs)
