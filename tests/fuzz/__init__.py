"""Damaged model files by the hundred thousand, and what everything that reads them must do.

`make fuzz` runs them; README.md says how, and what was found.
"""
