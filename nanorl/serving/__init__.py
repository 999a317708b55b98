"""Serves a policy: endpoint (an API for agents, every token recorded) and training_service
(training by remote calls)."""
