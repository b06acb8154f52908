"""PPO for language models on one frozen base.

The names below are loaded on first use (PEP 562), so that `import rlhf_kit.functional` needs torch and nothing else.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlhf_kit.config import PPOConfig
    from rlhf_kit.kl_dial import dial_table, dialed, plot_dial, sweep_dial, with_reference
    from rlhf_kit.memory import bytes_by_role, estimate_memory, live_tensor_bytes, peak_memory
    from rlhf_kit.modeling import AutoModelForCausalLMWithValueHead
    from rlhf_kit.packaged import resolve_model
    from rlhf_kit.report import run_summary
    from rlhf_kit.trainer import PPOTrainer

__version__ = "0.1.0"

_HOME = {
    "AutoModelForCausalLMWithValueHead": "rlhf_kit.modeling",
    "PPOConfig": "rlhf_kit.config",
    "PPOTrainer": "rlhf_kit.trainer",
    "bytes_by_role": "rlhf_kit.memory",
    "dial_table": "rlhf_kit.kl_dial",
    "dialed": "rlhf_kit.kl_dial",
    "estimate_memory": "rlhf_kit.memory",
    "live_tensor_bytes": "rlhf_kit.memory",
    "peak_memory": "rlhf_kit.memory",
    "plot_dial": "rlhf_kit.kl_dial",
    "resolve_model": "rlhf_kit.packaged",
    "run_summary": "rlhf_kit.report",
    "sweep_dial": "rlhf_kit.kl_dial",
    "with_reference": "rlhf_kit.kl_dial",
}

__all__ = [
    "AutoModelForCausalLMWithValueHead",
    "PPOConfig",
    "PPOTrainer",
    "bytes_by_role",
    "dial_table",
    "dialed",
    "estimate_memory",
    "live_tensor_bytes",
    "peak_memory",
    "plot_dial",
    "resolve_model",
    "run_summary",
    "sweep_dial",
    "with_reference",
]


def __getattr__(name: str) -> object:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'rlhf_kit' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *_HOME]
