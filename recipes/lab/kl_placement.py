"""Claim: a KL penalty in the reward and one in the loss are two algorithms, not two spellings of one.

In the reward, a token pays for all the distance that it leads to later, since credit flows back. In the loss, each
position is held to the reference by itself, given whatever came before. The same coefficient therefore does not mean
the same distance. tests/test_toy_optimum.py shows that the two have different closed-form optima.

    python recipes/lab/kl_placement.py

Time:         four to five minutes on 2 CPU cores.
Expect:       along each curve, more KL buys more score; at one coefficient the two are at different places.
Change first: COEFFICIENTS.
"""

from tiny_language import arguments, figure, last, periods, save, spread, train

COEFFICIENTS = [0.2, 0.5, 1.0]
PLACEMENTS = {
    "reward": {"kl_placement": "reward", "kl_estimator": "k1"},
    "loss": {"kl_placement": "loss", "kl_estimator": "full"},
}


def main() -> None:
    options = arguments(seeds=3, iterations=40)
    picture, (frontier,) = figure("score against KL, one point per seed")
    frontier.set_xlabel("KL to the reference, nats/token")
    frontier.set_ylabel("full stops (score)")
    rows = [["coefficient", "in the", "score", "KL, nats/token"]]
    results = {}
    for (place, settings), color in zip(PLACEMENTS.items(), ["tab:blue", "tab:orange"], strict=True):
        for coefficient in COEFFICIENTS:
            logs = [
                train(periods, seed=seed, kl_coef=coefficient, num_iterations=options.iterations, **settings)[0]
                for seed in range(options.seeds)
            ]
            found = {key: [last(log, key) for log in logs] for key in ("score", "ref_kl")}
            marker = dict(zip(COEFFICIENTS, "ov^", strict=True))[coefficient]
            frontier.scatter(
                found["ref_kl"], found["score"], color=color, marker=marker, label=f"{place}, {coefficient}"
            )
            rows.append([f"{coefficient:g}", place, spread(found["score"]), spread(found["ref_kl"])])
            results[f"{place} {coefficient}"] = found
    save("kl_placement", picture, rows, results)


if __name__ == "__main__":
    main()
