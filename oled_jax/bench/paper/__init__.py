"""`python -m oled_jax.bench paper`: counterparts of the OLED-MoE paper's figures, measured or estimated on this system.

A figure is a module (or one of a few in a module) and a line in `registry.py`. What figures share: `subject.py` (what
is measured on), `estimates.py` (the simulator's part), `record.py` (rows), `plots.py` and `writers.py`.
"""
