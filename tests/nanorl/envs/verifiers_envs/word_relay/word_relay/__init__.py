"""An environment in the layout that `vf-init word-relay --add-tool --add-harness` writes."""

from word_relay.harness import WordRelayHarness
from word_relay.taskset import WordRelayTaskset

__all__ = ["WordRelayHarness", "WordRelayTaskset"]
