"""The tool server: reads letters of the hidden word."""

import verifiers.v1 as vf


class WordRelayToolset(vf.Toolset[vf.SharedToolsetConfig]):
    TOOL_PREFIX = "word"

    @vf.tool
    def letter(self, place: int) -> str:
        """Return the letter at a place."""
        return "abcdefghijklmnopqrstuvwxyz"[place % 26]


if __name__ == "__main__":
    WordRelayToolset.run()
