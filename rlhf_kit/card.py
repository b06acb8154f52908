"""The README.md of a saved model: what it was trained from, how, and how to load it."""

import json
from dataclasses import asdict
from pathlib import Path

from huggingface_hub import ModelCardData

from rlhf_kit.config import PPOConfig
from rlhf_kit.modeling import AutoModelForCausalLMWithValueHead
from rlhf_kit.state import PPOState

NUMBERS = {
    "score": "Score",
    "ref_kl": "KL to the reference, nats per token",
    "eval_score": "Score, held-out prompts",
    "eval_ref_kl": "KL to the reference, held-out prompts",
}

LOAD = """from {library} import {loader}
from transformers import AutoTokenizer

model = {loader}.from_pretrained("{name}")"""

LOAD_ON_OWN_BASE = """from peft import PeftModel
from transformers import AutoTokenizer

base = ...  # the {kind} it was trained on, which had no name
model = PeftModel.from_pretrained(base, "{name}")"""

TEXT = """---
{data}
---

# {name}

{what} of `{base}`, trained by PPO with rlhf_kit in {iterations} iterations on {episodes} completions.

```python
{load}
tokenizer = AutoTokenizer.from_pretrained("{name}")
```

| mean | first | last |
|---|---|---|
{rows}

Settings other than the defaults:

```json
{settings}
```
"""


def write_model_card(
    folder: Path, model: AutoModelForCausalLMWithValueHead, args: PPOConfig, state: PPOState, *, merged: bool = False
) -> None:
    """Write README.md, in place of the one that PEFT fills with placeholders.

    Args:
        folder: where the model was saved.
        model: names the base.
        args: its settings other than the defaults are listed.
        state: first and last numbers come from its log.
        merged: an ordinary model folder rather than an adapter.
    """
    adapter = model.is_peft_model and not merged
    kind = type(model.causal_lm).__name__
    base = model.config.name_or_path or kind
    name = folder.name if not folder.name.startswith(".") else Path(args.output_dir).name
    if adapter and not model.config.name_or_path:
        load = LOAD_ON_OWN_BASE.format(name=name, kind=kind)
    else:
        library, loader = ("peft", "AutoPeftModelForCausalLM") if adapter else ("transformers", "AutoModelForCausalLM")
        load = LOAD.format(name=name, library=library, loader=loader)
    data = ModelCardData(
        base_model=None if Path(base).exists() or "/" not in base else base,  # the hub takes names only
        library_name="peft" if adapter else "transformers",
        pipeline_tag="text-generation",
        tags=["rlhf_kit", "ppo", "rlhf"],
    )
    text = TEXT.format(
        data=data.to_yaml(),
        name=name,
        load=load,
        what="A LoRA adapter" if adapter else "A fine-tuned version",
        base=base,
        iterations=state.iteration,
        episodes=state.episodes,
        rows="\n".join(_row(key, label, state) for key, label in NUMBERS.items() if _values(key, state)),
        settings=json.dumps(_own_settings(args), indent=2),
    )
    (folder / "README.md").write_text(text, encoding="utf-8")


def _values(key: str, state: PPOState) -> list[float]:
    return [line[key] for line in state.log_history if key in line]


def _row(key: str, label: str, state: PPOState) -> str:
    values = _values(key, state)
    return f"| {label} | {values[0]:.4g} | {values[-1]:.4g} |"


def _own_settings(args: PPOConfig) -> dict[str, object]:
    defaults = asdict(PPOConfig())
    return {name: value for name, value in asdict(args).items() if value != defaults[name] and name != "output_dir"}
