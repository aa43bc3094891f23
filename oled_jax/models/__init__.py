"""Networks in Flax NNX: no policy, no host state, nothing from `offload/`. Begin with `registry.py`."""
