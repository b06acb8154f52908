"""Claim: without a KL penalty the policy hacks its reward; with too high a one it never moves; in between it improves.

The reward counts full stops. The grammar says which sentences are still sentences, and steers nothing (weight 0).

    python recipes/lab/kl_penalty.py

Time:         two to three minutes on 2 CPU cores.
Expect:       no penalty: the highest score, no grammar left. Too high: score and text of the starting model.
Change first: COEFFICIENTS.
"""

from tiny_language import arguments, draw, figure, grammatical, last, periods, save, spread, train

COEFFICIENTS = {"none": 0.0, "moderate": 0.4, "too high": 20.0}
COLORS = ["tab:red", "tab:green", "tab:blue"]


def main() -> None:
    options = arguments(seeds=3, iterations=40)
    picture, (score, distance, grammar) = figure(
        "full stops (score)", "KL to the reference, nats/token", "grammatical"
    )
    rows = [["KL penalty", "score", "KL, nats/token", "grammatical sentences", "what it writes"]]
    results = {}
    for (name, coefficient), color in zip(COEFFICIENTS.items(), COLORS, strict=True):
        settings = {"kl_coef": coefficient, "num_iterations": options.iterations, "reward_weights": [1.0, 0.0]}
        runs = [train([periods, grammatical], seed=seed, **settings) for seed in range(options.seeds)]
        logs = [log for log, _ in runs]
        label = f"{name} ({coefficient:g})"
        draw(score, logs, "score", label, color)
        draw(distance, logs, "ref_kl", label, color)
        draw(grammar, logs, "reward/grammatical", label, color)
        sample = runs[0][1].evaluation_rollout()
        text = f"*{sample.prompts[0]}* {sample.completions[0]}"
        keys = ("score", "ref_kl", "reward/grammatical")
        results[name] = {key: [last(log, key) for log in logs] for key in keys} | {"text": text}
        rows.append([label, *(spread(results[name][key]) for key in keys), text])
    save("kl_penalty", picture, rows, results)


if __name__ == "__main__":
    main()
