"""Proxy, rollout, control plane: the one place that wires the other packages together."""
