"""PPOTrainer: collect a rollout, learn from it, repeat."""

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import set_seed
from datasets import Dataset
from peft import PeftConfig, PeftModel
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback, TrainerControl
from trl import is_conversational

from rlhf_kit.callbacks import CallbackList, JsonlLog, Progress, Trackers
from rlhf_kit.config import PPOConfig
from rlhf_kit.data import PromptBatch, PromptDataset, prompt_order
from rlhf_kit.kl_control import adapted_kl_coef
from rlhf_kit.loading import max_positions
from rlhf_kit.metrics import OTHER_PROMPTS, completion_rows, rollout_metrics, target_metrics
from rlhf_kit.modeling import AutoModelForCausalLMWithValueHead
from rlhf_kit.preparation import (
    build_model,
    check_context,
    check_stop_ids,
    checked_step,
    id_lists,
    load_tokenizer,
    make_accelerator,
    refuse_used_folder,
    warn_about_settings,
)
from rlhf_kit.rewards import RewardFunc, RewardFunctions
from rlhf_kit.rollout import Rollout, compute_targets, concat_rollouts, record_rollout, shaped_scores
from rlhf_kit.sampling import Sampler, seeded
from rlhf_kit.state import PPOState
from rlhf_kit.update import Updater

MAX_NONFINITE_ITERATIONS = 3
TRAIN, EVAL = 0, 1  # streams of random numbers


