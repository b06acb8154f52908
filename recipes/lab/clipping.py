"""Claim: clipping keeps repeated steps on one rollout from destroying the policy.

Six epochs per rollout and no KL penalty, so that nothing but the clip holds the policy back.

    python recipes/lab/clipping.py

Time:         four to five minutes on 2 CPU cores.
Expect:       without the clip, steps many times larger, and runs that lose what they had learned.
Change first: SETTINGS.
"""

import itertools

from tiny_language import arguments, curve, draw, ends_well, figure, last, save, spread, train

CLIPS = {"0.2": (0.2, "tab:green"), "off": (1e6, "tab:red")}
SETTINGS = {"ppo_epochs": 6, "learning_rate": 3e-3, "kl_coef": 0.0}


def main() -> None:
    options = arguments(seeds=5, iterations=30)
    picture, (score, step) = figure("stories that end well (score)", "approximate KL of an iteration, nats/token")
    step.set_yscale("log")
    rows = [["clip range", "score at the end", "largest loss of score from one iteration to the next", "largest step"]]
    results = {}
    for name, (clip_range, color) in CLIPS.items():
        logs = [
            train(ends_well, seed=seed, clip_range=clip_range, num_iterations=options.iterations, **SETTINGS)[0]
            for seed in range(options.seeds)
        ]
        draw(score, logs, "score", f"clip {name}", color)
        draw(step, logs, "approx_kl", f"clip {name}", color)
        scores = [curve(log, "score") for log in logs]
        found = {
            "end": [last(log, "score") for log in logs],
            "fall": [max(a - b for a, b in itertools.pairwise(s)) for s in scores],
            "step": [max(curve(log, "approx_kl")) for log in logs],
        }
        rows.append([name, *(spread(values) for values in found.values())])
        results[name] = found
    save("clipping", picture, rows, results)


if __name__ == "__main__":
    main()
