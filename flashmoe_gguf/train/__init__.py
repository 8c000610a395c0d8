"""Training policies on traces. Only `network.py` needs torch, the extra `train`.

| module | owns |
|---|---|
| `states.py` | a trace as what the network sees and should answer |
| `network.py` | the paper's network, its fit and its table |
| `training.py` | both policies from traces to weights: splits, rounds, progress |
| `compare.py` | every policy on sequences that were not trained on |
| `file.py` | the policy file |
"""
