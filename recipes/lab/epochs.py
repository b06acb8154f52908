"""Claim: several passes over a rollout get more out of the same samples than one.

    python recipes/lab/epochs.py

Time:         three to four minutes on 2 CPU cores.
Expect:       four epochs ahead of one, at the price of a larger step per iteration (approximate KL).
Change first: EPOCHS.
"""

import statistics

from tiny_language import arguments, curve, draw, ends_well, figure, last, save, spread, train

EPOCHS = {1: "tab:red", 4: "tab:green"}


def main() -> None:
    options = arguments(seeds=5, iterations=30)
    picture, (score, step) = figure("stories that end well (score)", "approximate KL of an iteration, nats/token")
    rows = [["epochs per rollout", "mean score of all iterations", "score at the end", "approximate KL"]]
    results = {}
    for epochs, color in EPOCHS.items():
        logs = [
            train(ends_well, seed=seed, ppo_epochs=epochs, num_iterations=options.iterations)[0]
            for seed in range(options.seeds)
        ]
        draw(score, logs, "score", f"{epochs} epochs", color)
        draw(step, logs, "approx_kl", f"{epochs} epochs", color)
        found = {
            "mean": [statistics.mean(curve(log, "score")) for log in logs],
            "end": [last(log, "score") for log in logs],
            "approx_kl": [statistics.mean(curve(log, "approx_kl")) for log in logs],
        }
        rows.append([str(epochs), *(spread(values) for values in found.values())])
        results[str(epochs)] = found
    save("epochs", picture, rows, results)


if __name__ == "__main__":
    main()
