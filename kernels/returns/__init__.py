"""Returns along a rollout: the estimates that PPO learns from."""
