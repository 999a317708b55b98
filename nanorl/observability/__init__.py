"""Says what a run does while it goes on: store (every rollout), report (metrics, TensorBoard,
report.html), trackers, monitor (HTTP, Prometheus), alarms, diagnosis (why it does not learn),
trajectories (for other tools)."""
