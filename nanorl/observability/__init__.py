"""Says what a run does while it goes on: store (every rollout), report (metrics, TensorBoard,
report.html), trackers, monitor (HTTP, Prometheus), alarms, trajectories (for other tools)."""
