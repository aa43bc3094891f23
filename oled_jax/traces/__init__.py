"""Routing traces: recorded or synthetic, read by the simulator and by the locality report."""