class PPOTrainer:
    """Proximal policy optimisation of a causal language model against Python reward functions.

    Args:
        model: a name, folder or loaded model; see `AutoModelForCausalLMWithValueHead.from_pretrained`.
        reward_funcs: one function or several; see `rlhf_kit.rewards`. None = only `step` will be used.
        args: settings; None = the defaults.
        train_dataset: rows with a "prompt" column, text or messages; see `rlhf_kit.data`. None = only `step`.
        eval_dataset: the same for `evaluate`, which `train` calls before, between (`eval_every`) and after.
        processing_class: the tokenizer; None = loaded from where the model came from.
        peft_config: LoRA adapters to train. None = train the whole model, with a frozen copy as reference, or the
            adapters the model already has.
        ref_model: another reference than the starting point; it is frozen. None = one that the model has been given by
            `create_reference`, else the starting point.
        callbacks: `transformers.TrainerCallback` objects; one iteration is one step.

    Raises:
        TypeError, ValueError: a setting, dataset, model or reward function that cannot work; nothing was changed.
        OSError: the model cannot be loaded.
    """

    def __init__(
        self,
        model: str | PreTrainedModel | PeftModel | AutoModelForCausalLMWithValueHead,
        reward_funcs: RewardFunc | list[RewardFunc] | None = None,
        args: PPOConfig | None = None,
        train_dataset: Dataset | list[dict[str, Any]] | None = None,
        eval_dataset: Dataset | list[dict[str, Any]] | None = None,
        processing_class: PreTrainedTokenizerBase | None = None,
        peft_config: PeftConfig | None = None,
        ref_model: PreTrainedModel | None = None,
        callbacks: list[TrainerCallback] | None = None,
    ):
        self.args = args = args if args is not None else PPOConfig()
        warn_about_settings(args)
        refuse_used_folder(Path(args.output_dir))
        self.accelerator = make_accelerator(args)
        set_seed(args.seed)
        self.model = build_model(model, args, peft_config, self.accelerator)
        if ref_model is not None or self.model.ref_model is None:
            self.model.create_reference(ref_model)
        self.processing_class = processing_class or load_tokenizer(model, self.model)
        self.sampler = Sampler(self.processing_class, args, self.model.generation_config)
        check_stop_ids(self.sampler.stop_token_ids, self._vocab_size())
        self.train_prompts = self._prompts(train_dataset)
        self.eval_prompts = self._prompts(eval_dataset)
        if args.eval_every is not None and eval_dataset is None:
            raise ValueError(f"eval_every={args.eval_every} needs an eval_dataset.")
        self.reward_funcs = self._rewards(reward_funcs)
        self.updater = Updater(self.model, args, self.accelerator)
        self.state = PPOState(
            num_iterations=args.num_iterations,
            max_steps=args.num_iterations * args.optimizer_steps_per_iteration(),
            kl_coef=args.kl_coef,
            is_local_process_zero=self.accelerator.is_local_main_process,
            is_world_process_zero=self.accelerator.is_main_process,
        )
        self.control = TrainerControl()
        self._progress = Progress()
        self._callbacks = CallbackList(
            self._own_callbacks() + _as_list(callbacks),
            model=self.model,
            processing_class=self.processing_class,
            optimizer=self.updater.optimizer,
            lr_scheduler=self.updater.lr_scheduler,
        )
        self._seconds: dict[str, float] = defaultdict(float)
        self._unlogged: tuple[dict[str, float], list[dict[str, Any]]] | None = None
        set_seed(args.seed, device_specific=True)  # generate() draws other samples in each process
        self._emit("on_init_end")

    # The algorithm

    def train(self) -> dict[str, float]:
        """Run the iterations that are left of `args.num_iterations`, then save the model to `args.output_dir`.

        Returns:
            The metrics of the last iteration.

        Raises:
            ValueError: no train_dataset or no reward_funcs.
            RuntimeError: losses or gradients were not finite in three iterations in a row.
        """
        prompts = self._required(self.train_prompts, "train_dataset")
        self._required(self.reward_funcs, "reward_funcs")
        metrics: dict[str, float] = {}
        self.control.should_training_stop = False
        self._emit("on_train_begin")
        if self.eval_prompts is not None and self.state.iteration == 0:
            self.evaluate()
        while self.state.iteration < self.args.num_iterations and not self.control.should_training_stop:
            batch = self._local_batch(prompts, self.state.iteration)
            rollout = self._collect(batch, TRAIN, self.state.iteration)
            metrics = self._learn(rollout)
            if self._evaluation_is_due():
                self.evaluate()
        if self._unlogged is not None:  # a callback ended the run after the decision not to log
            self._log(*self._unlogged)
        self.save_model()
        self._emit("on_train_end")
        return metrics

    def _collect(self, batch: PromptBatch, stream: int, number: int) -> Rollout:
        """Sample completions, have them scored, and record what policy, critic and reference say of them."""
        rewards = self._required(self.reward_funcs, "reward_funcs")
        if stream == TRAIN:
            self._emit("on_step_begin")
        key = (self.args.seed, stream, number, self.accelerator.process_index)
        with self._phase("generate"), seeded(*key, device=self.model.device), self.accelerator.autocast():
            completion_ids, ended = self.sampler(self.model, batch.prompt_ids)
        completions: list[Any] = self._decode(completion_ids)
        if is_conversational({"prompt": batch.prompts[0]}):
            completions = [[{"role": "assistant", "content": text}] for text in completions]
        with self._phase("reward"):
            scores, by_function = rewards(
                prompts=batch.prompts,
                completions=completions,
                completion_ids=completion_ids,
                columns=batch.columns,
                trainer_state=self.state,
            )
        return self._record(
            prompts=batch.prompts,
            prompt_ids=batch.prompt_ids,
            completions=completions,
            completion_ids=completion_ids,
            ended=ended,
            scores=scores,
            rewards_by_function=by_function,
        )

    def _record(self, **samples: Any) -> Rollout:
        """What policy, critic and reference say of this process's completions, joined with those of all others."""
        with self._phase("score"):
            return record_rollout(
                self.model,
                self.args,
                pad_token_id=self.sampler.pad_token_id,
                accelerator=self.accelerator,
                **samples,
            )

    def _learn(self, rollout: Rollout) -> dict[str, float]:
        """Turn a rollout into targets, update on them, steer the KL coefficient, and log."""
        args, state = self.args, self.state
        scores = shaped_scores(rollout, args, state.score_moments.update)
        targets = compute_targets(rollout, scores, args, kl_coef=state.kl_coef)
        with self._phase("update"):
            update = self.updater(rollout, targets, kl_coef=state.kl_coef, iteration=state.iteration)
        metrics = rollout_metrics(rollout) | target_metrics(rollout, targets) | update | {"kl_coef": state.kl_coef}
        if args.target_kl is not None:
            state.kl_coef = adapted_kl_coef(
                state.kl_coef,
                kl=metrics["ref_kl_per_completion"],
                target_kl=args.target_kl,
                horizon=args.kl_horizon,
                num_completions=len(rollout),
            )
        state.iteration += 1
        state.episodes += len(rollout)
        state.global_step += int(update["optimizer_steps"])
        self._emit("on_step_end")
        self._log_iteration(rollout, metrics)
        self._stop_if_not_finite(update)
        return metrics

    # The same loop in the user's own hands

    def generate(self, query_tensors: Sequence[Tensor]) -> list[Tensor]:
        """Sample one completion for each prompt from the current policy, as `train` does.

        Args:
            query_tensors: prompts, each (P_i,) int64 without padding.

        Returns:
            One (T_i,) int64 tensor per prompt: the completion alone, its end token included.
        """
        prompt_ids = id_lists("query_tensors", query_tensors, self._vocab_size())
        longest = max(map(len, prompt_ids)) + self.args.max_completion_length
        check_context("the longest prompt with max_completion_length", longest, max_positions(self.model.causal_lm))
        with self.accelerator.autocast():
            completion_ids, _ = self.sampler(self.model, prompt_ids)
        return [torch.tensor(ids, device=self.model.device) for ids in completion_ids]

    def step(
        self, queries: Sequence[Tensor], responses: Sequence[Tensor], scores: Sequence[Tensor | float] | Tensor
    ) -> dict[str, float]:
        """One iteration on completions and scores that you made yourself.

        Args:
            queries: prompts, each (P_i,) int64 without padding; as many as this process's share of
                `args.rollout_batch_size`.
            responses: completions sampled by the current policy, as `generate` gives them, each (T_i,) int64.
            scores: one finite number per completion.

        Returns:
            The metrics of the iteration.

        Raises:
            ValueError: wrong counts or shapes, an empty response, a score that is not finite, or more steps than
                `args.num_iterations`, beyond which no learning rate is planned.
        """
        if self.state.iteration >= self.args.num_iterations:
            raise ValueError(
                f"step() was called more often than num_iterations={self.args.num_iterations}, for which the learning "
                "rate was planned: raise num_iterations."
            )
        prompt_ids, completion_ids, numbers = checked_step(
            queries,
            responses,
            scores,
            share=len(self._share(self.args.num_prompts_per_iteration())) * self.args.num_completions_per_prompt,
            rollout_batch_size=self.args.rollout_batch_size,
            vocab_size=self._vocab_size(),
            context_length=max_positions(self.model.causal_lm),
            stop_token_ids=self.sampler.stop_token_ids,
        )
        self._emit("on_step_begin")
        rollout = self._record(
            prompts=self._decode(prompt_ids),
            prompt_ids=prompt_ids,
            completions=self._decode(completion_ids),
            completion_ids=completion_ids,
            ended=[self.sampler.has_ended(ids) for ids in completion_ids],
            scores=numbers,
            rewards_by_function={},
        )
        return self._learn(rollout)

    # Evaluation, saving

    def evaluate(self, eval_dataset: Dataset | list[dict[str, Any]] | None = None) -> dict[str, float]:
        """Sample and score completions of held-out prompts, with the same random numbers every time.

        Args:
            eval_dataset: other prompts than those given to the trainer.

        Returns:
            Means over all completions, named `eval_...`.

        Raises:
            ValueError: no dataset or no reward_funcs.
        """
        prompts = self._required(self._prompts(eval_dataset) or self.eval_prompts, "eval_dataset")
        self._required(self.reward_funcs, "reward_funcs").check_arguments(prompts.column_names)
        size = self.args.num_prompts_per_iteration()
        parts = []
        for number, start in enumerate(range(0, len(prompts), size)):
            chunk = list(range(start, min(start + size, len(prompts))))
            # Processes beyond the number of prompts repeat the last one; the repetitions are dropped again.
            world = self.accelerator.num_processes
            padded = chunk + [chunk[-1]] * max(0, world - len(chunk))
            mine = [padded[i] for i in self._share(len(padded))]
            parts.append(self._collect(prompts.batch(mine), EVAL, number).head(len(chunk)))
        rollout = concat_rollouts(parts)
        metrics = {f"eval_{name}": value for name, value in rollout_metrics(rollout).items()}
        if eval_dataset is not None:
            metrics[OTHER_PROMPTS] = 1.0
        rows = completion_rows(rollout, len(rollout), split="eval", iteration=self.state.iteration)
        self._seconds.clear()
        self._log(metrics, rows if self.args.log_completions else [])
        self._emit("on_evaluate", metrics=metrics)
        return metrics

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """Write the adapter (or model), the value head and the tokenizer.

        Args:
            output_dir: folder; None = `args.output_dir`.
        """
        if self.accelerator.is_main_process:
            folder = Path(output_dir or self.args.output_dir)
            self.model.save_pretrained(folder)
            self.processing_class.save_pretrained(folder)
        self.accelerator.wait_for_everyone()

    # Small parts

    def _prompts(self, dataset: Dataset | list[dict[str, Any]] | None) -> PromptDataset | None:
        if dataset is None:
            return None
        return PromptDataset(
            dataset,
            self.processing_class,
            max_prompt_length=self.args.max_prompt_length,
            truncate_prompts=self.args.truncate_prompts,
            text_prompt_length=self.args.text_prompt_length,
            max_completion_length=self.args.max_completion_length,
            context_length=max_positions(self.model.causal_lm),
            vocab_size=self._vocab_size(),
        )

    def _rewards(self, reward_funcs: RewardFunc | list[RewardFunc] | None) -> RewardFunctions | None:
        if reward_funcs is None:
            if self.args.reward_weights is not None:
                raise ValueError(f"reward_weights={self.args.reward_weights} needs reward_funcs.")
            return None
        rewards = RewardFunctions(reward_funcs, weights=self.args.reward_weights)
        for prompts in (self.train_prompts, self.eval_prompts):
            if prompts is not None:
                rewards.check_arguments(prompts.column_names)
        return rewards

    def _own_callbacks(self) -> list[TrainerCallback]:
        on_main = [JsonlLog(), self._progress] if self.accelerator.is_main_process else []
        return [*on_main, Trackers(self.accelerator)]

    def _required(self, part: Any, name: str) -> Any:
        if part is None:
            raise ValueError(f"this needs {name}: pass it to PPOTrainer, or run your own loop with generate and step.")
        return part

    def _vocab_size(self) -> int:
        return self.model.config.get_text_config().vocab_size

    def _share(self, count: int) -> list[int]:
        """Which of `count` items this process handles: a run of neighbours."""
        parts = np.array_split(np.arange(count), self.accelerator.num_processes)
        return [int(i) for i in parts[self.accelerator.process_index]]

    def _local_batch(self, prompts: PromptDataset, iteration: int) -> PromptBatch:
        """This process's prompts of an iteration, each repeated `num_completions_per_prompt` times."""
        size = self.args.num_prompts_per_iteration()
        order = prompt_order(seed=self.args.seed, iteration=iteration, batch_size=size, num_prompts=len(prompts))
        repeats = self.args.num_completions_per_prompt
        return prompts.batch([order[i] for i in self._share(size) for _ in range(repeats)])

    def _decode(self, rows: list[list[int]]) -> list[str]:
        return [
            self.processing_class.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            for ids in rows
        ]

    def _is_last(self) -> bool:
        return self.state.iteration == self.args.num_iterations or self.control.should_training_stop

    def _evaluation_is_due(self) -> bool:
        asked, self.control.should_evaluate = self.control.should_evaluate, False
        every = self.args.eval_every
        due = asked or self._is_last() or (every is not None and self.state.iteration % every == 0)
        return due and self.eval_prompts is not None

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        self._progress.phase(name)
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] += time.perf_counter() - start

    def _log_iteration(self, rollout: Rollout, metrics: dict[str, float]) -> None:
        seconds = sum(self._seconds.values())
        metrics["seconds"] = seconds
        metrics |= {f"seconds_{name}": value for name, value in self._seconds.items()}
        metrics["tokens_per_second"] = float(rollout.completion_mask.sum()) / max(seconds, 1e-9)
        self._seconds.clear()
        done = self.state.iteration
        asked, self.control.should_log = self.control.should_log, False
        rows = completion_rows(rollout, self.args.log_completions, split="train", iteration=done)
        due = asked or done % self.args.log_every == 0 or done == 1 or self._is_last()
        self._unlogged = None if due else (metrics, rows)
        if due:
            self._log(metrics, rows)

    def _log(self, metrics: dict[str, float], completions: list[dict[str, Any]]) -> None:
        state = self.state
        progress = {"iteration": state.iteration, "global_step": state.global_step, "episodes": state.episodes}
        logs = {**progress, **metrics}
        state.log_history.append(logs)
        self._emit("on_log", logs=logs, completions=completions)

    def _stop_if_not_finite(self, update: dict[str, float]) -> None:
        state = self.state
        state.nonfinite_iterations = state.nonfinite_iterations + 1 if update["skipped_steps"] else 0
        if state.nonfinite_iterations >= MAX_NONFINITE_ITERATIONS:
            raise RuntimeError(
                f"losses or gradients were NaN or infinite in {MAX_NONFINITE_ITERATIONS} iterations in a row, the "
                f"last time in {int(update['skipped_steps'])} of its optimizer steps; none of them was applied. Usual "
                f"causes: a learning rate too high (learning_rate={self.args.learning_rate}), or a base model whose "
                "activations overflow in its precision (try dtype='float32')."
            )

    def _emit(self, event: str, **kwargs: Any) -> None:
        self.control = self._callbacks(event, self.args, self.state, self.control, **kwargs)


def _as_list(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]
