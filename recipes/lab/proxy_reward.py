"""Claim: a policy is only as good as its reward; past a point, more of a flawed reward is less of what was meant.

Meant is: sentences in which somebody feels well. The proxy that is trained on counts good words wherever they stand: a
reward model that has learned the words and not the sentence. What was meant is measured beside it, with weight 0.

    python recipes/lab/proxy_reward.py

Time:         two to three minutes on 2 CPU cores.
Expect:       without KL penalty the proxy rises to the end and what was meant rises, then falls to nothing; with one,
              both stay up.
Change first: COEFFICIENTS.
"""

from tiny_language import GOOD, arguments, curve, draw, figure, is_sentence, last, save, sentences, spread, train

COEFFICIENTS = {"no KL penalty": 0.0, "KL penalty 0.2": 0.2}


def proxy(completions: list[str], **kwargs: object) -> list[float]:
    return [float(sum(word in GOOD for word in text.split())) for text in completions]


def meant(prompts: list[str], completions: list[str], **kwargs: object) -> list[float]:
    found = [sentences(p, c) for p, c in zip(prompts, completions, strict=True)]
    return [float(sum(is_sentence(words) and words[-1] in GOOD for words in parts)) for parts in found]


def main() -> None:
    options = arguments(seeds=3, iterations=60)
    picture, panels = figure(*COEFFICIENTS)
    rows = [["", "proxy at the end", "meant, at its best", "meant, at the end", "what it writes"]]
    results = {}
    for axes, (name, kl_coef) in zip(panels, COEFFICIENTS.items(), strict=True):
        settings = {"kl_coef": kl_coef, "num_iterations": options.iterations, "reward_weights": [1.0, 0.0]}
        runs = [train([proxy, meant], seed=seed, **settings) for seed in range(options.seeds)]
        logs = [log for log, _ in runs]
        draw(axes, logs, "reward/proxy", "proxy: good words", "tab:red")
        draw(axes, logs, "reward/meant", "meant: good sentences", "tab:green")
        found = {
            "proxy": [last(log, "reward/proxy") for log in logs],
            "best": [max(curve(log, "reward/meant")) for log in logs],
            "end": [last(log, "reward/meant") for log in logs],
        }
        sample = runs[0][1].evaluation_rollout()
        text = f"*{sample.prompts[0]}* {sample.completions[0]}"
        rows.append([name, *(spread(values) for values in found.values()), text])
        results[name] = found | {"text": text}
    save("proxy_reward", picture, rows, results)


if __name__ == "__main__":
    main()
