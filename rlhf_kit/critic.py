"""A critic of its own on the policy's base: a second trained adapter, read by the value head.

`model` is an `AutoModelForCausalLMWithValueHead` everywhere. A critic that shares the policy's adapter needs none of
this.
"""

from dataclasses import dataclass
from typing import Any

from peft import set_peft_model_state_dict
from safetensors.torch import load_file
from torch import Tensor

from rlhf_kit.loading import ADAPTER_FILE, find_file
from rlhf_kit.roles import CRITIC, add_critic_adapter, has_adapter
from rlhf_kit.saving import VALUE_HEAD_FILE
from rlhf_kit.value_head import load_value_head


def give_critic(model: Any) -> None:
    """Add the adapter that `model.critic` asks for, unless the model has it.

    Raises:
        ValueError: an unknown kind, or an adapter for a model that has none.
    """
    if model.critic not in ("shared", "adapter"):
        raise ValueError(f"critic must be 'shared' or 'adapter', got {model.critic!r}.")
    if model.critic == "shared":
        return
    if not model.is_peft_model:
        raise ValueError(
            "critic='adapter' needs a policy with adapters, but the whole model is trained: pass "
            "peft_config=LoraConfig(...), or use critic='shared'."
        )
    if not has_adapter(model.pretrained_model, CRITIC):
        add_critic_adapter(model.pretrained_model)


@dataclass(frozen=True)
class SavedCritic:
    """The critic of a model folder, as `save_pretrained` wrote it; without weights, a fresh one.

    Attributes:
        value_head: "linear" or "mlp".
        critic: "shared" or "adapter".
        head: weights of the value head.
        adapter: weights of the critic's adapter.
    """

    value_head: str
    critic: str
    head: dict[str, Tensor] | None = None
    adapter: dict[str, Tensor] | None = None

    @classmethod
    def find(cls, name: str | None, *, value_head: str | None, critic: str | None, **kwargs: Any) -> "SavedCritic":
        """The critic saved under a hub name or in a folder; a fresh one if there is none.

        Args:
            name: hub name or folder; None = a fresh one.
            value_head, critic: what was asked for; None takes either, and makes a fresh one linear and shared.
            kwargs: where to look on the hub.

        Raises:
            ValueError: it is of another kind than asked for.
        """
        head_file = None if name is None else find_file(name, VALUE_HEAD_FILE, **kwargs)
        if name is None or head_file is None:
            return cls(value_head or "linear", critic or "shared")
        adapter_file = find_file(name, f"{CRITIC}/{ADAPTER_FILE}", **kwargs)
        found = "shared" if adapter_file is None else "adapter"
        if critic not in (None, found):
            raise ValueError(f"{name} holds a critic of kind {found!r}, but critic={critic!r} was asked for.")
        head = load_value_head(head_file, value_head)
        return cls(head.kind, found, head.state_dict(), None if adapter_file is None else load_file(adapter_file))

    def load_into(self, model: Any) -> None:
        """Set the weights of a model that was made with these kinds."""
        if self.head is not None:
            model.v_head.load_state_dict(self.head)
        if self.adapter is not None:
            set_peft_model_state_dict(model.pretrained_model, self.adapter, adapter_name=CRITIC)
