"""PPOTrainer: collect a rollout, learn from it, repeat."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import set_seed
from datasets import Dataset
from peft import PeftConfig, PeftModel
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback, TrainerControl
from trl import is_conversational

from rlhf_kit.adapters import bare_again_on_error, describe_training
from rlhf_kit.card import write_model_card
from rlhf_kit.config import PPOConfig
from rlhf_kit.data import PromptBatch, PromptDataset, prompt_order
from rlhf_kit.identity import run_identity
from rlhf_kit.journal import Journal
from rlhf_kit.kl_control import adapted_kl_coef
from rlhf_kit.loading import max_positions
from rlhf_kit.metrics import OTHER_PROMPTS, rollout_metrics, target_metrics
from rlhf_kit.modeling import AutoModelForCausalLMWithValueHead
from rlhf_kit.preparation import (
    build_model,
    check_stop_ids,
    load_tokenizer,
    make_prompts,
    make_rewards,
    refuse_used_folder,
    warn_about_settings,
)
from rlhf_kit.processes import any_of_all, failing_together, make_accelerator, share_of
from rlhf_kit.resume import Checkpoints
from rlhf_kit.rewards import RewardFunc
from rlhf_kit.rollout import Rollout, concat_rollouts, record_rollout
from rlhf_kit.sampling import Sampler, seeded
from rlhf_kit.signals import StopSignals
from rlhf_kit.state import first_state, last_metrics
from rlhf_kit.step_input import check_context, checked_step, id_lists
from rlhf_kit.targets import compute_targets, shaped_scores
from rlhf_kit.update import Updater, end_if_never_finite

RewardSource = RewardFunc | str | PreTrainedModel | PeftModel
TRAIN, EVAL = 0, 1  # streams of random numbers


class PPOTrainer:
    """Proximal policy optimisation of a causal language model against reward functions and reward models.

    Args:
        model: a name, folder or loaded model; see `AutoModelForCausalLMWithValueHead.from_pretrained`.
        reward_funcs: one source or several: functions (see `rlhf_kit.rewards`), and reward models by name, folder or
            object (see `rlhf_kit.reward_models`). None = only `step` will be used.
        args: settings; None = the defaults.
        train_dataset: rows with a "prompt" column, text or messages; see `rlhf_kit.data`. None = only `step`.
        eval_dataset: the same for `evaluate`, which `train` calls before, between (`eval_every`) and after.
        processing_class: the tokenizer; None = loaded from the model's folder; for a loaded model, from its base's.
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
        reward_funcs: RewardSource | list[RewardSource] | None = None,
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
        refuse_used_folder(Path(args.output_dir), but_not_to_resume=True)
        self.accelerator = make_accelerator(args)
        set_seed(args.seed)
        with bare_again_on_error(model):  # so that a corrected call can be given the same loaded model
            self.model = build_model(model, args, peft_config, self.accelerator)
            if ref_model is not None or self.model.ref_model is None:
                self.model.create_reference(ref_model)
            self.processing_class = processing_class or load_tokenizer(model, self.model)
            self.sampler = Sampler(self.processing_class, args, self.model.generation_config)
            check_stop_ids(self.sampler.stop_token_ids, self.model.vocab_size)
            self.train_prompts = self._prompts(train_dataset)
            self.eval_prompts = self._prompts(eval_dataset)
            if args.eval_every is not None and eval_dataset is None:
                raise ValueError(f"eval_every={args.eval_every} needs an eval_dataset.")
            self.reward_funcs = make_rewards(
                reward_funcs,
                args,
                self.model,
                self.accelerator,
                stop_token_ids=self.sampler.stop_token_ids,
                prompts=[self.train_prompts, self.eval_prompts],
            )
        self.updater = Updater(self.model, args, self.accelerator)
        self.state = first_state(args, self.accelerator)
        self._journal = Journal(
            args,
            self.state,
            self.accelerator,
            _as_list(callbacks),
            model=self.model,
            processing_class=self.processing_class,
            optimizer=self.updater.optimizer,
            lr_scheduler=self.updater.lr_scheduler,
        )
        self._checkpoints = Checkpoints(
            args,
            self.accelerator,
            model=self.model,
            updater=self.updater,
            state=self.state,
            journal=self._journal,
            identity=run_identity(
                args,
                self.model,
                self.train_prompts,
                self.reward_funcs,
                self.accelerator,
                stop_token_ids=self.sampler.stop_token_ids,
            ),
            write_model=self._write_model,
        )
        if self.accelerator.is_main_process:
            print(describe_training(self.model))
        set_seed(args.seed, device_specific=True)  # generate() draws other samples in each process
        self._journal.emit("on_init_end")

    # The algorithm

    def train(self, resume_from_checkpoint: str | Path | bool | None = None) -> dict[str, float]:
        """Run the iterations that are left of `args.num_iterations`, then save the model to `args.output_dir`.

        Ctrl-C and SIGTERM let the iteration finish, save a checkpoint and end the training; the model itself is then
        not saved to `output_dir`. A second Ctrl-C ends at once.

        Args:
            resume_from_checkpoint: go on from a checkpoint, to the very numbers of a run that was never interrupted:
                a path, or True (or "last", as on a command line) for the newest in `args.output_dir`.

        Returns:
            The metrics of the last iteration, its number among them as "iteration": below `args.num_iterations` if a
            signal or a callback ended the training.

        Raises:
            ValueError: no train_dataset or no reward_funcs; an output_dir that holds another run; a checkpoint that
                is damaged or of another run.
            FileNotFoundError: no checkpoint to resume from.
            RuntimeError: losses or gradients were not finite in three iterations in a row.
        """
        prompts = self._required(self.train_prompts, "train_dataset")
        self._required(self.reward_funcs, "reward_funcs")
        if resume_from_checkpoint:
            self.load_checkpoint(resume_from_checkpoint)
        metrics = last_metrics(self.state)
        self.control.should_training_stop = False
        with self._journal.opened(), StopSignals() as signals:
            self._journal.emit("on_train_begin")
            self.state.evaluation_due |= self.eval_prompts is not None and self.state.iteration == 0
            self._evaluate_if_due()
            while self.state.iteration < self.args.num_iterations and not self.control.should_training_stop:
                batch = self._local_batch(prompts, self.state.iteration)
                rollout = self._collect(batch, TRAIN, self.state.iteration)
                metrics = self._learn(rollout)
                self.state.evaluation_due = self._evaluation_is_due()
                if any_of_all(self.accelerator, signals.requested()):
                    return self._stopped(metrics)  # an evaluation that is due comes first when the run goes on
                self._evaluate_if_due()
                if self._checkpoint_is_due():
                    self.save_checkpoint()
            self._journal.catch_up()
            self.save_model()
            self._journal.emit("on_train_end")
        return metrics

    def _collect(self, batch: PromptBatch, stream: int, number: int) -> Rollout:
        """Sample completions, have them scored, and record what policy, critic and reference say of them."""
        reward_funcs = self._required(self.reward_funcs, "reward_funcs")
        if stream == TRAIN:
            self._journal.emit("on_step_begin")
        key = (self.args.seed, stream, number, self.accelerator.process_index)
        with self._journal.phase("generate"), seeded(*key, device=self.model.device), self.accelerator.autocast():
            completion_ids, ended = self.sampler(self.model, batch.prompt_ids)
        completions: list[Any] = self.sampler.decode(completion_ids)
        if is_conversational({"prompt": batch.prompts[0]}):
            completions = [[{"role": "assistant", "content": text}] for text in completions]
        with self._journal.phase("reward"), failing_together(self.accelerator):
            rewards = reward_funcs(
                prompts=batch.prompts,
                completions=completions,
                prompt_ids=batch.prompt_ids,
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
            rewards=rewards,
        )

    def _record(self, **samples: Any) -> Rollout:
        """What policy, critic and reference say of this process's completions, joined with those of all others."""
        with self._journal.phase("score"):
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
        shaped = shaped_scores(rollout, args, state.score_moments.update)
        targets = compute_targets(rollout, *shaped, args, kl_coef=state.kl_coef)
        with self._journal.phase("update"):
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
        metrics["iteration"] = state.iteration
        state.episodes += len(rollout)
        state.global_step += int(update["optimizer_steps"])
        self._journal.emit("on_step_end")
        self._journal.iteration(rollout, metrics, last=self._is_last())
        end_if_never_finite(update, state, args)
        return metrics

    # The same loop in the user's own hands

    def generate(self, query_tensors: Sequence[Tensor]) -> list[Tensor]:
        """Sample one completion for each prompt from the current policy, as `train` does.

        Args:
            query_tensors: prompts, each (P_i,) int64 without padding.

        Returns:
            One (T_i,) int64 tensor per prompt: the completion alone, its end token included.
        """
        prompt_ids = id_lists("query_tensors", query_tensors, self.model.vocab_size)
        longest = max(map(len, prompt_ids)) + self.args.max_completion_length
        check_context("the longest prompt with max_completion_length", longest, max_positions(self.model.causal_lm))
        with self.accelerator.autocast():
            completion_ids, _ = self.sampler(self.model, prompt_ids)
        return [torch.tensor(ids, device=self.model.device) for ids in completion_ids]

    def step(
        self,
        queries: Sequence[Tensor],
        responses: Sequence[Tensor],
        scores: Sequence[Tensor | float | Sequence[float]] | Tensor,
    ) -> dict[str, float]:
        """One iteration on completions and scores that you made yourself.

        Args:
            queries: prompts, each (P_i,) int64 without padding; as many as this process's share of
                `args.rollout_batch_size`.
            responses: completions sampled by the current policy, as `generate` gives them, each (T_i,) int64.
            scores: of each completion one finite number, or one per token: each then stays at its token.

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
        prompt_ids, completion_ids, rewards = checked_step(
            queries,
            responses,
            scores,
            share=len(self._own_prompts()) * self.args.num_completions_per_prompt,
            rollout_batch_size=self.args.rollout_batch_size,
            vocab_size=self.model.vocab_size,
            context_length=max_positions(self.model.causal_lm),
            stop_token_ids=self.sampler.stop_token_ids,
        )
        self._journal.open()
        self._journal.emit("on_step_begin")
        rollout = self._record(
            prompts=self.sampler.decode(prompt_ids),
            prompt_ids=prompt_ids,
            completions=self.sampler.decode(completion_ids),
            completion_ids=completion_ids,
            ended=[self.sampler.has_ended(ids) for ids in completion_ids],
            rewards=rewards,
        )
        metrics = self._learn(rollout)
        if self._checkpoint_is_due():
            self.save_checkpoint()
        return metrics

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
        self._journal.open()
        rollout = self.evaluation_rollout(eval_dataset)
        metrics = {f"eval_{name}": value for name, value in rollout_metrics(rollout).items()}
        if eval_dataset is not None:
            metrics[OTHER_PROMPTS] = 1.0
        self._journal.evaluation(rollout, metrics)
        return metrics

    def evaluation_rollout(self, eval_dataset: Dataset | list[dict[str, Any]] | None = None) -> Rollout:
        """What `evaluate` samples and scores, token by token; nothing is logged. Arguments and errors as there."""
        prompts = self._required(self._prompts(eval_dataset) or self.eval_prompts, "eval_dataset")
        self._required(self.reward_funcs, "reward_funcs").check_arguments(prompts.column_names)
        size = self.args.num_prompts_per_iteration()
        parts = []
        for number, start in enumerate(range(0, len(prompts), size)):
            chunk = list(range(start, min(start + size, len(prompts))))
            # Processes beyond the number of prompts repeat the last one; the repetitions are dropped again.
            world = self.accelerator.num_processes
            padded = chunk + [chunk[-1]] * max(0, world - len(chunk))
            mine = [padded[i] for i in share_of(self.accelerator, len(padded))]
            parts.append(self._collect(prompts.batch(mine), EVAL, number).head(len(chunk)))
        return concat_rollouts(parts)

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """Write the adapter (or model), the value head, the tokenizer and a model card.

        Args:
            output_dir: folder; None = `args.output_dir`.
        """
        with failing_together(self.accelerator):
            if self.accelerator.is_main_process:
                self._write_model(Path(output_dir or self.args.output_dir))

    def merge_and_save(self, output_dir: str | Path) -> None:
        """Write an ordinary model folder with the adapters merged into the base, the tokenizer and a model card.

        Args:
            output_dir: folder that `AutoModelForCausalLM.from_pretrained` will load.

        Raises:
            ValueError: see `AutoModelForCausalLMWithValueHead.merge_and_save`.
        """
        with failing_together(self.accelerator):
            if self.accelerator.is_main_process:
                self.model.merge_and_save(output_dir)
                self.processing_class.save_pretrained(output_dir)
                write_model_card(Path(output_dir), self.model, self.args, self.state, merged=True)

    def save_checkpoint(self) -> Path:
        """Write all that is needed to go on from here, as `train` does every `args.save_every` iterations.

        Returns:
            The folder `checkpoint-<iteration>` in `args.output_dir`. It is a model folder too.
        """
        self._journal.open()
        folder = self._checkpoints.save()
        self._journal.emit("on_save")
        return folder

    def load_checkpoint(self, checkpoint: str | Path | bool = True) -> None:
        """Go on from a checkpoint: weights, optimizer, statistics, random numbers, and the log up to there.

        `train` calls this; call it yourself before a loop of your own.

        Args:
            checkpoint: a folder, or True (or "last") for the newest in `args.output_dir`.

        Raises:
            FileNotFoundError: there is none.
            ValueError: it is damaged, or of another run; every difference is listed, nothing was changed.
        """
        self._checkpoints.load(checkpoint)

    # Small parts

    def _prompts(self, dataset: Dataset | list[dict[str, Any]] | None) -> PromptDataset | None:
        return make_prompts(dataset, self.args, self.processing_class, self.model)

    def _required(self, part: Any, name: str) -> Any:
        if part is None:
            raise ValueError(f"this needs {name}: pass it to PPOTrainer, or run your own loop with generate and step.")
        return part

    def _own_prompts(self) -> list[int]:
        """Which of the prompts of an iteration this process handles."""
        return share_of(self.accelerator, self.args.num_prompts_per_iteration())

    def _local_batch(self, prompts: PromptDataset, iteration: int) -> PromptBatch:
        """This process's prompts of an iteration, each repeated `num_completions_per_prompt` times."""
        size = self.args.num_prompts_per_iteration()
        order = prompt_order(seed=self.args.seed, iteration=iteration, batch_size=size, num_prompts=len(prompts))
        repeats = self.args.num_completions_per_prompt
        return prompts.batch([order[i] for i in self._own_prompts() for _ in range(repeats)])

    def _evaluate_if_due(self) -> None:
        if self.state.evaluation_due:
            self.state.evaluation_due = False
            self.evaluate()

    @property
    def control(self) -> TrainerControl:
        """What callbacks asked for."""
        return self._journal.control

    def _is_last(self) -> bool:
        return self.state.iteration == self.args.num_iterations or self.control.should_training_stop

    def _evaluation_is_due(self) -> bool:
        asked, self.control.should_evaluate = self.control.should_evaluate, False
        every = self.args.eval_every
        due = asked or self._is_last() or (every is not None and self.state.iteration % every == 0)
        return due and self.eval_prompts is not None

    def _checkpoint_is_due(self) -> bool:
        asked, self.control.should_save = self.control.should_save, False
        every = self.args.save_every
        return asked or (every is not None and (self._is_last() or self.state.iteration % every == 0))

    def _stopped(self, metrics: dict[str, float]) -> dict[str, float]:
        """Save a checkpoint and end a training that a signal cut short."""
        self.save_checkpoint()
        self._journal.catch_up()
        self._journal.emit("on_train_end")
        if self.accelerator.is_main_process:
            print(
                f"Stopped after {self.state.iteration} of {self.args.num_iterations} iterations, with a checkpoint in "
                f"{self.args.output_dir}. To go on: train(resume_from_checkpoint=True); a recipe: the same command "
                f"with --output_dir {self.args.output_dir} --resume_from_checkpoint last."
            )
        return metrics

    def _write_model(self, folder: Path) -> None:
        self.model.save_pretrained(folder)
        self.processing_class.save_pretrained(folder)
        write_model_card(folder, self.model, self.args, self.state)


def _as_list(value: Any) -> list[Any]:
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]
