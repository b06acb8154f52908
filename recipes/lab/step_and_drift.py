"""Claim: the clip bounds a step, the KL penalty bounds the drift; neither does the other's job.

Two by two: clip on or off, KL penalty on or off. The step is the approximate KL between the policy before and after an
iteration; the drift is the KL between the policy and the reference.

    python recipes/lab/step_and_drift.py

Time:         four to five minutes on 2 CPU cores.
Expect:       with the clip, steps several times smaller, whatever the penalty; without the penalty, all of the drift.
Change first: SETTINGS.
"""

import statistics

from tiny_language import arguments, curve, draw, figure, last, periods, save, spread, train

CASES = {
    "clip, KL": (0.2, 0.3, "tab:green"),
    "clip, no KL": (0.2, 0.0, "tab:blue"),
    "no clip, KL": (1e6, 0.3, "tab:orange"),
    "no clip, no KL": (1e6, 0.0, "tab:red"),
}
SETTINGS = {"ppo_epochs": 4, "learning_rate": 3e-3}


def main() -> None:
    options = arguments(seeds=3, iterations=40)
    picture, (step, drift) = figure("step: KL of one iteration, nats/token", "drift: KL to the reference, nats/token")
    step.set_yscale("log")
    rows = [["", "step, mean", "step, largest", "drift at the end", "full stops (score)"]]
    results = {}
    for name, (clip_range, kl_coef, color) in CASES.items():
        settings = {"clip_range": clip_range, "kl_coef": kl_coef, "num_iterations": options.iterations, **SETTINGS}
        logs = [train(periods, seed=seed, **settings)[0] for seed in range(options.seeds)]
        draw(step, logs, "approx_kl", name, color)
        draw(drift, logs, "ref_kl", name, color)
        found = {
            "mean step": [statistics.mean(curve(log, "approx_kl")) for log in logs],
            "largest step": [max(curve(log, "approx_kl")) for log in logs],
            "drift": [last(log, "ref_kl") for log in logs],
            "score": [last(log, "score") for log in logs],
        }
        rows.append([name, *(spread(values) for values in found.values())])
        results[name] = found
    save("step_and_drift", picture, rows, results)


if __name__ == "__main__":
    main()
