"""The small trained model of this package: its data, the checks of its answers, and where its files are.

`families.py` is the way in. `training/` makes the model; nothing at run time needs it.
"""
