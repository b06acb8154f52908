"""The smallest readable PPO, on a task where every number is visible.

`ppo.py` is the algorithm; its maths is `rlhf_kit.functional`, the functions that the language-model trainer calls.
`python -m cartpole_baseline --help` lists every setting.
"""
