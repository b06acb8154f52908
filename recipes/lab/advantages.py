"""Claim: with a reward at the end only, advantages that look one step ahead learn later than GAE.

lambda 0 compares each token with the critic's guess at the next position, so the reward reaches earlier tokens only as
fast as the critic learns. lambda 0.95 sends it back through the whole completion at once.

    python recipes/lab/advantages.py

Time:         seven to eight minutes on 2 CPU cores.
Expect:       0.95 and 1 rise together, 0 behind them; at three times the learning rate 0 does not learn at all.
Change first: RUNS.
"""

import statistics

from tiny_language import arguments, curve, draw, ends_well, figure, last, save, spread, train

RUNS = {  # (lambda, learning rate): color
    (0.0, 1e-3): "tab:red",
    (0.95, 1e-3): "tab:green",
    (1.0, 1e-3): "tab:blue",
    (0.0, 3e-3): "tab:orange",
    (0.95, 3e-3): "tab:olive",
}


def main() -> None:
    options = arguments(seeds=5, iterations=40)
    picture, (score, explained) = figure("stories that end well (score)", "explained variance of the critic")
    rows = [["lambda", "learning rate", "mean score of all iterations", "score at the end"]]
    results = {}
    for (gae_lambda, rate), color in RUNS.items():
        settings = {"gae_lambda": gae_lambda, "learning_rate": rate, "num_iterations": options.iterations}
        logs = [train(ends_well, seed=seed, **settings)[0] for seed in range(options.seeds)]
        name = f"lambda {gae_lambda:g}, rate {rate:g}"
        draw(score, logs, "score", name, color)
        draw(explained, logs, "explained_variance", name, color)
        found = {
            "mean": [statistics.mean(curve(log, "score")) for log in logs],
            "end": [last(log, "score") for log in logs],
        }
        rows.append([f"{gae_lambda:g}", f"{rate:g}", spread(found["mean"]), spread(found["end"])])
        results[name] = found
    explained.set_ylim(-1, 1)
    save("advantages", picture, rows, results)


if __name__ == "__main__":
    main()
