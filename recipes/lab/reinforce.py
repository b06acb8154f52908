"""Claim: REINFORCE learns from each rollout once and from raw returns; PPO gets further with the same samples.

REINFORCE here is the same trainer with what PPO adds taken away: one optimizer step per rollout, no critic (its head
keeps the zeros it starts with), full returns, no whitening. Its learning rate is tried at three values.

    python recipes/lab/reinforce.py

Time:         about five minutes on 2 CPU cores.
Expect:       PPO ahead of each of the three.
Change first: RATES.
"""

import statistics

from tiny_language import arguments, curve, draw, ends_well, figure, last, save, spread, train

RATES = [3e-3, 1e-2, 3e-2]
REINFORCE = {
    "ppo_epochs": 1,
    "mini_batch_size": 64,
    "gae_lambda": 1.0,
    "whiten_advantages": False,
    "value_learning_rate": 0.0,
}


def main() -> None:
    options = arguments(seeds=5, iterations=30)
    picture, (score,) = figure("stories that end well (score)")
    rows = [["algorithm", "mean score of all iterations", "score at the end"]]
    results = {}
    cases = {"PPO": {}} | {f"REINFORCE, rate {rate:g}": {**REINFORCE, "learning_rate": rate} for rate in RATES}
    for (name, settings), color in zip(cases.items(), ["tab:green", "gold", "tab:orange", "tab:red"], strict=True):
        logs = [
            train(ends_well, seed=seed, num_iterations=options.iterations, **settings)[0]
            for seed in range(options.seeds)
        ]
        draw(score, logs, "score", name, color)
        found = {
            "mean": [statistics.mean(curve(log, "score")) for log in logs],
            "end": [last(log, "score") for log in logs],
        }
        rows.append([name, spread(found["mean"]), spread(found["end"])])
        results[name] = found
    save("reinforce", picture, rows, results)


if __name__ == "__main__":
    main()
