"""Claim: with a reward at the end only, advantages that look one step ahead learn later than GAE.

lambda 0 compares each token with the critic's guess at the next position, so the reward reaches earlier tokens only as
fast as the critic learns. lambda 0.95 sends it back through the whole completion at once.

    python recipes/lab/advantages.py

Time:         four to five minutes on 2 CPU cores.
Expect:       0.95 and 1 rise together, 0 behind them. At three times the learning rate 0 does not learn at all.
Change first: LAMBDAS.
"""

import statistics

from tiny_language import arguments, curve, draw, ends_well, figure, last, save, spread, train

LAMBDAS = {0.0: "tab:red", 0.95: "tab:green", 1.0: "tab:blue"}


def main() -> None:
    options = arguments(seeds=5, iterations=40)
    picture, (score, explained) = figure("stories that end well (score)", "explained variance of the critic")
    rows = [["lambda", "mean score of all iterations", "score at the end"]]
    results = {}
    for gae_lambda, color in LAMBDAS.items():
        logs = [
            train(ends_well, seed=seed, gae_lambda=gae_lambda, learning_rate=1e-3, num_iterations=options.iterations)[
                0
            ]
            for seed in range(options.seeds)
        ]
        draw(score, logs, "score", f"lambda {gae_lambda:g}", color)
        draw(explained, logs, "explained_variance", f"lambda {gae_lambda:g}", color)
        found = {
            "mean": [statistics.mean(curve(log, "score")) for log in logs],
            "end": [last(log, "score") for log in logs],
        }
        rows.append([f"{gae_lambda:g}", spread(found["mean"]), spread(found["end"])])
        results[f"{gae_lambda:g}"] = found
    save("advantages", picture, rows, results)


if __name__ == "__main__":
    main()
