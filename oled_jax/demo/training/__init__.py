"""How the small model is made (`scripts/train_demo.py`). Needs optax; nothing at run time imports it."""
