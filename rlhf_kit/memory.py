"""How much memory a run will need, from the model's config alone, and how much it did need.

The model is built of tensors with shapes and no data (torch's fake tensors). The passes of scoring and updating really
run on them, and every tensor that comes and goes is counted. What is not counted: the CUDA context (about half a GiB),
fragmentation, and what matrix products allocate inside. On a CPU, bitsandbytes and bfloat16 kernels unpack weights and
need more than is said here.
"""

import gc
import resource
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rlhf_kit.config import PPOConfig
from rlhf_kit.functional import entropy_from_logits, full_kl, token_logprobs
from rlhf_kit.modeling import AutoModelForCausalLMWithValueHead
from rlhf_kit.packaged import resolve_model
from rlhf_kit.roles import CRITIC, REFERENCE, adapter_parameters

GIB = 2**30
NF4_BLOCK = 64  # weights that share one float32 scale


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one device, by part. All processes need the same unless the base is sharded.

    Attributes:
        base: weights of the frozen base (or of the whole model, without adapters).
        reference: a frozen copy, where adapters cannot be switched off.
        trained: adapters and value head, float32.
        optimizer: gradients and Adam's two moments of what is trained, float32.
        generation, scoring, update: what each phase needs on top. Only one runs at a time.
    """

    base: int
    reference: int
    trained: int
    optimizer: int
    generation: int
    scoring: int
    update: int

    def peak(self) -> int:
        """Bytes at the most demanding moment."""
        phases = max(self.generation, self.scoring, self.update)
        return self.base + self.reference + self.trained + self.optimizer + phases

    def table(self) -> str:
        """The parts in GiB, one line each."""
        rows = {
            "base weights": self.base,
            "copy as reference": self.reference,
            "adapters, value head": self.trained,
            "gradients, Adam": self.optimizer,
            "while generating": self.generation,
            "while scoring": self.scoring,
            "while updating": self.update,
        }
        lines = [f"  {name:22} {size / GIB:8.2f} GiB" for name, size in rows.items() if size]
        return "\n".join([*lines, f"  {'peak':22} {self.peak() / GIB:8.2f} GiB (weights and the largest phase)"])


def estimate_memory(
    model: str, args: PPOConfig, peft_config: PeftConfig | None = None, *, prompt_length: int, num_processes: int = 1
) -> MemoryEstimate:
    """What a run will need on each device, without loading the model.

    Args:
        model: hub name or folder; only its config is read.
        args: sizes and precision.
        peft_config: adapters to train; None = the whole model.
        prompt_length: tokens of the longest prompt.
        num_processes: that share the batch.

    Returns:
        Bytes by part.

    Raises:
        OSError: the config cannot be found.
    """
    config = AutoConfig.from_pretrained(resolve_model(model))
    dtype = getattr(torch, args.dtype) if args.dtype != "auto" else (config.dtype or torch.float32)
    with torch.device("meta"):
        causal_lm = AutoModelForCausalLM.from_config(config, dtype=dtype)
        base = _weight_bytes(causal_lm, args)
        policy = AutoModelForCausalLMWithValueHead.from_pretrained(
            causal_lm, peft_config=peft_config, value_head=args.value_head, critic=args.critic
        )
    head = sum(p.numel() * 4 for p in policy.v_head.parameters())
    trained = sum(p.numel() * 4 for _, p in policy.trainable_parameters())
    share = -(-args.rollout_batch_size // num_processes)
    micro = min(args.micro_batch_size, -(-args.mini_batch_size // num_processes))
    mode = _make_fake(policy)
    return MemoryEstimate(
        base=base,
        reference=0 if policy.is_peft_model else base,
        trained=trained if policy.is_peft_model else head,
        optimizer=3 * trained,
        generation=_generation_bytes(policy, args, min(args.generation_batch_size or share, share), prompt_length),
        scoring=_peak_of(mode, policy, _scoring, args, min(args.micro_batch_size, share), prompt_length),
        update=_peak_of(mode, policy, _update, args, micro, prompt_length) - trained,  # gradients are counted already
    )


def peak_memory() -> int:
    """Bytes that this process has needed at most so far: of GPU memory if it has used any, else of main memory."""
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    status = Path("/proc/self/status")
    if status.exists():  # Linux: getrusage would count what the process that started this one had used
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS


def bytes_by_role(trainer: Any) -> dict[str, int]:
    """Bytes of the weights that a `PPOTrainer` holds, by who needs them.

    Returns:
        {"base": what roles share, counted once, "policy", "reference", "critic", "reward": what each adds to it}. Of a
        base that is sharded, this process's part.
    """
    model, network = trainer.model, trainer.model.pretrained_model
    own = {
        "policy": adapter_parameters(network, network.active_adapter) if model.is_peft_model else [],
        "reference": list(model.ref_model.parameters()) if model.ref_model else adapter_parameters(network, REFERENCE),
        "critic": [*model.v_head.parameters(), *adapter_parameters(network, CRITIC)],
    }
    adapters = network.peft_config if model.is_peft_model else {}
    adapted = {id(p) for name in adapters for p in adapter_parameters(network, name)}
    base = [p for p in network.parameters() if id(p) not in adapted]
    sizes = {role: sum(map(_bytes, parameters)) for role, parameters in {"base": base, **own}.items()}
    return sizes | {"reward": trainer.reward_funcs.model_bytes() if trainer.reward_funcs else 0}


def _bytes(parameter: Tensor) -> int:
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).nbytes


def live_tensor_bytes() -> int:
    """Bytes of all tensors that are alive in this process, those that share their memory counted once."""
    storages = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some objects warn when they are looked at
        for thing in gc.get_objects():
            if type(thing) in (Tensor, nn.Parameter) and thing.device.type != "meta":
                storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
    return sum(storages.values())


def _weight_bytes(causal_lm: PreTrainedModel, args: PPOConfig) -> int:
    """Of the weights as loading would hold them; bitsandbytes leaves embeddings, norms and the LM head as they are."""
    linear = {
        module.weight: module.out_features
        for module in causal_lm.modules()
        if isinstance(module, nn.Linear) and module is not causal_lm.get_output_embeddings()
    }
    total = 0
    for parameter in causal_lm.parameters():
        count = parameter.numel()
        if args.load_in_8bit and parameter in linear:
            total += count + 4 * linear[parameter]  # a float32 scale per row
        elif args.load_in_4bit and parameter in linear:
            total += count // 2 + 4 * count // NF4_BLOCK
        else:
            total += count * parameter.element_size()
    return total + sum(buffer.numel() * buffer.element_size() for buffer in causal_lm.buffers())


def _generation_bytes(
    policy: AutoModelForCausalLMWithValueHead, args: PPOConfig, batch: int, prompt_length: int
) -> int:
    """Keys and values of all layers and tokens, and the logits of one step with their probabilities."""
    config = policy.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_token = 2 * config.num_hidden_layers * heads * width * policy.causal_lm.dtype.itemsize
    length = prompt_length + args.max_completion_length
    return batch * (length * per_token + 4 * 4 * policy.vocab_size)


# A run on tensors without data


def _make_fake(policy: AutoModelForCausalLMWithValueHead) -> FakeTensorMode:
    """Turn the weights of a model on the meta device into fake ones on the CPU, which operations accept."""
    mode = FakeTensorMode()
    made: dict[int, tuple[Tensor, Tensor]] = {}  # tied weights stay tied; the original is kept for its id
    for module in policy.modules():
        for part in (module._parameters, module._buffers):
            for name, tensor in part.items():
                if tensor is None:
                    continue
                if id(tensor) not in made:
                    fake: Tensor = FakeTensor(mode, tensor.data, torch.device("cpu"))
                    if isinstance(tensor, nn.Parameter):
                        fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
                    made[id(tensor)] = (fake, tensor)
                part[name] = made[id(tensor)][0]
    return mode


def _peak_of(
    mode: FakeTensorMode, policy: AutoModelForCausalLMWithValueHead, phase: Callable[..., None], *arguments: Any
) -> int:
    with mode, AllocationTracker(list(policy.parameters())) as tracker:
        phase(policy, *arguments)
    return tracker.peak


def _scoring(policy: AutoModelForCausalLMWithValueHead, args: PPOConfig, batch: int, prompt_length: int) -> None:
    """As `rlhf_kit.rollout` scores a micro-batch."""
    ids = torch.zeros(batch, prompt_length + args.max_completion_length, dtype=torch.long)
    mask, width = torch.ones_like(ids), args.max_completion_length
    with torch.no_grad():
        logits, values = policy.score(ids, mask, completion_length=width)
        ref_logits, _ = policy.score(ids, mask, completion_length=width)
        logprobs = token_logprobs(logits, ids[:, -width:], temperature=args.temperature)
        ref_logprobs = token_logprobs(ref_logits, ids[:, -width:], temperature=args.temperature)
        scaled = logits.float() / args.temperature
        exact = full_kl(scaled, ref_logits.float() / args.temperature)
        entropy = entropy_from_logits(scaled)
    del values, logprobs, ref_logprobs, exact, entropy


def _update(policy: AutoModelForCausalLMWithValueHead, args: PPOConfig, batch: int, prompt_length: int) -> None:
    """As `rlhf_kit.objective` and `rlhf_kit.update` learn from a micro-batch."""
    ids = torch.zeros(batch, prompt_length + args.max_completion_length, dtype=torch.long)
    mask, width = torch.ones_like(ids), args.max_completion_length
    logits, values = policy.score(
        ids, mask, completion_length=width, gradient_checkpointing=args.gradient_checkpointing
    )
    logits = logits.float() / args.temperature
    loss = token_logprobs(logits, ids[:, -width:]).sum() + values.sum()
    if args.entropy_coef:
        loss = loss - args.entropy_coef * entropy_from_logits(logits).sum()
    if args.kl_placement == "loss" and args.kl_estimator == "full":
        with torch.no_grad():
            ref_logits, _ = policy.score(ids, mask, completion_length=width)
        loss = loss + full_kl(logits, ref_logits.float() / args.temperature).sum()
    loss.backward()
    policy.zero_grad()


class AllocationTracker(TorchDispatchMode):
    """Counts the bytes of tensors that operations inside the `with` block create, while they live.

    Args:
        known: tensors that are not counted.

    Attributes:
        peak: the largest number of bytes alive at once.
    """

    def __init__(self, known: Sequence[Tensor] = ()):
        super().__init__()
        self._alive: dict[int, Any] = {tensor.untyped_storage()._cdata: None for tensor in known}
        self._now = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run one operation and note the storages of its results."""
        output = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor):
                self._note(tensor.untyped_storage())
        return output

    def _note(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive:
            return

        def gone(_: Any) -> None:
            self._now -= size
            self._alive.pop(key, None)

        self._alive[key] = weakref.ref(storage, gone)
        self._now += size
        self.peak = max(self.peak, self._now)
