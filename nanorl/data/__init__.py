"""Where tasks come from and where rollouts are kept."""
